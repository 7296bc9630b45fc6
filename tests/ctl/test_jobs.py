"""forqctl jobs, job, remove and cancel."""

import pytest

from tests.ctl.fake_supervisor import (
    FakeSupervisor,
    forqctl,
)


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
