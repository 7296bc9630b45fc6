"""forqctl jobs, job, remove, cancel and dead."""

import json
import time
from typing import Any

import pytest

from forq import errors
from tests.ctl.fake_supervisor import FakeSupervisor, forqctl, on_a_terminal


def test_jobs_shows_one_page_and_the_command_for_the_next(fake: FakeSupervisor) -> None:
    fake.answers["jobs"] = {"jobs": [{"id": "1", "identifier": "a\x1b[31m", "state": "dead"}], "next": "c7"}
    out = "ID  STATE  IDENTIFIER\n1   dead   a\\x1b[31m\n"
    more = "more: forqctl jobs q --state dead --limit 1 --after c7\n"
    assert forqctl(fake, "jobs", "q", "--state", "dead", "--limit", "1", "--after", "c6") == (0, out, more)
    assert fake.calls == [("jobs", {"name": "q", "state": "dead", "limit": 1, "after": "c6"})]
    code, _, more = forqctl(fake, "jobs", "q", "--socket", fake.path)
    assert (code, more) == (0, f"more: forqctl jobs q --socket {fake.path} --after c7\n")


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


def test_job_shows_what_a_held_one_waits_for(fake: FakeSupervisor) -> None:
    waits_for = [
        {"kind": "job", "id": "a", "state": "active"},
        {"kind": "job", "id": "b", "state": "scheduled", "run_at": 1700000000.5},
        {"kind": "batch", "id": "c", "state": None},
        {"kind": "job", "id": "d", "state": None, "queue": "other"},
    ]
    fake.answers["job"] = {"id": "1", "waits_for": waits_for, "dependants": ["d", "e"], "dependant_count": 30}
    assert forqctl(fake, "job", "q", "1")[1].splitlines() == [
        "id              1",
        "waits_for       a (active), b (scheduled for 2023-11-14T22:13:20.500Z), batch c, job d of queue other",
        "dependants      d, e",
        "dependant_count 30",
    ]
    fake.answers["jobs"] = {"jobs": [{"id": "1", "identifier": "1", "state": "held"}], "next": None}
    assert forqctl(fake, "jobs", "q", "--state", "held")[:2] == (0, "ID  STATE  IDENTIFIER\n1   held   1\n")


def test_job_shows_the_batch_of_a_member_and_of_a_callback(fake: FakeSupervisor) -> None:
    fake.answers["job"] = {"id": "1", "batch": "b1", "member_of": {"queue": "q", "id": "b2", "number": 7}}
    assert forqctl(fake, "job", "q", "1")[1].splitlines() == [
        "id              1",
        "batch           b1",
        "member_of       batch b2 of queue q, number 7",
    ]


def test_a_time_beyond_the_calendar_is_shown_in_seconds(fake: FakeSupervisor) -> None:
    fake.answers["job"] = {"id": "1", "run_at": 9_007_199_254_740.0}
    code, out, err = forqctl(fake, "job", "q", "1")
    assert (code, err) == (0, "")
    assert "9007199254740 s after 1970" in out


@pytest.mark.parametrize(("verb", "field"), [("remove", "removed"), ("cancel", "cancelled")])
def test_remove_and_cancel_exit_with_4_if_there_is_no_such_job(fake: FakeSupervisor, verb: str, field: str) -> None:
    fake.answers[verb] = {field: True}
    assert forqctl(fake, verb, "q", "7") == (0, f"{field} 7\n", "")
    fake.answers[verb] = {field: False}
    assert forqctl(fake, verb, "q", "7") == (4, "", f"forqctl: queue q has no job 7 to {verb}; see: forqctl why q 7\n")
    assert fake.calls == [(verb, {"name": "q", "id": "7"})] * 2


def test_dead_list_shows_one_page_and_the_command_for_the_next(fake: FakeSupervisor) -> None:
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
def test_dead_retry_and_discard_handle_one_job_by_id(fake: FakeSupervisor, action: str, done: str) -> None:
    fake.answers[f"dead.{action}"] = {"id": "a@7"}
    assert forqctl(fake, "dead", action, "q", "a") == (0, f"{done} a@7\n", "")
    assert fake.calls == [(f"dead.{action}", {"name": "q", "id": "a"})]
    fake.answers[f"dead.{action}"] = errors.UnknownJob("none")
    assert forqctl(fake, "dead", action, "q", "a") == (4, "", "forqctl: none\n")


def chunk(done: int, refused: int = 0, left: int = 0, next: str | None = None) -> dict[str, Any]:
    return {"done": done, "refused": refused, "left": left, "next": next}


def test_dead_retry_all_continues_until_no_job_is_left(fake: FakeSupervisor) -> None:
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


