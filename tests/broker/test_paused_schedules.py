"""Paused schedules: no tick while paused, whatever sets the schedule again, and no catching up afterwards."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.schedules import DueTick, Schedules, Ticker
from forq.broker.scripts import script
from forq.client import Client
from forq.errors import InvalidData, UnknownQueue, UnknownSchedule
from forq.schedules import APP, CONFIG
from tests.support.drive.one_queue import OneQueue
from tests.support.drive.scheduled_queue import HOUR_MS, ScheduleRig


@pytest.fixture
def rig(queue: OneQueue) -> Iterator[ScheduleRig]:
    rig = ScheduleRig(queue)
    yield rig
    rig.close()


def runs(rig: ScheduleRig) -> str | None:
    found = rig.redis.hget(rig.queue.key("schedules:runs"), "k")
    return None if found is None else found.decode()


def ran_before(rig: ScheduleRig, ms: int) -> None:
    """The last run was that long ago."""
    rig.redis.hset(rig.queue.key("schedules:runs"), "k", f"{rig.schedules.now_ms() - ms} 7 1 2")


def test_a_paused_schedule_keeps_its_definition_and_counts_and_has_no_tick(rig: ScheduleRig) -> None:
    rig.set(data=1)
    rig.promote()
    before, counted = rig.schedules.one("k"), runs(rig)
    assert rig.schedules.pause("k")
    assert not rig.schedules.pause("k"), "it was paused before"
    shown = rig.schedules.one("k")
    assert (before["paused"], shown["paused"], shown["next_at"], shown["upcoming"]) == (False, True, None, [])
    changed = {"paused", "next_at", "upcoming"}
    assert {name: value for name, value in shown.items() if name not in changed} == {
        name: value for name, value in before.items() if name not in changed
    }
    assert (rig.next_ms(), runs(rig)) == (None, counted)
    assert rig.promote() is None


@pytest.mark.parametrize("origin", ["user", CONFIG, APP])
@pytest.mark.parametrize("change", [{}, {"data": 2}, {"every": "5m"}, {"cron": "*/5 * * * *"}])
def test_setting_it_again_does_not_wake_it(rig: ScheduleRig, origin: str, change: dict[str, Any]) -> None:
    rig.set(origin=origin)
    rig.schedules.pause("k")
    for _ in range(2):
        tick_ms = rig.set(origin=origin, **change)
        assert tick_ms >= rig.schedules.now_ms() - 5000, "the tick if it were resumed now"
    assert (rig.next_ms(), rig.schedules.one("k")["paused"]) == (None, True)
    assert rig.promote() is None
    every, cron = (rig.schedules.one("k")[name] for name in ("every", "cron"))
    assert (every, cron) == (None if "cron" in change else 300 if "every" in change else 3600, change.get("cron"))


def test_applying_a_config_file_again_does_not_wake_it(rig: ScheduleRig) -> None:
    rig.schedules.apply({"k": {"every": "1h"}}, CONFIG)
    rig.schedules.pause("k")
    rig.schedules.apply({"k": {"every": "1h"}}, CONFIG)
    assert rig.schedules.one("k")["paused"]
    assert rig.schedules.apply({}, CONFIG) == ["k"]
    rig.schedules.apply({"k": {"every": "1h"}}, CONFIG)
    assert not rig.schedules.one("k")["paused"], "it was dropped meanwhile"


def test_a_dropped_schedule_is_not_paused_when_it_is_set_again(rig: ScheduleRig) -> None:
    rig.set()
    rig.schedules.pause("k")
    rig.schedules.drop("k")
    assert not rig.redis.exists(rig.queue.key("schedules:paused"))
    rig.set()
    assert rig.next_ms() is not None


def test_a_deleted_queue_has_no_paused_schedules(rig: ScheduleRig) -> None:
    rig.set()
    rig.schedules.pause("k")
    rig.queue.registry.delete(rig.queue.name, force=True)
    assert not rig.redis.exists(rig.queue.key("schedules:paused"))


@pytest.mark.parametrize(("ago_ms", "next_in_ms"), [(600_000, HOUR_MS - 600_000), (10 * HOUR_MS, 0)])
def test_an_interval_continues_after_its_last_run(rig: ScheduleRig, ago_ms: int, next_in_ms: int) -> None:
    rig.set()
    rig.schedules.pause("k")
    ran_before(rig, ago_ms)
    assert rig.schedules.resume("k")
    assert (rig.next_ms() or 0) - rig.schedules.now_ms() == pytest.approx(next_in_ms, abs=1000)
    rig.promote()
    assert rig.counts() == (7 + (next_in_ms == 0), 1, 2), "nothing is caught up, and nothing was missed"


def test_a_cron_rule_continues_with_its_next_time(rig: ScheduleRig) -> None:
    rig.set(cron="*/5 * * * *", catch_up="all")
    rig.schedules.pause("k")
    ran_before(rig, 10 * HOUR_MS)
    assert rig.schedules.resume("k")
    assert 0 < (rig.next_ms() or 0) - rig.schedules.now_ms() + 1000 <= 301_000
    rig.promote()
    assert rig.counts() == (7, 1, 2)


def test_resuming_notifies_pulse_and_is_idempotent(rig: ScheduleRig) -> None:
    rig.set()
    assert not rig.schedules.resume("k"), "it was not paused"
    rig.schedules.pause("k")
    ran_before(rig, 600_000)
    listener = rig.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(rig.queue.channel("due"))
    listener.get_message(timeout=1)
    assert rig.schedules.resume("k")
    message = listener.get_message(timeout=1)
    assert message is not None
    assert int(message["data"]) == pytest.approx(HOUR_MS - 600_000, abs=1000)
    next_ms = rig.next_ms()
    assert not rig.schedules.resume("k")
    assert rig.next_ms() == next_ms
    listener.close()


def test_trigger_works_while_it_is_paused(rig: ScheduleRig) -> None:
    rig.set(data=3)
    rig.schedules.pause("k")
    assert rig.schedules.trigger("k") == "schedule:k"
    assert rig.queue.inspector.job("schedule:k")["data"] == 3
    assert (rig.next_ms(), rig.schedules.one("k")["paused"]) == (None, True)


def test_a_tick_that_was_planned_before_the_pause_is_not_fired(rig: ScheduleRig) -> None:
    rig.set()
    (due,), now_ms = rig.due()
    rig.schedules.pause("k")
    assert not rig.fire(due, now_ms)
    assert (rig.queue.state().jobs, rig.next_ms()) == (set(), None)
    time.sleep(0.002)  # the tick of an interval that never ran is now
    rig.schedules.resume("k")
    assert not rig.fire(due, now_ms), "it was a tick of before"
    rig.promote()
    assert rig.counts() == (1, 0, 0)


def fire(link: Link, together: threading.Barrier, due: DueTick, now_ms: int, fired: list[bool]) -> None:
    together.wait()
    fired.append(Ticker(link, DEFAULT_PREFIX).fire("q", due, now_ms)[0])


def test_a_tick_that_is_fired_during_the_pause_is_fired_once_or_not_at_all(rig: ScheduleRig) -> None:
    links = [Link(rig.queue.url) for _ in range(3)]
    for number in range(40):
        rig.set(f"k{number}", overlap="queue")
        (due,), now_ms = rig.due(refused=[f"k{before}" for before in range(number)])
        together = threading.Barrier(3)
        fired: list[bool] = []

        threads = [threading.Thread(target=fire, args=(link, together, due, now_ms, fired)) for link in links[:2]]
        for thread in threads:
            thread.start()
        together.wait()
        Schedules(links[2], DEFAULT_PREFIX, "q").pause(due.key)
        for thread in threads:
            thread.join()
        assert sum(fired) == rig.counts(due.key)[0] <= 1
        assert rig.next_ms(due.key) is None
    assert len(rig.queue.state().jobs) == sum(rig.counts(f"k{number}")[0] for number in range(40))
    for link in links:
        link.close()


@pytest.mark.parametrize("change", [{"every": "5m"}, {"cron": "*/5 * * * *"}])
def test_a_schedule_that_changes_meanwhile_is_resumed_with_its_new_rule(
    rig: ScheduleRig, change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.set()
    rig.schedules.pause("k")
    ran_before(rig, 10_000)
    compute = Schedules._first_tick

    def change_meanwhile(schedules: Schedules, head: bytes) -> tuple[object, object]:
        found = compute(schedules, head)
        rig.set(**change)
        return found

    monkeypatch.setattr(Schedules, "_first_tick", change_meanwhile)
    assert rig.schedules.resume("k")
    assert 0 < (rig.next_ms() or 0) - rig.schedules.now_ms() + 1000 <= 301_000


def test_a_late_call_does_not_resume_with_a_tick_that_is_over(rig: ScheduleRig) -> None:
    rig.set(cron="*/5 * * * *")
    rig.schedules.pause("k")
    head = rig.redis.hget(rig.queue.key("schedules"), "k").rpartition(b"\n")[0]
    call = (script("resume_schedule"), rig.queue.base, "k", head, "")
    assert rig.queue.link.run(*call, rig.schedules.now_ms() - 10) == [-14]
    assert rig.schedules.one("k")["paused"]
    assert rig.queue.link.run(*call, "") == [1, 1], "a rule that has ended"
    assert (rig.next_ms(), rig.schedules.one("k")["paused"]) == (None, False)


def test_unknown_schedules_and_queues_are_refused(rig: ScheduleRig) -> None:
    other = Schedules(rig.queue.link, DEFAULT_PREFIX, "other")
    for name in ("pause", "resume"):
        with pytest.raises(UnknownSchedule):
            getattr(rig.schedules, name)("k")
        with pytest.raises(UnknownQueue):
            getattr(other, name)("k")
    assert not rig.redis.exists(rig.queue.key("schedules:paused"))
    assert not rig.redis.exists(f"{other._base}:schedules:paused")


def test_a_broken_definition_stays_paused(rig: ScheduleRig) -> None:
    rig.set()
    rig.schedules.pause("k")
    rig.redis.hset(rig.queue.key("schedules"), "k", b"broken")
    with pytest.raises(InvalidData):
        rig.schedules.resume("k")
    assert rig.redis.hexists(rig.queue.key("schedules:paused"), "k")


def test_the_python_api_pauses_and_resumes(queue: OneQueue) -> None:
    ours = Client(queue.url).queue(queue.name)
    ours.schedule("k", every=3600)
    assert ours.pause_schedule("k")
    assert [(each["paused"], each["next_at"]) for each in ours.schedules()] == [(True, None)]
    assert ours.schedule("k", every=3600).timestamp() == pytest.approx(time.time(), abs=5)
    assert ours.resume_schedule("k")
    assert [each["paused"] for each in ours.schedules()] == [False]
