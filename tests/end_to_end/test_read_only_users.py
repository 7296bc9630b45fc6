"""control_read_group: its members see the state of queues and jobs but no data, and change nothing."""

import grp
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

import pytest

from forq.errors import BY_CODE
from forq.supervisor.requests import READ_VERBS, Verbs
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

NOBODY = 65534
READERS, OPERATORS, OTHERS = "games", "staff", "mail"
SECRET = "4711-secret"
REFUSED = (
    *("app.restart", "config.plan", "config.apply"),
    *("queue.create", "queue.delete", "queue.pause", "queue.resume", "queue.drain", "queue.set", "queue.restart"),
    "queue.options",
    *(
        "push",
        "push_many",
        "recover",
        "cancel",
        "remove",
        "kill",
        "stack",
        "logs",
        "watch",
        "shutdown",
        "await",
        "dequeue",
        "ack",
    ),
    *("schedule", "schedules", "schedule.pause", "schedule.resume", "unschedule", "trigger"),
    *("job.run", "batch.cancel"),
    *("dead.list", "dead.groups", "dead.show", "dead.retry", "dead.discard"),
)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings=f'control_group = "{OPERATORS}"\ncontrol_read_group = "{READERS}"\n') as forq:
        # Lets others reach the socket; every file below keeps its own mode.
        os.chmod(forq.directory, 0o711)
        os.chmod(forq.state_dir, 0o711)
        forq.create("q", "raise_data", max_retries=0)
        forq.ctl("push", "q", json.dumps(SECRET), "--id", "dead", "--identifier", "shown")
        wait_until(lambda: forq.queue_status("q")["dead"] == 1, what="it failed")
        forq.ctl("pause", "q")
        forq.ctl("push", "q", json.dumps(SECRET), "--id", "waiting")
        yield forq


def ask_as(group: str, forq: Forq, method: str, **params: object) -> dict[str, Any]:
    """The answer that user nobody gets as a member of that group."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([grp.getgrnam(group).gr_gid])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(forq.state_dir / "control.sock"))
                request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                with suppress(BrokenPipeError):  # it was already refused
                    sock.sendall(json.dumps(request).encode() + b"\n")
                os.write(writing, sock.makefile("rb").readline())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        line = answer.read()
    os.waitpid(pid, 0)
    return json.loads(line)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("ping", {}),
        ("version", {}),
        ("status", {}),
        ("status", {"names": ["q"]}),
        ("supervisors", {}),
        ("jobs", {"name": "q"}),
        ("jobs", {"name": "q", "state": "dead"}),
        ("jobs", {"name": "q", "details": True}),
        ("jobs", {"name": "q", "state": "dead", "details": True}),
        ("jobs", {"name": "q", "state": "dead", "details": True, "filter": {"text": "shown"}}),
        ("job", {"name": "q", "id": "waiting"}),
        ("job", {"name": "q", "id": "dead"}),
        ("why", {"name": "q", "id": "waiting"}),
        ("why", {"name": "q", "id": "dead"}),
        ("why", {"name": "q", "id": "dead", "messages": True}),
    ],
)
def test_a_reader_may_read_and_sees_no_data(forq: Forq, method: str, params: dict[str, object]) -> None:
    answer = ask_as(READERS, forq, method, **params)
    assert "result" in answer, answer
    assert SECRET not in json.dumps(answer)


def test_a_reader_sees_the_state_of_a_job(forq: Forq) -> None:
    job = ask_as(READERS, forq, "job", name="q", id="dead")["result"]
    assert (job["id"], job["identifier"], job["state"]) == ("dead", "shown", "dead")
    assert [attempt["error"]["name"] for attempt in job["attempts"]] == ["ValueError"]
    assert not {"data", "result", "error", "progress"} & set(job)
    why = ask_as(READERS, forq, "why", name="q", id="dead")["result"]["why"]
    assert why.startswith("it failed for good: ValueError; ")


def test_a_reader_sees_details_of_jobs_in_a_list(forq: Forq) -> None:
    (job,) = ask_as(READERS, forq, "jobs", name="q", state="dead", details=True)["result"]["jobs"]
    assert (job["id"], job["identifier"], job["error"], job["attempts"]) == ("dead", "shown", "ValueError", 1)
    assert not {"data", "message"} & set(job)


def test_a_reader_cannot_guess_an_error_message_with_filters(forq: Forq) -> None:
    (group,) = ask_as(OPERATORS, forq, "dead.groups", name="q")["result"]["groups"]
    for wanted in ({"error": SECRET}, {"group": group["key"]}):
        params = {"name": "q", "state": "dead", "filter": wanted}
        assert len(ask_as(OPERATORS, forq, "jobs", **params)["result"]["jobs"]) == 1
        error = ask_as(READERS, forq, "jobs", **params)["error"]
        assert (error["data"]["code"], "filter jobs by error" in error["message"]) == ("permission", True)


def test_a_reader_sees_why_a_queue_cannot_be_served_but_none_of_its_code(forq: Forq) -> None:
    (forq.directory / "broken.py").write_text(f"{SECRET!r} + 1\n")
    forq.ctl("create", "broken", "--handler=broken:f", f"--path={forq.directory}", "--no-wait")
    wait_until(lambda: forq.queue_status("broken")["state"] == "config_error", what="it is config_error")
    assert SECRET in ask_as(OPERATORS, forq, "status")["result"]["queues"][0]["traceback"]
    forq.ctl("push", "broken", "1", "--id", "waits")
    for method, params in (("status", {}), ("why", {"name": "broken", "id": "waits"})):
        answer = json.dumps(ask_as(READERS, forq, method, **params)["result"])
        assert "TypeError" in answer
        assert SECRET not in answer
    forq.ctl("delete", "broken", "--force")


@pytest.mark.parametrize("method", REFUSED)
def test_everything_else_is_refused_with_the_reason(forq: Forq, method: str) -> None:
    error = ask_as(READERS, forq, method, name="q", id="waiting")["error"]
    assert error["data"]["code"] == "permission"
    assert (
        f"user {NOBODY} may not use {method}: members of control_read_group may use status, jobs, " in error["message"]
    )
    assert BY_CODE["permission"].exit_code == 5


def test_every_verb_is_either_open_to_readers_or_refused() -> None:
    assert sorted(Verbs(MagicMock(), MagicMock()).table_for_readers()) == sorted([*READ_VERBS, *REFUSED])


def test_an_operator_may_do_everything_and_others_nothing(forq: Forq) -> None:
    assert ask_as(OPERATORS, forq, "job", name="q", id="waiting")["result"]["data"] == SECRET
    assert SECRET in ask_as(OPERATORS, forq, "why", name="q", id="dead")["result"]["why"]
    error = ask_as(OTHERS, forq, "ping")["error"]
    assert error["data"]["code"] == "permission"
    assert error["message"] == f"user {NOBODY} may not use this control socket"


def test_with_only_a_read_group_the_socket_belongs_to_that_group() -> None:
    with running(settings=f'control_read_group = "{READERS}"\n') as forq:
        status = os.stat(forq.state_dir / "control.sock")
        assert (status.st_mode & 0o777, status.st_gid) == (0o660, grp.getgrnam(READERS).gr_gid)
