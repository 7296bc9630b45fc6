"""forqctl create, delete, pause, resume, drain, set and restart."""

import json
from pathlib import Path
from typing import Any

import pytest

from forq.supervisor.control import Request
from tests.ctl.fake_supervisor import FakeSupervisor, busy_queue, forqctl, on_a_terminal, queue_status, whole_status


def test_create_sends_all_arguments_and_makes_paths_absolute(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers["queue.create"] = {}
    args = ["--handler", "m:f", "--type", "a=m:g", "--path", "lib", "--set", "timeout=5m", "--set", "rate="]
    assert forqctl(fake, "create", "emails", *args, cwd=tmp_path) == (0, "created emails\n", "")
    params = {
        "name": "emails",
        "handler": "m:f",
        "handlers": {"a": "m:g"},
        "path": [str(tmp_path / "lib")],
        "options": {"timeout": "5m", "rate": ""},
    }
    assert fake.calls == [("queue.create", params)]


@pytest.mark.parametrize(
    ("verb", "extra", "params", "out"),
    [
        ("delete", ["--force"], {"force": True}, "deleted q\n"),
        ("delete", [], {"force": False}, "deleted q\n"),
        ("pause", [], {}, "paused q\n"),
        ("resume", [], {}, "resumed q\n"),
        ("restart", [], {}, "restarted q\n"),
        ("drain", [], {}, "drained q\n"),
    ],
)
def test_queue_commands_send_one_request_and_confirm_it(
    fake: FakeSupervisor, verb: str, extra: list[str], params: dict[str, Any], out: str
) -> None:
    fake.answers[f"queue.{verb}"] = {}
    assert forqctl(fake, verb, "q", *extra) == (0, out, "")
    assert fake.calls == [(f"queue.{verb}", {"name": "q", **params})]


@pytest.mark.parametrize(
    "given",
    [
        ("timeout=5m", "rate="),
        ("--set", "timeout=5m", "--set", "rate="),
        ("--set", "timeout=5m", "rate="),
        ("--set=timeout=5m", "rate="),
    ],
)
def test_set_and_create_accept_the_same_option_syntax(fake: FakeSupervisor, given: tuple[str, ...]) -> None:
    fake.answers["queue.set"] = fake.answers["queue.create"] = {"name": "q"}
    options = {"timeout": "5m", "rate": ""}
    printed = ("set timeout=5m, rate= of q\n", "set rate=, timeout=5m of q\n")
    code, out, _ = forqctl(fake, "set", "q", *given)
    assert (code, out in printed) == (0, True)
    assert forqctl(fake, "create", "q", "--handler", "m:f", *given)[0] == 0
    assert [params["options"] for _, params in fake.calls] == [options, options]


def test_drain_prints_how_many_held_jobs_are_left(fake: FakeSupervisor) -> None:
    fake.answers["queue.drain"] = {"name": "q", "held": 0}
    assert forqctl(fake, "drain", "q") == (0, "drained q\n", "")
    fake.answers["queue.drain"] = {"name": "q", "held": 3}
    out = "drained q; held jobs left: 3; see: forqctl jobs q --state held\n"
    assert forqctl(fake, "drain", "q") == (0, out, "")
    assert json.loads(forqctl(fake, "drain", "q", "--json")[1]) == {"name": "q", "held": 3}


def test_drain_exits_with_6_when_the_wait_is_over(fake: FakeSupervisor) -> None:
    assert forqctl(fake, "drain", "q", "--wait", "100ms") == (
        6,
        "",
        "forqctl: queue q is not drained yet; draining continues\n",
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("paused", "queue emails is paused, so it does not drain; run: forqctl resume emails"),
        ("flapping", "queue emails is flapping, so it may not drain; see: forqctl logs emails"),
        (
            "config_error",
            "queue emails cannot be served, so it does not drain: no such module; fix it, then run: forqctl ",
        ),
    ],
)
def test_drain_reports_why_a_queue_does_not_drain(fake: FakeSupervisor, state: str, message: str) -> None:
    held: list[Request] = []

    def status(params: dict[str, Any]) -> dict[str, Any]:
        # At the second status, which is the same and prints nothing.
        if [method for method, _ in fake.calls].count("status") == 2:
            held[0].reply({"name": "emails"})
        return whole_status(queue_status(state=state, reason="no such module"))

    fake._server._verbs["queue.drain"] = held.append  # type: ignore[index]
    fake.answers["status"] = status
    code, out, err = forqctl(fake, "drain", "emails")
    assert (code, out) == (0, "drained emails\n")
    assert err.startswith(f"forqctl: {message}"), err
    assert err.count("\n") == 1


def test_drain_on_a_terminal_shows_the_remaining_jobs(fake: FakeSupervisor) -> None:
    held: list[Request] = []

    def drain(request: Request) -> None:
        held.append(request)

    def status(request: Request) -> None:
        request.reply(whole_status(queue_status()))
        if len(held) == 1:
            held.pop().reply({})

    fake._server._verbs["queue.drain"] = drain  # type: ignore[index]
    fake._server._verbs["status"] = status  # type: ignore[index]
    shown = on_a_terminal(fake, "drain", "emails")
    assert "queue emails is not drained yet: 12 waiting, 1 active" in shown
    assert shown.endswith("drained emails\r\n")


@pytest.mark.parametrize(
    ("jobs", "names"),
    [(0, ""), (1, ": j0 (0s)"), (7, ": j6 (21s), j5 (17s), j4 (14s), j3 (10s), j2 (7s), 2 more")],
)
def test_drain_lists_the_jobs_it_waits_for(fake: FakeSupervisor, jobs: int, names: str) -> None:
    held: list[Request] = []

    def status(params: dict[str, Any]) -> dict[str, Any]:
        # The second status request follows after more than a second.
        if [method for method, _ in fake.calls].count("status") == 3:
            held[0].reply({"name": "emails"})
        return whole_status(busy_queue(jobs))

    fake._server._verbs["queue.drain"] = held.append  # type: ignore[index]
    fake.answers["status"] = status
    code, out, err = forqctl(fake, "drain", "emails")
    assert (code, out) == (0, "drained emails\n")
    assert err.splitlines()[0] == f"forqctl: queue emails is not drained yet: 12 waiting, {jobs} active{names}"
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("verb", [("restart", "emails"), ("create", "emails", "--handler", "m:f")])
@pytest.mark.parametrize(
    ("importing", "message"),
    [
        (True, "importing the handler of emails (process 12, 4s; see: forqctl stack emails)"),
        (False, "the new processes of emails are ready; the old ones still run: j1 (3s), j0 (0s)"),
    ],
)
def test_restart_and_create_report_what_they_wait_for(
    fake: FakeSupervisor, verb: tuple[str, ...], importing: bool, message: str
) -> None:
    held: list[Request] = []
    queue = busy_queue(2)
    state = "importing" if importing else "imported"
    queue["children"].append({**queue["children"][0], "pid": 12, "state": state, "uptime_seconds": 4.2, "jobs": []})

    def status(params: dict[str, Any]) -> dict[str, Any]:
        # The second status request follows after more than a second.
        if [method for method, _ in fake.calls].count("status") == 3:
            held[0].reply({"name": "emails"})
        return whole_status(queue)

    fake._server._verbs[f"queue.{verb[0]}"] = held.append  # type: ignore[index]
    fake.answers["status"] = status
    code, _, err = forqctl(fake, *verb)
    assert code == 0
    assert set(err.splitlines()) == {f"forqctl: {message}"}
    assert len(err.splitlines()) <= 2
