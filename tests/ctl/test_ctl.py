"""forqctl as people and scripts see it: a real process against a control server with a table of fake verbs."""

import json
import os
import pty
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forq import errors
from forq.ctl.client import ControlClient, wait_for_answer
from forq.ctl.commands import MODULES
from forq.ctl.commands.service import health_problems
from forq.supervisor.control import Request
from tests.ctl.fake_supervisor import (
    FORQCTL,
    FakeSupervisor,
    environment,
    forqctl,
    queue_status,
    whole_status,
)


def test_status_shows_an_aligned_table(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(), queue_status(name="b", state="paused", children=[]))
    assert forqctl(fake, "status") == (
        0,
        "QUEUE   STATE    WAITING  SCHEDULED  ACTIVE  DEAD   DONE  FAILED  OLDEST  CHILDREN\n"
        "emails  running       12          4       1     2  41207       3  1m15s   11 busy 01J, 12 parked\n"
        "b       paused        12          4       1     2  41207       3  1m15s   -\n",
        "",
    )
    assert fake.calls == [("status", {})]


def test_status_shows_a_few_of_many_processes(fake: FakeSupervisor) -> None:
    """While suspects run there may be dozens."""
    helpers = [{"role": "suspect", "pid": pid, "state": "busy", "job": f"j{pid}"} for pid in range(13, 20)]
    queue = queue_status()
    fake.answers["status"] = whole_status(queue | {"children": queue["children"] + helpers})
    assert forqctl(fake, "status")[1].splitlines()[1].endswith("12 parked, 13 busy j13, 14 busy j14, 5 more")


def test_status_without_queues_is_the_header(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status()
    code, out, _ = forqctl(fake, "status")
    assert (code, out) == (0, "QUEUE  STATE  WAITING  SCHEDULED  ACTIVE  DEAD  DONE  FAILED  OLDEST  CHILDREN\n")


def test_status_of_a_name_shows_processes_and_items(fake: FakeSupervisor) -> None:
    items = [{"id": "1", "identifier": "first"}, {"id": "2", "identifier": None}]
    fake.answers["status"] = whole_status(queue_status(items=items))
    code, out, _ = forqctl(fake, "status", "emails")
    assert code == 0
    assert out.splitlines()[2:] == [
        "",
        "emails: processes",
        "ROLE   PID  STATE   JOB  UPTIME  RESTARTS",
        "main    11  busy    01J  1m39s          2",
        "retry   12  parked  -    1h06m          0",
        "",
        "emails: items",
        "ID  IDENTIFIER",
        "1   first",
        "2   -",
    ]
    assert fake.calls == [("status", {"names": ["emails"]})]


def test_status_of_a_queue_shows_its_first_items_and_how_to_see_more(fake: FakeSupervisor) -> None:
    items = [{"id": str(number), "identifier": None} for number in range(100)]
    fake.answers["status"] = whole_status(queue_status(items=items))
    lines = forqctl(fake, "status", "emails")[1].splitlines()
    assert lines[-2:] == ["19  -", "more: forqctl jobs emails"]
    fake.answers["status"] = whole_status(queue_status(items=items[:20]))
    assert forqctl(fake, "status", "emails")[1].splitlines()[-1] == "19  -"


def test_status_shows_who_waits_for_capacity_and_who_holds_it(fake: FakeSupervisor) -> None:
    holds = {"worker": "a main", "units": 80, "priority": 1, "in_use": True, "seconds": 61.2}
    keeps = {"worker": "b main", "units": 10, "priority": 0, "in_use": False, "seconds": 5}
    waits = {"worker": "c main", "units": 40, "priority": 2, "seconds": 3.9}
    capacity = {"units": 100, "in_use": 80, "free": 10, "held": [holds, keeps], "waiting": [waits]}
    fake.answers["status"] = {**whole_status(queue_status(name="a")), "capacity": capacity}
    code, out, _ = forqctl(fake, "status")
    assert (code, out.splitlines()[2:]) == (
        0,
        [
            "",
            "capacity: 80 of 100 units in use, 10 free",
            "PROCESS         WORKERS  UNITS  PRIORITY  FOR",
            "a main   runs         1     80         1  1m01s",
            "b main   keeps        1     10         0  5s",
            "c main   waits        1     40         2  3s",
        ],
    )
    fake.answers["status"]["capacity"]["waiting"] = []
    assert "capacity" not in forqctl(fake, "status")[1], "without a shortage it is not worth a line"


def test_status_has_one_row_for_all_workers_of_a_process_that_do_the_same(fake: FakeSupervisor) -> None:
    def worker(queue: str, seconds: float, **more: Any) -> dict[str, Any]:
        return {"worker": f"{queue} main", "units": 10, "priority": 0, "seconds": seconds, **more}

    others = [worker(f"q{number}", 1, in_use=True) for number in range(100)]
    mine = [worker("big", number, in_use=number < 150) for number in range(200)]
    waits = [worker("big", 7) for _ in range(13)]
    capacity = {"units": 4000, "in_use": 2500, "free": 0, "held": others + mine, "waiting": waits}
    fake.answers["status"] = {**whole_status(queue_status(name="big")), "capacity": capacity}
    lines = forqctl(fake, "status", "big")[1].splitlines()
    begin = lines.index("capacity: 2500 of 4000 units in use, 0 free")
    assert [line.split() for line in lines[begin + 2 : begin + 6]] == [
        ["big", "main", "runs", "150", "1500", "0", "2m29s"],
        ["big", "main", "keeps", "50", "500", "0", "3m19s"],
        ["big", "main", "waits", "13", "130", "0", "7s"],
        ["q0", "main", "runs", "1", "10", "0", "1s"],
    ]
    assert lines[-1] == "and 83 more rows; all workers: forqctl status --json"
    assert len(lines[begin:]) == 23


def test_status_while_redis_is_down_shows_dashes_and_the_reason(fake: FakeSupervisor) -> None:
    counts = ("waiting", "scheduled", "active", "dead", "done", "failed", "oldest_waiting_seconds")
    fake.answers["status"] = whole_status(queue_status(**dict.fromkeys(counts)), redis_error="refused")
    code, out, _ = forqctl(fake, "status")
    assert code == 0
    assert out.splitlines()[1].split()[2:9] == ["-"] * 7
    assert out.splitlines()[2] == "redis: down: refused"


def test_json_is_one_document_wherever_the_flag_stands(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(name="ü"))
    before = forqctl(fake, "--json", "status")
    after = forqctl(fake, "status", "--json")
    assert before == after
    assert json.loads(before[1]) == fake.answers["status"]
    assert before[1].count("\n") == 1


def test_status_check_is_0_when_all_is_well(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(), queue_status(state="paused", children=[]))
    code, _, err = forqctl(fake, "status", "--check")
    assert (code, err) == (0, "")


def test_status_check_is_3_with_every_reason_on_one_line(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(state="flapping"), redis_error="refused")
    code, _, err = forqctl(fake, "status", "--check", "--json")
    assert (code, err) == (3, "forqctl: not healthy: redis is down: refused; queue emails is flapping\n")


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, 0),
        ({"state": "draining", "children": []}, 0),
        ({"state": "config_error"}, 1),
        ({"state": "stopped"}, 1),
        ({"children": []}, 1),
        ({"children": [{"role": "main", "pid": None, "state": "starting"}]}, 1),
        ({"children": [{"role": "main", "pid": 5, "state": "backoff"}]}, 1),
        ({"children": [{"role": "retry", "pid": 5, "state": "parked"}]}, 1),
    ],
)
def test_a_running_queue_needs_a_live_main_child(changes: dict[str, Any], faults: int) -> None:
    assert len(health_problems(whole_status(queue_status(**changes)))) == faults