def test_dead_retry_all_reports_its_progress_before_an_error(fake: FakeSupervisor) -> None:
    full = errors.QueueFull("queue q is full")
    fake.answers["dead.retry"] = lambda params: full if params.get("after") else chunk(98, left=1, next="9/0")
    assert forqctl(fake, "dead", "retry", "q", "--all") == (1, "", "forqctl: queue q is full; retried so far: 98\n")


def test_dead_retry_all_draws_its_progress_on_a_terminal(fake: FakeSupervisor) -> None:
    fake.answers["dead.retry"] = lambda params: chunk(50) if params.get("after") else chunk(50, left=50, next="9/0")
    shown = on_a_terminal(fake, "dead", "retry", "q", "--all")
    assert " 50% 50 retried" in shown
    assert shown.endswith("retried 100 jobs of q\r\n")


def test_jobs_are_filtered_until_the_page_is_full_or_all_are_scanned(fake: FakeSupervisor) -> None:
    job = {"id": "1", "identifier": "a", "state": "dead"}
    pages = {None: ([job], "dead/2/b@1"), "dead/2/b@1": ([job, job], "dead/1/a@1")}

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        found, following = pages[params.get("after")]
        return {"jobs": found, "next": following, "scanned": 10000}

    fake.answers["jobs"] = answer
    flags = ("--state", "dead", "--type", "mail", "--error", "Time", "--limit", "3", "--since", "1970-01-01T00:01Z")
    code, out, err = forqctl(fake, "jobs", "q", *flags)
    assert (code, len(out.splitlines())) == (0, 4)
    again = "--state dead --limit 3 --type mail --error Time --since 1970-01-01T00:01Z --after dead/1/a@1"
    assert err == f"more: forqctl jobs q {again}\n"
    wanted = {"type": "mail", "error": "Time", "since": 60.0}
    first = {"name": "q", "state": "dead", "limit": 3, "filter": wanted}
    assert fake.calls == [("jobs", first), ("jobs", {**first, "limit": 2, "after": "dead/2/b@1"})]
    assert json.loads(forqctl(fake, "jobs", "q", *flags, "--json")[1])["scanned"] == 20000


def test_a_time_may_be_a_duration_before_now(fake: FakeSupervisor) -> None:
    fake.answers["jobs"] = {"jobs": [], "next": None, "scanned": 0}
    forqctl(fake, "jobs", "q", "--state", "done", "--until", "2h")
    assert fake.calls[0][1]["filter"]["until"] == pytest.approx(time.time() - 7200, abs=5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--type", "mail"), "--type needs --state"),
        (("--state", "dead", "--since", "yesterday"), "time 'yesterday' is not allowed: a duration before now (2h)"),
    ],
)
def test_an_invalid_filter_is_refused(fake: FakeSupervisor, flags: tuple[str, ...], message: str) -> None:
    code, _, err = forqctl(fake, "jobs", "q", *flags)
    assert code == 2
    assert message in err
    assert fake.calls == []


def test_run_now_makes_a_scheduled_job_ready(fake: FakeSupervisor) -> None:
    fake.answers["job.run"] = {"id": "7"}
    assert forqctl(fake, "run-now", "q", "7") == (0, "7 is ready\n", "")
    assert fake.calls == [("job.run", {"name": "q", "id": "7"})]
    fake.answers["job.run"] = errors.UsageError("it is waiting")
    assert forqctl(fake, "run-now", "q", "7") == (2, "", "forqctl: it is waiting\n")


def test_dead_groups_adds_up_the_groups_of_all_pages(fake: FakeSupervisor) -> None:
    group = {"key": "k", "error": "KeyError", "type": "mail", "pattern": "no #", "count": 2, "newest_died_at": 60}
    newest = {**group, "sample": "b@2", "message": "no 2"}
    other = {**newest, "key": "l", "error": None, "type": None, "count": 3}
    pages = {None: ([newest], "5/a@1"), "5/a@1": ([other, {**newest, "count": 5, "sample": "a@1"}], None)}
    fake.answers["dead.groups"] = lambda params: dict(
        zip(("groups", "next"), pages[params.get("after")], strict=True), scanned=7
    )
    assert forqctl(fake, "dead", "groups", "q") == (
        0,
        "COUNT  TYPE  NEWEST                    SAMPLE  ERROR\n"
        "    7  mail  1970-01-01T00:01:00.000Z  b@2     KeyError: no #\n"
        "    3  -     1970-01-01T00:01:00.000Z  b@2     no #\n",
        "",
    )
    shown = json.loads(forqctl(fake, "dead", "groups", "q", "--json")[1])
    assert ([each["count"] for each in shown["groups"]], shown["scanned"]) == ([7, 3], 14)
    assert forqctl(fake, "dead", "groups", "q", "a")[0] == 2
