"""The types of the Python API name what settings, scripts and pages have."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from forq import Client, api_types
from forq.broker.inspect import Counts
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.supervisors import Supervisors
from forq.remote_control import LEVELS
from forq.schedules import Schedule
from forq.settings import MODES, OPTIONS, SERVICE
from tests.support.drive.one_queue import OneQueue, one_queue


def keys(typed_dict: Any) -> set[str]:
    return set(typed_dict.__annotations__)


def test_options_of_queues() -> None:
    assert keys(api_types.QueueOptions) == set(OPTIONS)
    assert get_args(api_types.Mode) == MODES


def test_counts_of_queues() -> None:
    assert get_type_hints(api_types.QueueStatus) == {field.name: field.type for field in fields(Counts)}


def test_fields_of_jobs_in_every_state(redis_url: str) -> None:
    with one_queue(redis_url, keep_done_ms=60_000) as queue:
        seen: set[str] = set()
        for state in ("waiting", "scheduled", "active", "held", "done", "dead"):
            in_state(queue, state)
            shown: Any = Client(queue.url).queue("q").job(state)
            assert shown["state"] == state
            assert set(shown) <= keys(api_types.JobInfo)
            seen |= set(shown)
        seen |= set(Client(queue.url).queue("q").job("active"))
        waits_for: Any = Client(queue.url).queue("q").job("held")["waits_for"]
        assert [set(each) for each in waits_for] == [
            keys(api_types.DependencyInfo) - {"queue"},
            {"kind", "id", "state"},
        ]
        assert set(get_args(api_types.JobState)) | {"blocked", "gone"} <= set(get_args(api_types.DependencyState))
        rare = {"trace", "result_error", "record_error", "snooze_count", "tick", "batch", "member_of"}
        assert keys(api_types.JobInfo) - seen == rare, "not of these jobs"
        page: Any = Client(queue.url).queue("q").dead().jobs[0]
        assert set(page) == keys(api_types.DeadBrief)
        job: Any = Client(queue.url).queue("q").jobs().jobs[0]
        assert set(job) == keys(api_types.JobBrief)


def in_state(queue: OneQueue, state: str) -> None:
    client = Client(queue.url).queue("q")
    after = ["scheduled", "active"] if state == "held" else ()
    run_in = 60 if state == "scheduled" else None
    client.enqueue({}, id=state, run_in=run_in, timeout="5m", expires_in="1h", after=after)
    if state in ("active", "done", "dead"):
        worker = queue.worker(state)
        worker.turn(want=10)
        if state != "active":
            worker.whole_turn(**{"done": [state], "results": {state: "1"}} if state == "done" else {"failed": [state]})


@pytest.mark.parametrize("broken", [False, True])
def test_fields_of_schedules(redis_url: str, broken: bool) -> None:
    with one_queue(redis_url) as queue:
        client = Client(queue.url).queue("q")
        client.schedule("a", every=60)
        if broken:
            queue.redis.hset(queue.key("schedules"), "a", b"nonsense\n{}\nnull")
        shown: Any = client.schedules()[0]
        assert set(shown) <= keys(api_types.ScheduleInfo)
        assert api_types.ScheduleInfo.__required_keys__ <= set(shown)


def test_fields_of_supervisors_and_levels_of_remote_control(redis_url: str) -> None:
    link = Link(redis_url)
    about = {"host": "h", "pid": 1, "version": "1", "protocol": 2, "state_dir": "/s", "config": None, "expiry_ms": 9000}
    supervisors = Supervisors(link, DEFAULT_PREFIX)
    supervisors.announce("p", 9000, about | {"remote_control": "off", "queues": [], "processes": 0})
    [shown] = Client(redis_url).supervisors()
    link.close()
    assert set(shown) == keys(api_types.SupervisorInfo)
    assert get_args(api_types.RemoteControl) == LEVELS == SERVICE["remote_control"].range


def test_words_of_schedules() -> None:
    for overlap in get_args(api_types.Overlap):
        for catch_up in get_args(api_types.CatchUp):
            Schedule.from_mapping("a", {"every": 60, "overlap": overlap, "catch_up": catch_up})