def test_create_sends_everything_with_absolute_paths(fake: FakeSupervisor, tmp_path: Path) -> None:
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
def test_queue_verbs(fake: FakeSupervisor, verb: str, extra: list[str], params: dict[str, Any], out: str) -> None:
    fake.answers[f"queue.{verb}"] = {}
    assert forqctl(fake, verb, "q", *extra) == (0, out, "")
    assert fake.calls == [(f"queue.{verb}", {"name": "q", **params})]


def test_drain_gives_up_after_wait_with_6(fake: FakeSupervisor) -> None:
    assert forqctl(fake, "drain", "q", "--wait", "100ms") == (
        6,
        "",
        "forqctl: queue q is not drained yet; draining continues\n",
    )


@pytest.mark.parametrize(
    "given",
    [
        ("timeout=5m", "rate="),
        ("--set", "timeout=5m", "--set", "rate="),
        ("--set", "timeout=5m", "rate="),
        ("--set=timeout=5m", "rate="),
    ],
)
def test_set_and_create_take_options_in_the_same_forms(fake: FakeSupervisor, given: tuple[str, ...]) -> None:
    fake.answers["queue.set"] = fake.answers["queue.create"] = {"name": "q"}
    options = {"timeout": "5m", "rate": ""}
    said = ("set timeout=5m, rate= of q\n", "set rate=, timeout=5m of q\n")
    code, out, _ = forqctl(fake, "set", "q", *given)
    assert (code, out in said) == (0, True)
    assert forqctl(fake, "create", "q", "--handler", "m:f", *given)[0] == 0
    assert [params["options"] for _, params in fake.calls] == [options, options]


def test_jobs_shows_a_page_and_how_to_go_on(fake: FakeSupervisor) -> None:
    fake.answers["jobs"] = {"jobs": [{"id": "1", "identifier": "a\x1b[31m", "state": "dead"}], "next": "c7"}
    out = "ID  STATE  IDENTIFIER\n1   dead   a\\x1b[31m\n"
    more = "more: forqctl jobs q --state dead --limit 1 --after c7\n"
    assert forqctl(fake, "jobs", "q", "--state", "dead", "--limit", "1", "--after", "c6") == (0, out, more)
    assert fake.calls == [("jobs", {"name": "q", "state": "dead", "limit": 1, "after": "c6"})]
    code, _, more = forqctl(fake, "jobs", "q", "--socket", fake.path)
    assert (code, more) == (0, f"more: forqctl jobs q --socket {fake.path} --after c7\n")


