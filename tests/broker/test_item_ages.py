"""item_timeout: from when an item's age counts, what changes it, and what becomes of an item that is too old."""

from collections.abc import Iterator

import pytest

from forq.broker.enqueue import Update, new_job
from tests.support.drive.one_queue import State, one_queue
from tests.support.drive.release_queue import ReleaseQueue, gate
from tests.support.models.journal_replay import Replay

HOUR_MS = 3_600_000


@pytest.fixture
def aging(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "auto_release", item_timeout_ms=HOUR_MS, retry_interval_ms=HOUR_MS) as queue:
        yield queue


@pytest.fixture
def asked(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "on_request", item_timeout_ms=HOUR_MS) as queue:
        yield queue


def expires_in_ms(queue: ReleaseQueue, job_id: str) -> float:
    return float(queue.redis.zscore(queue.key("expiries"), job_id)) - now_ms(queue)


def now_ms(queue: ReleaseQueue) -> int:
    seconds, micros = queue.redis.time()
    return int(seconds * 1000 + micros // 1000)


def test_an_item_that_is_too_old_between_two_tries_dies_by_a_legal_path(aging: ReleaseQueue) -> None:
    aging.enqueue("a")
    aging.attempt()
    assert aging.inspector.job("a")["state"] == "scheduled"
    aging.make_due("expiries", "a")
    aging.promote()
    assert aging.state() == State(jobs=set(), dead=["a"])
    replay = Replay().read_all(aging.entries())
    assert (replay.ready, len(replay.archived)) == ({}, 1)


def test_an_item_of_the_lane_that_is_too_old_is_dead_and_the_lane_empty(aging: ReleaseQueue) -> None:
    aging.enqueue("a")
    for _ in range(3):
        if aging.inspector.job("a")["state"] == "scheduled":
            aging.make_due("scheduled", "a")
        aging.attempt()
    assert aging.inspector.job("a")["state"] == "retry"
    aging.make_due("expiries", "a")
    aging.promote()
    assert aging.state() == State(jobs=set(), dead=["a"])
    assert aging.inspector.counts().retry == 0
    assert aging.redis.llen(aging.key("retry")) == 0


def test_an_item_that_comes_back_for_a_later_time_is_not_too_old_before_that(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.ask("x")
    asked.producer.enqueue([new_job(2, id="a", run_in=10 * HOUR_MS / 1000)], Update())
    asked.make_due("leases", "a")
    asked.promote()
    assert asked.inspector.job("a")["state"] == "scheduled"
    assert expires_in_ms(asked, "a") > 10.9 * HOUR_MS


def test_an_update_makes_an_item_that_waits_no_younger(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.redis.zadd(asked.key("expiries"), {"a": now_ms(asked) + 1000})
    asked.enqueue("a", if_exists="update")
    assert expires_in_ms(asked, "a") <= 1000


def test_an_update_makes_an_item_between_two_tries_no_younger(aging: ReleaseQueue) -> None:
    aging.enqueue("a")
    aging.attempt()
    before = aging.redis.zscore(aging.key("expiries"), "a")
    aging.producer.enqueue([new_job(2, id="a")], Update(update_run_at=False))
    assert aging.redis.zscore(aging.key("expiries"), "a") == before
    aging.producer.enqueue([new_job(2, id="a")], Update())
    assert aging.inspector.job("a")["state"] == "waiting"
    assert aging.redis.zscore(aging.key("expiries"), "a") == before


def test_an_item_whose_time_is_now_after_all_grows_old_from_now_on(asked: ReleaseQueue) -> None:
    asked.producer.enqueue([new_job(1, id="a", run_in=10 * HOUR_MS / 1000)], Update())
    asked.producer.enqueue([new_job(2, id="a")], Update())
    assert expires_in_ms(asked, "a") <= HOUR_MS


def test_an_item_that_was_removed_in_somebodys_hands_has_no_age_when_it_is_gone(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.ask("x")
    asked.producer.remove("a")
    asked.make_due("leases", "a")
    asked.promote()
    assert asked.state() == State(jobs=set())
    assert asked.redis.exists(asked.key("expiries")) == 0


def test_an_item_that_grew_too_old_in_somebodys_hands_is_dead_when_it_is_given_back(asked: ReleaseQueue) -> None:
    asked.enqueue("a", "b")
    asked.ask("x")
    asked.make_due("expiries", "a")
    asked.promote()
    assert asked.state().active == {"a": "x"}
    assert asked.leases.leave("x")
    assert asked.got("y") == "b"
    assert asked.state().dead == ["a"]


def test_an_item_that_is_given_back_in_time_lives_on(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.ask("x")
    assert asked.leases.leave("x")
    assert asked.got("y") == "a"


def test_pulse_is_told_of_the_next_of_all_times(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.ask("x")
    asked.producer.enqueue([new_job(1, id="b", run_in=100)], Update())
    due_ms = asked.promote()
    assert due_ms is not None
    assert 90_000 < due_ms <= 100_000


def test_pulse_comes_again_at_once_while_more_is_too_old_than_one_call_buries(asked: ReleaseQueue) -> None:
    ids = [f"n{number}" for number in range(250)]
    asked.enqueue(*ids)
    asked.make_due("expiries", *ids)
    assert asked.promote() == 0
    assert asked.inspector.counts().dead == 200
    assert asked.promote() is None
    assert asked.inspector.counts().dead == 250


def test_an_item_that_grows_too_old_in_somebodys_hands_is_looked_at_when_its_lease_lapses(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.ask("x")
    asked.make_due("expiries", "a")
    due_ms = asked.promote()
    assert due_ms is not None
    assert 590_000 < due_ms <= 600_000


def test_the_age_of_an_item_whose_record_is_gone_is_forgotten(asked: ReleaseQueue) -> None:
    asked.enqueue("a", "b")
    asked.redis.hdel(asked.key("jobs"), "a")
    asked.make_due("expiries", "a")
    asked.promote()
    assert asked.redis.zrange(asked.key("expiries"), 0, -1) == [b"b"]


def test_jobs_of_a_queue_with_a_handler_have_no_age(redis_url: str) -> None:
    """Also if somebody has set item_timeout, and a heartbeat unblocks them."""
    with one_queue(redis_url, item_timeout_ms=HOUR_MS) as queue:
        queue.enqueue("a")
        assert queue.worker("w", "lost").turn(1) == ["a"]
        queue.producer.remove("a")
        queue.enqueue("a", if_exists="update")
        queue.recovery("p1").heartbeat("q", 15_000, [])
        queue.redis.zadd(queue.key("processors"), {"lost": 1})
        queue.redis.hset(queue.key("counts"), "sweep_after_ms", 0)
        assert queue.recovery("p1").heartbeat("q", 15_000, []).evicted == ["lost"]
        assert queue.journal_events()[-1] == ("unblocked", "a")
        assert queue.redis.exists(queue.key("expiries")) == 0


def test_the_scribe_is_told_once_of_all_that_one_call_buries(asked: ReleaseQueue) -> None:
    heard = asked.redis.pubsub(ignore_subscribe_messages=True)
    heard.subscribe(asked.channel("outbox"))
    heard.get_message(timeout=1)
    asked.enqueue("a", "b")
    asked.make_due("expiries", "a", "b")
    asked.promote()
    assert heard.get_message(timeout=5) is not None
    assert heard.get_message(timeout=0.05) is None
    heard.close()
    assert asked.redis.llen(asked.key("outbox")) == 2


def test_a_heartbeat_gives_up_what_is_too_old_and_tells_of_the_next_time(asked: ReleaseQueue) -> None:
    asked.enqueue("a", "b")
    asked.make_due("expiries", "a")
    beat = asked.recovery().heartbeat("q", 15_000, [])
    assert asked.state() == State(jobs={"b"}, waiting={5: ["b"]}, dead=["a"])
    assert beat.due_ms is not None
    assert HOUR_MS - 10_000 < beat.due_ms <= HOUR_MS
