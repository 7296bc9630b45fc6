"""The clerk's schedule verbs, called without a supervisor."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forq.errors import InvalidId, UnknownQueue, UnknownSchedule, UsageError
from forq.procs.loop import service_loop
from forq.services.clerk import Clerk
from tests.support.drive.contexts import context

QUEUE = {"mode": "work", "options": {}, "fail_handler": False, "reopening": False, "joining": False}


@pytest.fixture
def clerk(redis_url: str, tmp_path: Path) -> Clerk:
    clerk = Clerk(context(url=redis_url, logs_dir=tmp_path / "logs"), service_loop())
    clerk.create({"name": "q", **QUEUE})
    return clerk


def keys(clerk: Clerk, **params: Any) -> list[tuple[str, str]]:
    answer: Any = clerk.redis_verbs.schedules(params)
    return [(one["queue"], one["key"]) for one in answer["schedules"]]


def test_a_schedule_is_set_listed_and_ended(clerk: Clerk) -> None:
    clerk.create({"name": "other", **QUEUE})
    made: Any = clerk.redis_verbs.schedule({"name": "q", "key": "k", "cron": "0 3 * * *", "zone": "Asia/Kathmandu"})
    assert len(made["upcoming"]) == 5
    assert {tick["local"][10:] for tick in made["upcoming"]} == {"T03:00:00+05:45"}
    assert made["upcoming"][0]["at"] == made["next_at"]
    clerk.redis_verbs.schedule({"name": "other", "key": "o", "every": "1m"})
    assert keys(clerk) == [("other", "o"), ("q", "k")]
    assert keys(clerk, name="q") == [("q", "k")]
    assert clerk.redis_verbs.schedules({"name": "q", "key": "k"}) == {"schedules": [made]}
    ended = clerk.redis_verbs.unschedule({"name": "q", "key": "k"})
    assert ended == {"key": "k", "removed": True, "origin": "user"}
    assert keys(clerk) == [("other", "o")]


def test_a_dry_run_sets_nothing(clerk: Clerk) -> None:
    preview: Any = clerk.redis_verbs.schedule({"name": "q", "key": "k", "every": "90s", "dry_run": True})
    times = [tick["at"] for tick in preview["upcoming"]]
    assert [round(later - earlier, 3) for earlier, later in pairwise(times)] == [90.0] * 4
    assert keys(clerk) == []


@pytest.mark.parametrize(
    ("verb", "params", "error"),
    [
        ("schedule", {"name": "q", "key": "k"}, UsageError),
        ("schedule", {"name": "q", "key": "a b", "every": 60}, InvalidId),
        ("schedule", {"name": "q", "every": 60}, InvalidId),
        ("schedule", {"name": "none", "key": "k", "every": 60}, UnknownQueue),
        ("schedules", {"name": "none"}, UnknownQueue),
        ("schedules", {"name": "q", "key": "none"}, UnknownSchedule),
        ("unschedule", {"name": "q", "key": "none"}, UnknownSchedule),
        ("unschedule", {"name": "q"}, InvalidId),
        ("trigger", {"name": "q", "key": "none"}, UnknownSchedule),
        ("trigger", {"name": "q"}, InvalidId),
    ],
)
def test_invalid_requests_are_refused(clerk: Clerk, verb: str, params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        clerk.verbs()[verb](params)


def test_a_schedule_with_an_unknown_time_zone_is_shown_and_can_be_ended(clerk: Clerk) -> None:
    definition = '{"cron":"* * * * *","zone":"Moon/Crater"}\n{"catch_up":"once","origin":"user"}\n1'
    clerk._link.call("HSET", "forq:queue:{q}:schedules", "k", definition)
    shown: Any = clerk.redis_verbs.schedules({"name": "q", "key": "k"})
    assert "zone 'Moon/Crater' is not allowed" in shown["schedules"][0]["error"]
    clerk.redis_verbs.unschedule({"name": "q", "key": "k"})
    assert keys(clerk) == []


def test_opening_a_queue_sets_the_schedules_of_its_config_file(clerk: Clerk) -> None:
    """On every open. A queue without a config file keeps its schedules."""
    clerk.redis_verbs.schedule({"name": "q", "key": "mine", "every": "1h"})
    first: Any = clerk.create({"name": "q", **QUEUE, "schedules": {"a": {"every": "5m"}, "b": {"cron": "0 0 * * *"}}})
    assert first["unscheduled"] == []
    second: Any = clerk.create({"name": "q", **QUEUE, "schedules": {"a": {"every": "5m"}}})
    assert second["unscheduled"] == ["b"]
    clerk.create({"name": "q", **QUEUE, "schedules": None})
    assert keys(clerk) == [("q", "a"), ("q", "mine")]