def test_a_time_that_no_calendar_has_is_shown_all_the_same(fake: FakeSupervisor) -> None:
    fake.answers["job"] = {"id": "1", "run_at": 9_007_199_254_740.0}
    code, out, err = forqctl(fake, "job", "q", "1")
    assert (code, err) == (0, "")
    assert "9007199254740 s after 1970" in out


def test_job_shows_times_as_iso_8601_and_data_as_json(fake: FakeSupervisor) -> None:
    attempt = {"started_at": 1700000000.5, "ended_at": None, "outcome": "failed", "cause": "timeout"}
    fake.answers["job"] = {"id": "1", "data": {"a": "ü"}, "run_at": None, "enqueued_at": 0, "attempts": [attempt]}
    code, out, _ = forqctl(fake, "job", "q", "1")
    assert code == 0
    assert out.splitlines() == [
        "id              1",
        'data            {"a":"ü"}',
        "run_at          -",
        "enqueued_at     1970-01-01T00:00:00.000Z",
        "",
        "STARTED                   ENDED  OUTCOME  CAUSE",
        "2023-11-14T22:13:20.500Z  -      failed   timeout",
    ]


def test_push_prints_the_id(fake: FakeSupervisor) -> None:
    fake.answers["push"] = {"id": "01J"}
    args = ["--id", "7", "--identifier", "x y", "--priority", "0", "--token", "t", "--type", "a", "--if-exists", "skip"]
    assert forqctl(fake, "push", "q", *args, '{"a": [1, "ü"]}') == (0, "01J\n", "")
    params = {"id": "7", "identifier": "x y", "priority": 0, "token": "t", "type": "a", "if_exists": "skip"}
    assert fake.calls == [("push", {"name": "q", "data": {"a": [1, "ü"]}, **params})]


def test_push_takes_a_negative_number_for_data(fake: FakeSupervisor) -> None:
    fake.answers["push"] = {"id": "1"}
    assert forqctl(fake, "push", "q", "-5")[0] == 0
    assert fake.calls == [("push", {"name": "q", "data": -5})]


@pytest.mark.spec("M9")
@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (["--in", "10m"], {"run_in": 600}),
        (["--in", "0.25"], {"run_in": 0.25}),
        (["--at", "2026-12-01T09:00+01:00"], {"run_at": 1796112000}),
        (["--at", "2026-12-01T08:00:00.5Z"], {"run_at": 1796112000.5}),
        (["--at", "1796112000.25"], {"run_at": 1796112000.25}),
        (["--at", "2001-09-09T01:46:40Z"], {"run_at": 1000000000}),
    ],
)
def test_push_sends_when_a_job_may_run(fake: FakeSupervisor, given: list[str], sent: dict[str, float]) -> None:
    fake.answers["push"] = {"id": "1"}
    assert forqctl(fake, "push", "q", "1", *given) == (0, "1\n", "")
    assert fake.calls == [("push", {"name": "q", "data": 1, **sent})]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--in", "soon"], "duration 'soon'"),
        (["--in=-5s"], "duration '-5s'"),
        (["--in", "nan"], "duration 'nan'"),
        (["--at", "soon"], "--at 'soon'"),
        (["--at", "2026-12-01T09:00"], "a date with a zone"),
        (["--at", "2026-12-01"], "a date with a zone"),
        (["--at", "2026-13-01T09:00Z"], "a date with a zone"),
        (["--at", "nan"], "--at 'nan'"),
        (["--at", "inf"], "--at 'inf'"),
        (["--at=-1"], "--at '-1'"),
        (["--at", "1969-12-31T23:59Z"], "--at '1969-12-31T23:59Z'"),
        (["--in", "1m", "--at", "2026-12-01T09:00Z"], "cannot be combined"),
    ],
)
def test_push_refuses_a_time_that_is_none_without_asking(fake: FakeSupervisor, given: list[str], says: str) -> None:
    code, out, err = forqctl(fake, "push", "q", "1", *given)
    assert (code, out, fake.calls) == (2, "", [])
    assert says in err
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("text", ["{", "NaN", "1e999", '"\\ud800"', ""])
def test_push_refuses_what_is_not_json_without_asking(fake: FakeSupervisor, text: str) -> None:
    code, out, err = forqctl(fake, "push", "q", text)
    assert (code, out) == (2, "")
    assert err.startswith("forqctl: not JSON")
    assert fake.calls == []


def numbered(params: dict[str, Any]) -> dict[str, Any]:
    return {"ids": [str(number) for number, _ in enumerate(params["jobs"])]}


