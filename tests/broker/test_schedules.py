"""Schedules in Redis: set, drop, fire and trigger; each call repeated, interleaved with others, and too early."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forq import Client
from forq.broker.claim import Settled
from forq.broker.enqueue import new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.schedules import DueTick, Schedules, pack_schedule
from forq.broker.scripts import script
from forq.errors import (
    Exists,
    IncompatibleProtocol,
    InvalidData,
    QueueFull,
    TooManySchedules,
    UnknownQueue,
    UnknownSchedule,
)
from forq.schedules import APP, CONFIG, Every, Schedule
from forq.version import PROTOCOL
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.scheduled_queue import HOUR_MS, ScheduleRig
from tests.support.drive.server import Server


@pytest.fixture
def rig(queue: OneQueue) -> Iterator[ScheduleRig]:
    rig = ScheduleRig(queue)
    yield rig
    rig.close()


def server_ms(rig: ScheduleRig) -> int:
    return rig.schedules.now_ms()


# Setting


@pytest.mark.spec("M11")
def test_an_interval_fires_at_once_and_its_job_matches_the_schedule(rig: ScheduleRig) -> None:
    before = server_ms(rig)
    tick_ms = rig.set(data={"n": [1, None, "\u00e4\n"]}, priority=3, type="t", overlap="queue")
    assert before <= tick_ms <= server_ms(rig)
    assert rig.promote() == pytest.approx(HOUR_MS, abs=2000)
    job = rig.queue.inspector.job(f"schedule:k:{tick_ms}")
    assert (job["data"], job["priority"], job["type"]) == ({"n": [1, None, "\u00e4\n"]}, 3, "t")
    assert job["identifier"].startswith("k 20")
    assert job["identifier"].endswith("+00:00")
    assert job["tick"] == tick_ms / 1000
    assert rig.queue.journal_events() == [("enqueued", f"schedule:k:{tick_ms}")]
    assert rig.queue.pending(3) == [f"schedule:k:{tick_ms}"]
    assert rig.waiting() == [""], "a worker blocked on the list of priority 5 is woken"
    assert rig.next_ms() == tick_ms + HOUR_MS
    assert rig.counts() == (1, 0, 0)


@pytest.mark.spec("M11")
def test_a_cron_rule_starts_at_its_first_time(rig: ScheduleRig) -> None:
    tick_ms = rig.set(cron="*/5 * * * *", zone="Europe/Berlin")
    assert tick_ms % 300_000 == 0
    assert 0 < tick_ms - server_ms(rig) <= 300_000
    assert rig.promote() == pytest.approx(tick_ms - server_ms(rig), abs=500)
    assert rig.queue.journal_events() == []


def test_the_same_definition_again_changes_nothing(rig: ScheduleRig) -> None:
    rig.set(data=1)
    rig.promote()
    next_ms = rig.next_ms()
    listener = rig.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(rig.queue.channel("due"))
    listener.get_message(timeout=1)
    assert rig.set(data=1) == next_ms == rig.next_ms()
    assert listener.get_message(timeout=0.1) is None
    assert rig.counts() == (1, 0, 0)
    listener.close()


def test_a_new_schedule_is_published_to_pulse(rig: ScheduleRig) -> None:
    listener = rig.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(rig.queue.channel("due"))
    listener.get_message(timeout=1)
    rig.set()
    assert listener.get_message(timeout=1)["data"] == b"0"
    tick_ms = rig.set("c", cron="0 0 * * *")
    assert int(listener.get_message(timeout=1)["data"]) == pytest.approx(tick_ms - server_ms(rig), abs=500)
    # A fast clock or a slow call: a time in the past is due now.
    args = (PROTOCOL, "late", "{}\n{}\n1", "", server_ms(rig) - 5000)
    assert rig.queue.link.run(script("set_schedule"), rig.queue.base, *args)[0] == 1
    assert listener.get_message(timeout=1)["data"] == b"0"
    listener.close()


def test_other_data_keeps_the_next_tick_and_the_counts(rig: ScheduleRig) -> None:
    rig.set(data=1, overlap="queue")
    rig.promote()
    next_ms = rig.pass_time(1000)
    assert rig.set(data=2, overlap="queue") == next_ms
    assert rig.counts() == (1, 0, 0)
    tick_ms = rig.pass_time(HOUR_MS + 7)
    rig.promote()
    assert rig.queue.inspector.job(f"schedule:k:{tick_ms}")["data"] == 2


def test_a_changed_interval_counts_from_the_last_run(rig: ScheduleRig) -> None:
    first = rig.set()
    rig.promote()
    assert rig.set(every="2h") == first + 2 * HOUR_MS
    assert rig.set(every="100ms") == pytest.approx(first + 100, abs=2000)


def test_a_changed_interval_is_due_at_once_if_it_never_ran_or_is_overdue(rig: ScheduleRig) -> None:
    rig.set("c", cron="0 0 1 1 *")
    assert rig.set("c", every="1h") == pytest.approx(server_ms(rig), abs=500)
    rig.set()
    rig.promote()
    key = rig.queue.key("schedules:runs")
    rig.redis.hset(key, "k", f"{server_ms(rig) - 3 * HOUR_MS} 1 0 0")
    assert rig.set(every="2h") == pytest.approx(server_ms(rig), abs=500)


def test_a_changed_cron_rule_has_a_new_next_tick(rig: ScheduleRig) -> None:
    rig.set(cron="0 0 1 1 *")
    tick_ms = rig.set(cron="* * * * *")
    assert 0 < tick_ms - server_ms(rig) <= 60_000
    assert rig.set(cron="* * * * *", zone="Asia/Kathmandu") >= tick_ms


def test_a_rule_that_had_ended_gets_a_new_next_tick(rig: ScheduleRig) -> None:
    rig.set(cron="* * * * *")
    rig.redis.zrem(rig.queue.key("schedules:next"), "k")
    assert rig.set(cron="* * * * *") == rig.next_ms()


def test_schedules_beyond_the_limit_are_refused(rig: ScheduleRig) -> None:
    rig.set("last")
    rig.redis.hset(rig.queue.key("schedules"), mapping={f"s{n}": "x" for n in range(999)})
    with pytest.raises(TooManySchedules, match="has 1000 schedules already"):
        rig.set("one-more")
    assert rig.next_ms("one-more") is None
    rig.set("last", every="2h")


def test_data_that_is_too_large_is_refused(rig: ScheduleRig) -> None:
    with pytest.raises(InvalidData, match="larger than 65536 bytes"):
        rig.set(data="x" * 65536)
    rig.queue.registry.configure("q", {"max_data": 10}, {})
    with pytest.raises(InvalidData, match="max_data = 10"):
        rig.set(data="123456789")
    rig.set(data="12345678")


def test_schedule_calls_for_an_unknown_queue_are_refused(redis_url: str) -> None:
    link = Link(redis_url)
    schedules = Schedules(link, DEFAULT_PREFIX, "none")
    schedule = Schedule.from_mapping("k", {"every": 60})
    for ask in (
        lambda: schedules.set(schedule),
        lambda: schedules.drop("k"),
        lambda: schedules.trigger("k"),
        schedules.all,
    ):
        with pytest.raises(UnknownQueue):
            ask()
    assert link.run(script("fire"), "forq:queue:{none}", "k", 1, "", "", 0) == [-1]
    assert link.call("KEYS", "*") == []
    link.close()


def test_a_client_of_another_protocol_cannot_set_a_schedule(rig: ScheduleRig) -> None:
    rig.queue.set_options(protocol=99)
    with pytest.raises(IncompatibleProtocol):
        rig.set()
    assert rig.next_ms() is None


# Dropping


def test_a_dropped_schedule_is_gone_and_its_jobs_stay(rig: ScheduleRig) -> None:
    rig.set()
    rig.promote()
    assert rig.schedules.drop("k") is True
    assert rig.schedules.drop("k") is False
    assert rig.waiting() == ["schedule:k"]
    assert rig.promote() is None
    assert rig.schedules.all() == []
    for key in ("schedules", "schedules:next", "schedules:runs"):
        assert not rig.redis.exists(rig.queue.key(key)), key


def test_a_tick_of_a_dropped_schedule_is_not_fired(rig: ScheduleRig) -> None:
    rig.set()
    (due,), now_ms = rig.due()
    rig.schedules.drop("k")
    assert rig.fire(due, now_ms) is False
    assert rig.queue.journal_events() == []
    assert rig.next_ms() is None


def test_schedules_removed_from_the_config_file_are_dropped_and_those_of_users_stay(rig: ScheduleRig) -> None:
    rig.set("mine")
    assert rig.schedules.apply({"a": {"every": "1h"}, "b": {"cron": "0 0 * * *"}}, CONFIG) == []
    next_ms = rig.next_ms("b")
    assert rig.schedules.apply({"b": {"cron": "0 0 * * *"}}, CONFIG) == ["a"]
    assert [(one["key"], one["origin"]) for one in rig.schedules.all()] == [("b", "config"), ("mine", "user")]
    assert rig.next_ms("b") == next_ms
    # The file takes over a schedule created by a user and drops it again.
    rig.schedules.apply({"mine": {"every": "1h"}}, CONFIG)
    assert rig.schedules.apply({}, CONFIG) == ["mine"]


def test_schedules_of_an_app_are_kept_until_they_are_removed_explicitly(rig: ScheduleRig) -> None:
    rig.set("filed", origin=CONFIG)
    assert rig.schedules.apply({"a": {"every": "1h"}, "b": {"every": "1h"}}, APP, remove=False) == []
    assert rig.schedules.apply({"b": {"every": "2h"}}, APP, remove=False) == []
    assert {one["key"]: one["origin"] for one in rig.schedules.all()} == {"a": APP, "b": APP, "filed": CONFIG}
    assert rig.schedules.apply({"b": {"every": "2h"}}, APP) == ["a"]
    assert {one["key"]: one["origin"] for one in rig.schedules.all()} == {"b": APP, "filed": CONFIG}


def test_a_schedule_changed_by_a_user_is_not_dropped_with_the_file(rig: ScheduleRig) -> None:
    rig.set("k", origin=CONFIG)
    old = pack_schedule(Schedule.from_mapping("k", {"every": "1h"}, CONFIG))
    rig.set("k")
    assert rig.schedules._drop("k", old) is False
    assert rig.next_ms() is not None


def test_a_deleted_queue_has_no_schedules(rig: ScheduleRig) -> None:
    rig.set()
    rig.promote()
    rig.queue.registry.delete("q", force=True)
    assert [key for key in rig.redis.keys("*") if b"schedules" in key] == []


# Firing


@pytest.mark.spec("M11")
def test_a_tick_is_fired_once_however_often_it_is_tried(rig: ScheduleRig) -> None:
    tick_ms = rig.set(overlap="queue")
    (due,), now_ms = rig.due()
    assert rig.due()[0] == [due], "every caller before the fire gets the same tick"
    assert [rig.fire(due, now_ms) for _ in range(3)] == [True, False, False]
    assert rig.queue.journal_events() == [("enqueued", f"schedule:k:{tick_ms}")]
    assert rig.counts() == (1, 0, 0)
    assert rig.due()[0] == []


def test_ticks_are_returned_when_they_are_due(rig: ScheduleRig) -> None:
    rig.set(cron="0 0 1 1 *")
    assert rig.due()[0] == []
    tick_ms = rig.pass_time((rig.next_ms() or 0) - server_ms(rig))
    assert [(due.key, due.tick_ms) for due in rig.due()[0]] == [("k", tick_ms)]


def test_a_late_pulse_comes_back_for_the_next_tick(rig: ScheduleRig) -> None:
    rig.set()
    (due,), now_ms = rig.due()
    for expected in (True, False):
        fired, wait_ms = rig.ticker.fire("q", due, now_ms)
        assert fired is expected
        assert wait_ms == pytest.approx(HOUR_MS, abs=2000)


def test_a_plan_that_waited_for_an_hour_does_nothing(rig: ScheduleRig) -> None:
    rig.set(overlap="queue")
    (old,), old_now_ms = rig.due()
    rig.promote()
    tick_ms = rig.pass_time(HOUR_MS + 1)
    assert rig.fire(old, old_now_ms) is False
    assert rig.next_ms() == tick_ms
    rig.promote()
    assert rig.fire(old, old_now_ms) is False
    assert rig.counts() == (2, 0, 0)


@pytest.mark.spec("M11")
def test_no_tick_is_fired_before_its_time_on_the_server(rig: ScheduleRig) -> None:
    """Whatever the clock of the caller."""
    rig.set(cron="0 0 1 1 *")
    tick_ms = rig.next_ms()
    assert tick_ms is not None
    head = pack_schedule(Schedule.from_mapping("k", {"cron": "0 0 1 1 *"})).rpartition(b"\n")[0]
    for now_ms in (tick_ms, tick_ms + 1000 * HOUR_MS):
        assert rig.fire(DueTick("k", tick_ms, head), now_ms) is False
    args = ("k", tick_ms, head, tick_ms + HOUR_MS, 1)
    assert rig.queue.link.run(script("fire"), rig.queue.base, *args)[1] == 0, "nor is it missed before its time"
    assert rig.next_ms() == tick_ms
    # Due, but the planned next tick is not.
    tick_ms = rig.pass_time(tick_ms - server_ms(rig) + 1000)
    more = ("k", tick_ms, head, tick_ms + 2 * HOUR_MS, 0, tick_ms, '"k"', 0, tick_ms + HOUR_MS, '"k"', 0)
    assert rig.queue.link.run(script("fire"), rig.queue.base, *more)[1] == 0
    assert rig.queue.journal_events() == []


@pytest.mark.parametrize(
    "change", [{"every": "2h"}, {"every": "1h", "catch_up": "all"}, {"every": "1h", "overlap": "skip"}]
)
def test_a_plan_for_another_definition_is_refused(rig: ScheduleRig, change: dict[str, Any]) -> None:
    tick_ms = rig.set(overlap="queue")
    (due,), now_ms = rig.due()
    rig.set(**change)
    rig.redis.zadd(rig.queue.key("schedules:next"), {"k": tick_ms})
    assert rig.fire(due, now_ms) is False
    assert rig.queue.journal_events() == []
    rig.promote()
    assert rig.counts() == (1, 0, 0)


def test_a_plan_made_before_a_data_change_is_valid_and_the_job_has_the_new_data(rig: ScheduleRig) -> None:
    rig.set(data="old")
    (due,), now_ms = rig.due()
    rig.set(data="new")
    assert rig.fire(due, now_ms) is True
    assert rig.queue.inspector.job("schedule:k")["data"] == "new"


@pytest.mark.spec("M11")
def test_a_tick_is_skipped_while_the_previous_job_is_unfinished(rig: ScheduleRig) -> None:
    """While it is waiting, active or scheduled for a retry, but not when it is dead."""
    rig.queue.registry.configure("q", {"max_retries": 1, "min_backoff_ms": 60_000, "max_backoff_ms": 60_000}, {})
    worker = rig.queue.worker()

    def tick() -> tuple[int, int, int]:
        rig.pass_time(HOUR_MS)
        rig.promote()
        return rig.counts()

    rig.set()
    rig.promote()
    assert tick() == (1, 1, 0), "waiting"
    worker.number += 1
    turn = worker.consumer.turn(worker.number, [], [], 0, 1)
    assert turn.jobs[0] == b"schedule:k"
    assert tick() == (1, 2, 0), "active"
    error = '{"name":"E","message":"no","kind":"retriable","traceback":null}'
    failed: Settled = ["schedule:k", turn.fence, 7, error, error, "retriable", "", "0.5"]
    worker.number += 1
    worker.consumer.turn(worker.number, [], failed, 0, 0)
    assert rig.queue.inspector.job("schedule:k")["state"] == "scheduled"
    assert tick() == (1, 3, 0), "scheduled for its retry"
    rig.queue.producer.cancel("schedule:k")
    assert tick() == (2, 3, 0), "cancelled"
    worker.number += 1
    turn = worker.consumer.turn(worker.number, [], [], 0, 1)
    failed = ["schedule:k", turn.fence, 7, error, error, "permanent", "", "0.5"]
    worker.number += 1
    worker.consumer.turn(worker.number, [], failed, 0, 0)
    assert rig.queue.inspector.job("schedule:k")["state"] == "dead"
    assert tick() == (3, 3, 0), "dead"


def test_with_overlap_queue_each_tick_creates_a_job(rig: ScheduleRig) -> None:
    rig.set(overlap="queue")
    rig.promote()
    first = rig.waiting()
    rig.pass_time(HOUR_MS + 7)
    rig.promote()
    assert len(rig.waiting()) == 2
    assert rig.waiting()[:1] == first
    assert rig.counts() == (2, 0, 0)


def test_ticks_of_a_paused_queue_are_fired(rig: ScheduleRig) -> None:
    rig.set()
    rig.queue.registry.pause("q", paused=True)
    rig.promote()
    rig.pass_time(HOUR_MS)
    rig.promote()
    assert rig.counts() == (1, 1, 0)


@pytest.mark.parametrize(
    ("catch_up", "counts"), [("once", (1, 0, 4)), ("all", (5, 0, 0)), ("none", (0, 0, 5))], ids=lambda value: str(value)
)
@pytest.mark.spec("M11")
def test_missed_ticks_follow_the_catch_up_policy(rig: ScheduleRig, catch_up: str, counts: tuple[int, int, int]) -> None:
    rig.set(catch_up=catch_up, overlap="queue")
    tick_ms = rig.pass_time(4 * HOUR_MS + 5000)
    while rig.promote() == 0:
        pass
    assert rig.counts() == counts
    assert rig.next_ms() == tick_ms + 5 * HOUR_MS
    newest = [f"schedule:k:{tick_ms + number * HOUR_MS}" for number in range(5)][5 - counts[0] :]
    assert rig.waiting() == newest


def test_very_many_missed_ticks_are_caught_up_in_several_calls(rig: ScheduleRig) -> None:
    rig.set(catch_up="all", overlap="queue")
    tick_ms = rig.pass_time(1099 * HOUR_MS)
    calls = 1
    while rig.promote() == 0:
        calls += 1
    assert calls == 10
    assert rig.counts() == (1000, 0, 100)
    assert rig.waiting() == [f"schedule:k:{tick_ms + number * HOUR_MS}" for number in range(100, 1100)]


def test_a_tick_of_a_full_queue_is_missed_and_counted(rig: ScheduleRig) -> None:
    rig.queue.registry.configure("q", {"max_items": 2}, {})
    rig.set(catch_up="all", overlap="queue")
    rig.pass_time(2 * HOUR_MS)
    rig.promote()
    assert rig.counts() == (2, 0, 1)
    assert len(rig.waiting()) == 2
    assert rig.promote() == pytest.approx(HOUR_MS, abs=2000)


def test_blocked_jobs_count_towards_max_items_of_a_tick(rig: ScheduleRig) -> None:
    rig.queue.registry.configure("q", {"max_items": 2}, {})
    rig.queue.enqueue("a")
    rig.queue.worker().turn(want=1)
    rig.queue.enqueue("a", if_exists="update")
    rig.set()
    rig.promote()
    assert rig.counts() == (0, 0, 1)


def test_jitter_delays_the_job_and_not_the_tick(rig: ScheduleRig) -> None:
    tick_ms = rig.set(jitter="40m")
    (due,), now_ms = rig.due()
    assert rig.fire(due, now_ms) is True
    job = rig.queue.inspector.job("schedule:k")
    assert (job["state"], round(job["run_at"] * 1000)) == ("scheduled", tick_ms + 600_000)
    assert [verb for verb, _ in rig.queue.journal_events()] == ["enqueued", "scheduled"]
    assert rig.next_ms() == tick_ms + HOUR_MS
    assert rig.promote() == pytest.approx(600_000, abs=2000)


def test_a_schedule_without_a_next_tick_stays_and_is_never_due(rig: ScheduleRig) -> None:
    tick_ms = rig.set()
    (due,), _ = rig.due()
    args = ("k", tick_ms, due.head, "", 0, tick_ms, '"k"', "0")
    assert rig.queue.link.run(script("fire"), rig.queue.base, *args) == [1, 1, -1]
    assert rig.promote() is None
    assert rig.schedules.all()[0]["next_at"] is None
    assert rig.schedules.one("k")["upcoming"] == []


@pytest.mark.parametrize("mode", ["auto_release", "on_request"])
def test_in_the_release_modes_a_tick_creates_an_item_that_expires(redis_url: str, mode: str) -> None:
    with one_queue(redis_url, mode=mode, item_timeout_ms=60_000) as queue:
        rig = ScheduleRig(queue)
        rig.set(jitter="4m")
        (due,), now_ms = rig.due()
        rig.fire(due, now_ms)
        expires_ms = rig.redis.zscore(queue.key("expiries"), "schedule:k")
        assert expires_ms == due.tick_ms + 60_000 + 60_000, "its age counts from its run_at"
        rig.close()


# Next time


def test_promote_and_heartbeats_return_the_time_of_the_next_tick(rig: ScheduleRig) -> None:
    rig.set()
    rig.promote()
    rig.pass_time(HOUR_MS - 10_000)
    beat = rig.queue.recovery().heartbeat("q", 15_000, [])
    assert beat.due_ms == pytest.approx(10_000, abs=2000)
    assert rig.promote() == pytest.approx(10_000, abs=2000)
    rig.queue.producer.enqueue([new_job(1, run_in=5)])
    assert rig.promote() == pytest.approx(5_000, abs=2000), "the job is due before the tick"
    rig.pass_time(8_000)
    assert rig.promote() == pytest.approx(2_000, abs=1500), "the tick is due before the job"
    rig.pass_time(8_000)
    assert rig.queue.recovery().heartbeat("q", 15_000, []).due_ms == 0


def test_a_tick_that_cannot_be_fired_blocks_no_others_and_is_reported_by_heartbeats(
    rig: ScheduleRig, caplog: pytest.LogCaptureFixture
) -> None:
    for key, definition in (
        ("a", b"what is this"),
        ("b", b'{"cron":"* * * * *","zone":"Moon/Crater"}\n{"catch_up":"once","origin":"user"}\n1'),
    ):
        rig.redis.hset(rig.queue.key("schedules"), key, definition)
        rig.redis.zadd(rig.queue.key("schedules:next"), {key: 1})
    rig.set()
    assert rig.promote() == pytest.approx(HOUR_MS, abs=2000), "a tick that cannot be fired causes no immediate retry"
    assert rig.counts() == (1, 0, 0)
    assert rig.queue.recovery().heartbeat("q", 15_000, []).due_ms == 0
    assert "schedule=a error=broken schedule definition" in caplog.text
    assert "schedule=b error=zone 'Moon/Crater' is not allowed" in caplog.text
    assert [one.get("error") is None for one in rig.schedules.all()] == [False, False, True]


@pytest.mark.parametrize(
    "definition",
    [
        pytest.param(b'{"cron":"* * * * *","zone":"Moon/Crater"}\n{"catch_up":"once"}\n1', id="a zone"),
        pytest.param(b'{"cron":"H 2 * * *","zone":"UTC"}\n{"catch_up":"once"}\n1', id="a field of cron"),
        pytest.param(b'{"every_ms":0}\n{"catch_up":"once"}\n1', id="an interval"),
        pytest.param(b'{"every_ms":1000}\n{"catch_up":"once","spread_ms":1}\n1', id="a policy that the script refuses"),
    ],
)
def test_any_number_of_ticks_that_this_host_cannot_fire_hides_no_other_tick(
    rig: ScheduleRig, caplog: pytest.LogCaptureFixture, definition: bytes
) -> None:
    broken = {f"broken{number}": definition for number in range(250)}
    rig.redis.hset(rig.queue.key("schedules"), mapping=broken)
    rig.redis.zadd(rig.queue.key("schedules:next"), dict.fromkeys(broken, 1))
    rig.set("good")
    recovery = rig.queue.recovery()
    assert recovery.promote(rig.queue.name) == pytest.approx(HOUR_MS, abs=5000)
    assert rig.counts("good") == (1, 0, 0)
    assert {rig.next_ms(key) for key in broken} == {1}, "they stay due for a host that can fire them"
    assert rig.due(refused=[*broken])[0] == [], "ticks listed as refused are not returned again"
    assert caplog.text.count("cannot fire a tick") == 250
    recovery.promote(rig.queue.name)
    assert caplog.text.count("cannot fire a tick") == 250, "each is logged once, not with every heartbeat"
    rig.redis.hset(rig.queue.key("schedules"), "broken7", pack_schedule(Schedule.from_mapping("k", {"every": "1h"})))
    recovery.promote(rig.queue.name)
    assert rig.counts("broken7")[0] == 1, "a repaired schedule is fired by the next check"


def test_a_tick_without_a_schedule_is_forgotten(rig: ScheduleRig) -> None:
    rig.redis.zadd(rig.queue.key("schedules:next"), {"lost": 1})
    assert rig.due()[0] == []
    assert rig.next_ms("lost") is None


def test_many_ticks_due_at_once_are_all_fired(rig: ScheduleRig) -> None:
    for number in range(120):
        rig.set(f"s{number}")
    assert len(rig.due()[0]) == 100
    assert rig.promote() == 0
    assert rig.promote() == pytest.approx(HOUR_MS, abs=5000)
    assert len(rig.waiting()) == 120


def test_when_the_server_is_out_of_memory_the_tick_stays_due(rig: ScheduleRig) -> None:
    tick_ms = rig.set()
    rig.redis.config_set("maxmemory", "1mb")
    assert rig.promote() is None
    assert rig.next_ms() == tick_ms
    rig.redis.config_set("maxmemory", 0)
    rig.promote()
    assert rig.counts() == (1, 0, 0)


# Triggering


def test_trigger_creates_a_job_and_leaves_ticks_and_counts_alone(rig: ScheduleRig) -> None:
    rig.set(data={"n": 1}, priority=2)
    rig.promote()
    rig.queue.producer.cancel("schedule:k")
    rig.redis.delete(rig.queue.key("pending"))
    next_ms = rig.next_ms()
    assert rig.schedules.trigger("k") == "schedule:k"
    job = rig.queue.inspector.job("schedule:k")
    assert (job["data"], job["identifier"], job["priority"]) == ({"n": 1}, "k triggered", 2)
    assert rig.waiting().count("") == 1, "a worker is woken"
    assert rig.queue.journal_events()[-1] == ("enqueued", "schedule:k")
    assert (rig.next_ms(), rig.counts()) == (next_ms, (1, 0, 0))
    with pytest.raises(Exists, match="is unfinished, and overlap is skip"):
        rig.schedules.trigger("k")
    rig.pass_time(HOUR_MS)
    rig.promote()
    assert rig.counts() == (1, 1, 0), "a tick is skipped while a triggered job is unfinished"


def test_trigger_with_overlap_queue_creates_a_job_each_time(rig: ScheduleRig) -> None:
    rig.set(overlap="queue", cron="0 0 1 1 *")
    ids = [rig.schedules.trigger("k") for _ in range(2)]
    assert len(set(ids)) == 2
    assert rig.waiting() == ids


def test_trigger_is_refused_for_an_unknown_schedule_or_a_full_queue(rig: ScheduleRig) -> None:
    with pytest.raises(UnknownSchedule):
        rig.schedules.trigger("k")
    rig.queue.registry.configure("q", {"max_items": 1}, {})
    rig.queue.enqueue("a")
    rig.set()
    with pytest.raises(QueueFull):
        rig.schedules.trigger("k")


# Several pulses


def test_concurrent_pulses_create_one_job_per_tick(rig: ScheduleRig) -> None:
    """In real time: a tick every 7 ms, and four pulses that pause between check and fire and repeat their calls."""
    schedule = Schedule("k", Every(7), None, 5, None, "queue", "all", 0, "user")
    first_ms = rig.schedules.set(schedule)
    until = time.monotonic() + 1.5
    fired = [0] * 4

    def pulse(number: int) -> None:
        link = Link(rig.queue.url)
        mine = ScheduleRig(rig.queue)
        mine.ticker._link = link
        chance = random.Random(number)
        while time.monotonic() < until:
            due, now_ms = mine.due(link)
            time.sleep(chance.choice((0, 0, 0.002, 0.02)))
            for tick in due:
                fired[number] += mine.fire(tick, now_ms)
                if chance.random() < 0.3:
                    assert mine.fire(tick, now_ms) is False
        link.close()
        mine.close()

    threads = [threading.Thread(target=pulse, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ticks = [int(job.rpartition(":")[2]) for verb, job in rig.queue.journal_events() if verb == "enqueued" and job]
    next_ms = rig.next_ms()
    assert next_ms is not None
    assert ticks == list(range(first_ms, next_ms, 7))
    assert rig.counts() == (len(ticks), 0, 0)
    assert len(ticks) > 100
    assert sum(count > 0 for count in fired) > 1, f"only one pulse fired: {fired}"


# The Python API


@pytest.mark.spec("M11")
def test_the_python_api_sets_lists_triggers_and_ends_schedules(server: Server, queue: OneQueue) -> None:
    client = Client(queue.url)
    mine = client.queue("q")
    at = mine.schedule("night", cron="30 2 * * *", zone="Europe/Berlin", data={"n": 1})
    assert (at.tzinfo is not None, at.minute, at.second) == (True, 30, 0)
    mine.schedule("often", every="5m", overlap="queue", catch_up="all", jitter=2.5)
    night, often = mine.schedules()
    assert (night["key"], night["rule"], night["zone"], night["data"]) == (
        "night",
        "30 2 * * *",
        "Europe/Berlin",
        {"n": 1},
    )
    assert night["next_at"] == at.timestamp()
    assert (often["rule"], often["every"], often["jitter"], often["catch_up"]) == ("every 5m", 300.0, 2.5, "all")
    assert mine.job(mine.trigger("night"))["data"] == {"n": 1}
    assert [mine.unschedule("night"), mine.unschedule("night")] == [True, False]
    client.close()
