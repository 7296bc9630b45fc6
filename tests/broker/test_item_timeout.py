"""item_timeout: when an item expires, what changes its expiry, and what happens to an expired item."""

from collections.abc import Iterator

import pytest

from forq.broker.enqueue import Update, new_job
from tests.support.drive.one_queue import State, one_queue
from tests.support.drive.release_queue import ReleaseQueue, gate
from tests.support.models.journal_replay import Replay

HOUR_MS = 3_600_000


@pytest.fixture
def auto_release(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "auto_release", item_timeout_ms=HOUR_MS, retry_interval_ms=HOUR_MS) as queue:
        yield queue


@pytest.fixture
def on_request(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "on_request", item_timeout_ms=HOUR_MS) as queue:
        yield queue


def expires_in_ms(queue: ReleaseQueue, job_id: str) -> float:
    return float(queue.redis.zscore(queue.key("expiries"), job_id)) - now_ms(queue)


def now_ms(queue: ReleaseQueue) -> int:
    seconds, micros = queue.redis.time()
    return int(seconds * 1000 + micros // 1000)


def test_an_item_that_expires_between_two_tries_is_dead_by_a_valid_transition(auto_release: ReleaseQueue) -> None:
    auto_release.enqueue("a")
    auto_release.attempt()
    assert auto_release.inspector.job("a")["state"] == "scheduled"
    auto_release.make_due("expiries", "a")
    auto_release.promote()
    assert auto_release.state() == State(jobs=set(), dead=["a"])
    replay = Replay().read_all(auto_release.entries())
    assert (replay.ready, len(replay.archived)) == ({}, 1)


def test_an_expired_item_of_the_retry_lane_is_dead_and_the_lane_empty(auto_release: ReleaseQueue) -> None:
    auto_release.enqueue("a")
    for _ in range(3):
        if auto_release.inspector.job("a")["state"] == "scheduled":
            auto_release.make_due("scheduled", "a")
        auto_release.attempt()
    assert auto_release.inspector.job("a")["state"] == "retry"
    auto_release.make_due("expiries", "a")
    auto_release.promote()
    assert auto_release.state() == State(jobs=set(), dead=["a"])
    assert auto_release.inspector.counts().retry == 0
    assert auto_release.redis.llen(auto_release.key("retry")) == 0


def test_a_returned_item_with_a_later_run_at_does_not_expire_before_it(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.ask("x")
    on_request.producer.enqueue([new_job(2, id="a", run_in=10 * HOUR_MS / 1000)], Update())
    on_request.make_due("leases", "a")
    on_request.promote()
    assert on_request.inspector.job("a")["state"] == "scheduled"
    assert expires_in_ms(on_request, "a") > 10.9 * HOUR_MS


def test_an_update_does_not_extend_the_expiry_of_a_waiting_item(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.redis.zadd(on_request.key("expiries"), {"a": now_ms(on_request) + 1000})
    on_request.enqueue("a", if_exists="update")
    assert expires_in_ms(on_request, "a") <= 1000


def test_an_update_does_not_extend_the_expiry_of_an_item_between_two_tries(auto_release: ReleaseQueue) -> None:
    auto_release.enqueue("a")
    auto_release.attempt()
    before = auto_release.redis.zscore(auto_release.key("expiries"), "a")
    auto_release.producer.enqueue([new_job(2, id="a")], Update(update_run_at=False))
    assert auto_release.redis.zscore(auto_release.key("expiries"), "a") == before
    auto_release.producer.enqueue([new_job(2, id="a")], Update())
    assert auto_release.inspector.job("a")["state"] == "waiting"
    assert auto_release.redis.zscore(auto_release.key("expiries"), "a") == before


def test_the_age_of_an_item_rescheduled_to_now_counts_from_now(on_request: ReleaseQueue) -> None:
    on_request.producer.enqueue([new_job(1, id="a", run_in=10 * HOUR_MS / 1000)], Update())
    on_request.producer.enqueue([new_job(2, id="a")], Update())
    assert expires_in_ms(on_request, "a") <= HOUR_MS


def test_an_item_removed_while_leased_leaves_no_expiry(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.ask("x")
    on_request.producer.remove("a")
    on_request.make_due("leases", "a")
    on_request.promote()
    assert on_request.state() == State(jobs=set())
    assert on_request.redis.exists(on_request.key("expiries")) == 0


def test_an_item_that_expired_while_leased_is_dead_when_it_is_returned(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a", "b")
    on_request.ask("x")
    on_request.make_due("expiries", "a")
    on_request.promote()
    assert on_request.state().active == {"a": "x"}
    assert on_request.leases.leave("x")
    assert on_request.got("y") == "b"
    assert on_request.state().dead == ["a"]


def test_an_item_returned_in_time_stays_live(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.ask("x")
    assert on_request.leases.leave("x")
    assert on_request.got("y") == "a"


def test_pulse_gets_the_earliest_of_all_times(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.ask("x")
    on_request.producer.enqueue([new_job(1, id="b", run_in=100)], Update())
    due_ms = on_request.promote()
    assert due_ms is not None
    assert 90_000 < due_ms <= 100_000


def test_pulse_returns_at_once_while_more_items_have_expired_than_one_call_buries(on_request: ReleaseQueue) -> None:
    ids = [f"n{number}" for number in range(250)]
    on_request.enqueue(*ids)
    on_request.make_due("expiries", *ids)
    assert on_request.promote() == 0
    assert on_request.inspector.counts().dead == 200
    assert on_request.promote() is None
    assert on_request.inspector.counts().dead == 250


def test_an_item_that_expires_while_leased_is_checked_when_its_lease_lapses(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.ask("x")
    on_request.make_due("expiries", "a")
    due_ms = on_request.promote()
    assert due_ms is not None
    assert 590_000 < due_ms <= 600_000


def test_the_expiry_of_an_item_without_a_record_is_removed(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a", "b")
    on_request.redis.hdel(on_request.key("jobs"), "a")
    on_request.make_due("expiries", "a")
    on_request.promote()
    assert on_request.redis.zrange(on_request.key("expiries"), 0, -1) == [b"b"]


def test_jobs_of_a_queue_with_a_handler_do_not_expire(redis_url: str) -> None:
    """Even if item_timeout is set and a heartbeat unblocks them."""
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


def test_the_scribe_is_notified_once_per_call_that_buries(on_request: ReleaseQueue) -> None:
    subscriber = on_request.redis.pubsub(ignore_subscribe_messages=True)
    subscriber.subscribe(on_request.channel("outbox"))
    subscriber.get_message(timeout=1)
    on_request.enqueue("a", "b")
    on_request.make_due("expiries", "a", "b")
    on_request.promote()
    assert subscriber.get_message(timeout=5) is not None
    assert subscriber.get_message(timeout=0.05) is None
    subscriber.close()
    assert on_request.redis.llen(on_request.key("outbox")) == 2


def test_a_heartbeat_buries_expired_items_and_reports_the_next_time(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a", "b")
    on_request.make_due("expiries", "a")
    beat = on_request.recovery().heartbeat("q", 15_000, [])
    assert on_request.state() == State(jobs={"b"}, waiting={5: ["b"]}, dead=["a"])
    assert beat.due_ms is not None
    assert HOUR_MS - 10_000 < beat.due_ms <= HOUR_MS