def test_push_file_sends_chunks_of_500(fake: FakeSupervisor, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("".join(f"{number}\n\n" for number in range(1201)))
    fake.answers["push_many"] = numbered
    args = ["--file", "jobs.jsonl", "--priority", "3", "--if-exists", "skip"]
    assert forqctl(fake, "push", "q", *args, cwd=tmp_path) == (0, "pushed 1201 jobs to q\n", "")
    assert [len(params["jobs"]) for _, params in fake.calls] == [500, 500, 201]
    assert {params["if_exists"] for _, params in fake.calls} == {"skip"}
    jobs = [job for _, params in fake.calls for job in params["jobs"]]
    assert jobs == [{"data": number, "priority": 3} for number in range(1201)]


def test_push_file_keeps_chunks_under_512_kib(fake: FakeSupervisor) -> None:
    fake.answers["push_many"] = numbered
    code, out, _ = forqctl(fake, "--json", "push", "q", "--file", "-", stdin=b'"%s"\n' % (b"x" * 200_000) * 5)
    assert (code, json.loads(out)) == (0, {"pushed": 5, "requests": 3})
    assert [len(params["jobs"]) for _, params in fake.calls] == [2, 2, 1]


def test_push_records_carry_their_own_fields(fake: FakeSupervisor) -> None:
    fake.answers["push_many"] = numbered
    stdin = b'{"data":1,"id":"a","priority":1}\n{"data":{"data":2}}\n'
    code, _, _ = forqctl(fake, "push", "q", "--file", "-", "--records", stdin=stdin)
    assert code == 0
    assert fake.calls[0][1]["jobs"] == [{"data": 1, "id": "a", "priority": 1}, {"data": {"data": 2}}]


@pytest.mark.parametrize("bad", [b"{", b'{"id":"x"}', b"5", b'{"data":1,"colour":2}'])
def test_a_bad_record_is_named_and_nothing_of_its_chunk_is_sent(fake: FakeSupervisor, bad: bytes) -> None:
    fake.answers["push_many"] = numbered
    stdin = b'{"data":1}\n' * 600 + bad + b"\n"
    code, out, err = forqctl(fake, "push", "q", "--file", "-", "--records", stdin=stdin)
    assert (code, out) == (2, "")
    assert err.startswith("forqctl: stdin: line 601: ")
    assert err.endswith("; pushed so far: 500\n")
    assert len(fake.calls) == 1


def test_a_refused_chunk_is_named_by_its_lines(fake: FakeSupervisor) -> None:
    fake.answers["push_many"] = errors.QueueFull("queue q is full")
    assert forqctl(fake, "push", "q", "--file", "-", stdin=b"1\n2\n") == (
        1,
        "",
        "forqctl: stdin: lines 1 to 2: queue q is full; pushed so far: 0\n",
    )


@pytest.mark.parametrize(("verb", "field"), [("remove", "removed"), ("cancel", "cancelled")])
def test_remove_and_cancel_are_4_when_there_was_nothing(fake: FakeSupervisor, verb: str, field: str) -> None:
    fake.answers[verb] = {field: True}
    assert forqctl(fake, verb, "q", "7") == (0, f"{field} 7\n", "")
    fake.answers[verb] = {field: False}
    assert forqctl(fake, verb, "q", "7") == (4, "", f"forqctl: queue q has no job 7 to {verb}; see: forqctl why q 7\n")
    assert fake.calls == [(verb, {"name": "q", "id": "7"})] * 2


def test_dead_list_shows_a_page_and_how_to_go_on(fake: FakeSupervisor) -> None:
    job = {"id": "a", "fence": 7, "identifier": "Ann", "died_at": 0, "error": "ValueError", "message": "no\x1b"}
    fake.answers["dead.list"] = {"jobs": [job, {**job, "error": None, "message": None}], "next": "5/a@7"}
    assert forqctl(fake, "dead", "list", "q", "--limit", "2", "--after", "9/b@1") == (
        0,
        "ID  FENCE  IDENTIFIER  DIED                      ERROR\n"
        "a   7      Ann         1970-01-01T00:00:00.000Z  ValueError: no\\x1b\n"
        "a   7      Ann         1970-01-01T00:00:00.000Z  -\n",
        "more: forqctl dead list q --limit 2 --after 5/a@7\n",
    )
    assert fake.calls == [("dead.list", {"name": "q", "limit": 2, "after": "9/b@1"})]


def test_dead_show_shows_data_attempts_and_the_traceback(fake: FakeSupervisor) -> None:
    error = {"name": "ValueError", "message": "no", "kind": "retriable", "traceback": "Traceback:\n  here\x1b"}
    attempts = [{"started_at": 0, "cause": "timeout"}, {"started_at": 1.5, "cause": "exception", "stack": None}]
    fake.answers["dead.show"] = {"id": "a", "data": {"a": 1}, "died_at": 2, "error": error, "attempts": attempts}
    assert forqctl(fake, "dead", "show", "q", "a@7")[1].splitlines() == [
        "id             a",
        'data           {"a":1}',
        "died_at        1970-01-01T00:00:02.000Z",
        "error name     ValueError",
        "error message  no",
        "error kind     retriable",
        "attempt 1      started_at=1970-01-01T00:00:00.000Z  cause=timeout",
        "attempt 2      started_at=1970-01-01T00:00:01.500Z  cause=exception",
        "",
        "Traceback:",
        "  here\\x1b",
    ]
    assert fake.calls == [("dead.show", {"name": "q", "id": "a@7"})]
    assert json.loads(forqctl(fake, "dead", "show", "q", "a@7", "--json")[1])["attempts"] == attempts


@pytest.mark.parametrize(("action", "done"), [("retry", "retried"), ("discard", "discarded")])
def test_dead_retry_and_discard_of_one_job(fake: FakeSupervisor, action: str, done: str) -> None:
    fake.answers[f"dead.{action}"] = {"id": "a@7"}
    assert forqctl(fake, "dead", action, "q", "a") == (0, f"{done} a@7\n", "")
    assert fake.calls == [(f"dead.{action}", {"name": "q", "id": "a"})]
    fake.answers[f"dead.{action}"] = errors.UnknownJob("none")
    assert forqctl(fake, "dead", action, "q", "a") == (4, "", "forqctl: none\n")


def chunk(done: int, refused: int = 0, left: int = 0, next: str | None = None) -> dict[str, Any]:
    return {"done": done, "refused": refused, "left": left, "next": next}


def test_dead_retry_all_goes_on_until_nothing_is_left(fake: FakeSupervisor) -> None:
    fake.answers["dead.retry"] = lambda params: chunk(1) if params.get("after") else chunk(98, 2, 1, "9/2")
    code, out, _ = forqctl(fake, "dead", "retry", "q", "--all")
    assert (code, out) == (
        1,
        "retried 99 jobs of q, 2 refused (a live job has the same id, or the record is broken)\n",
    )
    assert [params for _, params in fake.calls] == [
        {"name": "q", "all": True},
        {"name": "q", "all": True, "after": "9/2"},
    ]
    fake.answers["dead.discard"] = chunk(1)
    assert forqctl(fake, "dead", "discard", "q", "--all") == (0, "discarded 1 job of q\n", "")
    assert json.loads(forqctl(fake, "dead", "discard", "q", "--all", "--json")[1]) == {"discarded": 1, "refused": 0}


def test_dead_retry_all_says_how_far_it_came_before_an_error(fake: FakeSupervisor) -> None:
    full = errors.QueueFull("queue q is full")
    fake.answers["dead.retry"] = lambda params: full if params.get("after") else chunk(98, left=1, next="9/0")
    assert forqctl(fake, "dead", "retry", "q", "--all") == (1, "", "forqctl: queue q is full; retried so far: 98\n")


def test_dead_retry_all_shows_how_far_it_is_on_a_terminal(fake: FakeSupervisor) -> None:
    fake.answers["dead.retry"] = lambda params: chunk(50) if params.get("after") else chunk(50, left=50, next="9/0")
    shown = on_a_terminal(fake, "dead", "retry", "q", "--all")
    assert " 50% 50 retried" in shown
    assert shown.endswith("retried 100 jobs of q\r\n")


def log_line(job: str, queue: str = "q", **changes: Any) -> bytes:
    entry = {"queue": queue, "id": job, "identifier": job, "type": None, "priority": 5, "data": 1, "fence": 7}
    return json.dumps({**entry, "error": {"traceback": "x" * 100}, "enqueued_at": 1.5, **changes}).encode() + b"\n"


def known_none(params: dict[str, Any]) -> dict[str, Any]:
    return {"recovered": len(params["jobs"]), "known": 0, "left": []}


def test_recover_pushes_each_job_as_it_was_with_a_token_of_its_own(fake: FakeSupervisor, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(
        log_line("a", identifier="Ann", type="mail", priority=0, data={"x": None})
        + b"\n"
        + log_line("b")
        + log_line("b", fence=8)
        + log_line("c", fence=None, cause="deleted")
    )
    fake.answers["recover"] = known_none
    assert forqctl(fake, "recover", "log", cwd=tmp_path) == (0, "recovered 4, already there 0, left 0, broken 0\n", "")
    ((_, params),) = fake.calls
    tokens = [job.pop("token") for job in params["jobs"]]
    assert params["jobs"] == [
        {"id": "a", "data": {"x": None}, "identifier": "Ann", "priority": 0, "type": "mail"},
        {"id": "b", "data": 1, "priority": 5},
        {"id": "b", "data": 1, "priority": 5},
        {"id": "c", "data": 1, "priority": 5},
    ]
    assert params["name"] == "q"
    assert len(set(tokens)) == 4
    assert all(token.startswith("recover:") and len(token) == 40 for token in tokens)
    forqctl(fake, "recover", "log", cwd=tmp_path)
    assert [job["token"] for job in fake.calls[1][1]["jobs"]] == tokens


def test_recover_counts_what_is_there_and_names_what_is_broken(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = {"recovered": 1, "known": 1, "left": []}
    bad = [
        b"{\n",
        b'{"queue":"q","id":"x"}\n',
        log_line("a b"),
        log_line("c", priority="high"),
        log_line("d", queue=".."),
    ]
    stdin = log_line("a") + b"".join(bad) + log_line("e", data="x" * 3_000_000) + log_line("f")
    code, out, err = forqctl(fake, "recover", "-", stdin=stdin)
    assert (code, out) == (1, "recovered 1, already there 1, left 0, broken 6\n")
    assert [line.split(": ")[2] for line in err.splitlines()] == [f"line {number}" for number in range(2, 8)]
    assert [job["id"] for job in fake.calls[0][1]["jobs"]] == ["a", "f"]


def test_recover_sends_chunks_per_queue_or_all_to_one(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = known_none
    stdin = b"".join(log_line(f"a{n}") for n in range(700)) + log_line("b", queue="r")
    assert json.loads(forqctl(fake, "recover", "-", "--json", stdin=stdin)[1]) == {
        "recovered": 701,
        "already_there": 0,
        "left": 0,
        "broken": 0,
        "dry_run": False,
    }
    assert [(params["name"], len(params["jobs"])) for _, params in fake.calls] == [("q", 500), ("q", 200), ("r", 1)]
    fake.calls.clear()
    assert forqctl(fake, "recover", "-", "--queue", "s", stdin=stdin)[0] == 0
    assert {params["name"] for _, params in fake.calls} == {"s"}


def test_recover_dry_run_pushes_nothing_and_needs_no_supervisor() -> None:
    stdin = log_line("a") + b"rubbish\n"
    code, out, err = forqctl(None, "recover", "-", "--dry-run", stdin=stdin)
    assert (code, out) == (1, "would push 1, already there 0, left 0, broken 1\n")
    assert "stdin: line 2: not JSON" in err


def test_recover_ends_with_4_and_the_name_when_there_is_no_such_queue(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = errors.UnknownQueue("no queue 'q'")
    assert forqctl(fake, "recover", "-", stdin=log_line("a")) == (
        4,
        "",
        "forqctl: stdin: line 1: no queue 'q'; recovered so far: 0\n",
    )
    code, _, err = forqctl(fake, "recover", "/no/such/file")
    assert (code, err) == (2, "forqctl: cannot read /no/such/file: No such file or directory\n")


def test_recover_finds_the_one_job_that_is_too_much_for_its_queue(fake: FakeSupervisor) -> None:
    def push(params: dict[str, Any]) -> Any:
        large = any(len(str(job["data"])) > 10 for job in params["jobs"])
        return errors.InvalidData("larger than max_data") if large else known_none(params)

    fake.answers["recover"] = push
    stdin = log_line("a") + log_line("b", data="x" * 20) + log_line("c")
    code, out, err = forqctl(fake, "recover", "-", stdin=stdin)
    assert (code, out) == (1, "recovered 2, already there 0, left 0, broken 1\n")
    assert err == "forqctl: stdin: line 2: larger than max_data\n"


def test_recover_names_the_lines_that_it_left_and_says_what_to_do(fake: FakeSupervisor) -> None:
    fake.answers["recover"] = {"recovered": 1, "known": 0, "left": [1]}
    code, out, err = forqctl(fake, "recover", "-", stdin=b"\n" + log_line("a") + log_line("a", fence=8))
    assert (code, out) == (1, "recovered 1, already there 0, left 1, broken 0\n")
    assert err.splitlines() == [
        "forqctl: stdin: line 3: left: job a of queue q is live",
        "forqctl: lines left: 1; run the command again when the live jobs with their ids have ended",
    ]
    fake.answers["recover"] = lambda params: {"recovered": 0, "known": 0, "left": [*range(len(params["jobs"]))]}
    code, out, err = forqctl(fake, "recover", "-", stdin=b"".join(log_line(f"j{n}") for n in range(700)))
    assert (code, out) == (1, "recovered 0, already there 0, left 700, broken 0\n")
    assert len(err.splitlines()) == 11, "of many only the first are named"


def test_status_tells_of_a_failed_log_that_cannot_be_written(fake: FakeSupervisor) -> None:
    status = whole_status(queue_status())
    status["supervisor"]["failed_log"] = {"ok": False, "errors": {"emails": "disk full"}}
    fake.answers["status"] = status
    code, out, err = forqctl(fake, "status", "--check")
    assert code == 3
    assert out.splitlines()[-1] == "emails: failed log: disk full"
    assert err == "forqctl: not healthy: failed log of queue emails: disk full\n"


def test_ping_version_and_shutdown(fake: FakeSupervisor) -> None:
    fake.answers = {"ping": {"pong": True, "pid": 10}, "version": {"version": "9.9", "protocol": 1}, "shutdown": {}}
    fake.answers["shutdown"] = {"stopping": True, "pid": 0, "grace_seconds": 0.0}
    assert forqctl(fake, "ping") == (0, "pong from pid 10\n", "")
    assert forqctl(fake, "version")[1].splitlines()[1] == "supervisor 9.9, protocol 1"
    assert forqctl(fake, "shutdown", "--now", "--no-wait") == (0, "the supervisor is stopping\n", "")
    assert fake.calls[-1] == ("shutdown", {"now": True})


@pytest.mark.parametrize("cls", [*errors.BY_CODE.values()], ids=lambda cls: cls.code)
def test_an_error_is_one_line_and_its_exit_code(fake: FakeSupervisor, cls: type[errors.ForqError]) -> None:
    fake.answers["queue.pause"] = cls("no\nway")
    code, out, err = forqctl(fake, "pause", "q")
    assert code == (cls.exit_code if cls.exit_code < 8 else 1)
    assert (out, err) == ("", "forqctl: no\\nway\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stauts"], "unknown command 'stauts': did you mean status? (see forqctl --help)"),
        ([], "no command given (see forqctl --help)"),
        (["push", "q"], "push needs JSON or --file"),
        (["push", "q", "1", "--file", "x"], "push needs JSON or --file"),
        (["push", "q", "--file", "-", "--id", "1"], "--id is for a single job; with --file use --records"),
        (["create", "q", "--mode", "work"], "create needs --handler M:F, or --type T=M:F for each job type"),
        (["create", "q", "--handler", "m:f", "--set", "x"], "option 'x' is not allowed: the form is OPTION=VALUE"),
        (["set", "q"], "set needs at least one OPTION=VALUE, such as timeout=30s"),
        (["set", "q", "a=1", "--set", "a=2"], "option 'a' is given twice: '1' and '2'"),
        (["create", "q", "--handler", "m:f", "a=1", "a=1"], "option 'a' is given twice: '1' and '1'"),
        (["jobs", "q", "--limit", "0"], "--limit must be at least 1"),
        (["dead", "list", "q", "a"], "list takes neither ID nor --all"),
        (["dead", "list", "q", "--limit", "0"], "--limit must be at least 1"),
        (["dead", "show", "q"], "show needs an ID"),
        (["dead", "retry", "q"], "retry needs ID or --all"),
        (["dead", "discard", "q", "a", "--all"], "discard needs ID or --all"),
        (["dead", "retry", "q", "a", "--limit", "1"], "--limit and --after are only for list"),
    ],
)
def test_usage_errors_are_2_and_send_nothing(fake: FakeSupervisor, args: list[str], message: str) -> None:
    assert forqctl(fake, *args) == (2, "", f"forqctl: {message}\n")
    assert fake.calls == []


def test_no_answer_in_time_is_6(fake: FakeSupervisor) -> None:
    code, _, err = forqctl(fake, "ping", "--timeout", "100ms")
    assert (code, err) == (6, f"forqctl: no answer from the supervisor at {fake.path} within 0.1 s\n")


def test_unreachable_is_7_and_says_where_and_why(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    said = f"forqctl: cannot reach the supervisor at {path}: "
    assert forqctl(None, "--socket", path, "ping") == (7, "", f"{said}no such file\n")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        assert forqctl(None, "ping", "--socket", path) == (7, "", f"{said}connection refused\n")


def test_the_socket_is_found_beside_the_state(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers["ping"] = {"pong": True, "pid": 10}
    (tmp_path / "control.sock").symlink_to(fake.path)
    assert forqctl(None, "ping", FORQ_STATE_DIR=str(tmp_path))[0] == 0
    assert forqctl(None, "ping", STATE_DIRECTORY=f"{tmp_path}:/other")[0] == 0


def on_a_terminal(fake: FakeSupervisor, *args: str, **env: str) -> str:
    """What forqctl shows when its output is a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*FORQCTL, *args], stdout=theirs, stderr=theirs, env=environment(fake, **env))
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline and select.select([ours], [], [], 20)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode()


def test_colour_is_for_terminals_without_no_color(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status())
    assert "\x1b[32mrunning" in on_a_terminal(fake, "status", TERM="xterm", NO_COLOR="")
    assert "\x1b" not in on_a_terminal(fake, "status", TERM="xterm", NO_COLOR="1")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("paused", "queue emails is paused, so it does not drain; run: forqctl resume emails"),
        ("flapping", "queue emails is flapping, so it may not drain; see: forqctl logs emails"),
        (
            "config_error",
            "queue emails cannot be served, so it does not drain: no such module; fix it, then run: forqctl ",
        ),
    ],
)
def test_drain_says_what_keeps_a_queue_from_draining(fake: FakeSupervisor, state: str, says: str) -> None:
    held: list[Request] = []

    def status(params: dict[str, Any]) -> dict[str, Any]:
        # At the second look, which finds the same and so has nothing to say.
        if [method for method, _ in fake.calls].count("status") == 2:
            held[0].reply({"name": "emails"})
        return whole_status(queue_status(state=state, reason="no such module"))

    fake._server._verbs["queue.drain"] = held.append  # type: ignore[index]
    fake.answers["status"] = status
    code, out, err = forqctl(fake, "drain", "emails")
    assert (code, out) == (0, "drained emails\n")
    assert err.startswith(f"forqctl: {says}"), err
    assert err.count("\n") == 1


def test_drain_on_a_terminal_shows_what_is_left(fake: FakeSupervisor) -> None:
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


def busy_queue(jobs: int) -> dict[str, Any]:
    child = {"role": "main", "pid": 11, "state": "busy", "job": "j0", "uptime_seconds": 99.5, "restarts": 2}
    child |= {
        "jobs": [f"j{number}" for number in range(jobs)],
        "jobs_seconds": [3.5 * number for number in range(jobs)],
    }
    return queue_status(children=[child], active=jobs)


@pytest.mark.parametrize(
    ("jobs", "names"),
    [(0, ""), (1, ": j0 (0s)"), (7, ": j6 (21s), j5 (17s), j4 (14s), j3 (10s), j2 (7s), 2 more")],
)
def test_drain_names_the_jobs_that_it_waits_for(fake: FakeSupervisor, jobs: int, names: str) -> None:
    held: list[Request] = []

    def status(params: dict[str, Any]) -> dict[str, Any]:
        # The second look comes after more than a second.
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
    ("importing", "says"),
    [
        (True, "importing the handler of emails (process 12, 4s; see: forqctl stack emails)"),
        (False, "the new processes of emails are ready; the old ones still run: j1 (3s), j0 (0s)"),
    ],
)
def test_restart_and_create_name_what_they_wait_for(
    fake: FakeSupervisor, verb: tuple[str, ...], importing: bool, says: str
) -> None:
    held: list[Request] = []
    queue = busy_queue(2)
    state = "importing" if importing else "imported"
    queue["children"].append({**queue["children"][0], "pid": 12, "state": state, "uptime_seconds": 4.2, "jobs": []})

    def status(params: dict[str, Any]) -> dict[str, Any]:
        # The second look comes after more than a second.
        if [method for method, _ in fake.calls].count("status") == 3:
            held[0].reply({"name": "emails"})
        return whole_status(queue)

    fake._server._verbs[f"queue.{verb[0]}"] = held.append  # type: ignore[index]
    fake.answers["status"] = status
    code, _, err = forqctl(fake, *verb)
    assert code == 0
    assert set(err.splitlines()) == {f"forqctl: {says}"}
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("queue", "says"),
    [
        (busy_queue(2), "running jobs, at most 10s: emails j1 (3s), emails j0 (0s)"),
        (queue_status(), "the processes of emails"),
        (queue_status(children=[]), "the supervisor's services"),
    ],
)
def test_shutdown_names_what_the_supervisor_waits_for(fake: FakeSupervisor, queue: dict[str, Any], says: str) -> None:
    fake.answers["shutdown"] = {"stopping": True, "pid": 0, "grace_seconds": 10.0}
    fake.answers["status"] = whole_status(queue)
    code, out, err = forqctl(fake, "shutdown", "--timeout", "5s")
    told = err.splitlines()
    assert (code, out, told[-1]) == (6, "", "forqctl: the supervisor has not stopped yet; stopping continues")
    assert set(told[:-1]) == {f"forqctl: waiting for {says}"}
    assert len(told) <= 4, "more and more seldom"
    assert fake.calls[1] == ("status", {"counts": False})


def test_who_waits_gives_up_a_supervisor_that_does_not_answer(fake: FakeSupervisor) -> None:
    """It asks for the status once, and waits for the answer without asking again."""
    client = ControlClient(fake.path, timeout_seconds=1.0)
    wanted = client.send("queue.drain", {"name": "q"})
    began = time.process_time()
    with pytest.raises(errors.TimedOut, match=r"no answer from the supervisor at .* within 1 s"):
        wait_for_answer(client, wanted, {}, lambda waiting, status: None, None, "", lines=False)
    assert [method for method, _ in fake.calls] == ["queue.drain", "status"]
    assert time.process_time() - began < 0.5, "it sleeps meanwhile"
    client.close()


def test_completion_for_bash_offers_commands_and_flags() -> None:
    script = forqctl(None, "completion", "bash")[1]

    def offered(*words: str) -> list[str]:
        line = f"{script}\nCOMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
        shell = ["bash", "-c", line + '_forqctl; printf "%s\\n" "${COMPREPLY[@]}"']
        return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split()

    assert offered("forqctl", "re") == ["recover", "remove", "resume", "restart"]
    assert offered("forqctl", "dead", "s") == ["show"]
    assert offered("forqctl", "--socket", "x", "jobs", "q", "--state", "") == [
        "waiting",
        "scheduled",
        "active",
        "blocked",
        "retry",
        "done",
        "dead",
    ]
    assert "--if-exists" in offered("forqctl", "push", "q", "--i")
    assert offered("forqctl", "set", "q", "max_re") == ["max_retries="]
    assert offered("forqctl", "create", "q", "--set", "concurr") == ["concurrency="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str) -> None:
    code, out, _ = forqctl(None, "completion", shell)
    assert code == 0
    assert [name for name in MODULES if name not in out] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_command_has_help(name: str) -> None:
    code, out, _ = forqctl(None, name, "--help")
    assert code == 0
    assert f"usage: forqctl {name}" in out


def test_a_reader_that_leaves_early_causes_no_traceback(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(*[queue_status()] * 2000)
    line = f"{' '.join(FORQCTL)} status | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(fake), timeout=30)
    assert done.stdout.startswith("QUEUE")
    assert done.stderr == ""


def test_status_imports_nothing_heavy(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status())
    code = (
        "import sys; from forq.ctl.main import main; main(['status']); "
        "heavy = {'redis', 'psutil', 'logging', 'orjson', 'socket', 'selectors', 'dataclasses', 'inspect', 'shutil', "
        "'datetime', 'pathlib', 'asyncio', 'setproctitle'}; print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(fake))
    assert done.stderr == "[]\n"
