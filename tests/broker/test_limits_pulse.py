"""Times that the scripts report to pulse for limits, and the limits shown in status."""

import time

import pytest

from tests.support.drive.external_queue import ExternalQueue, external_queue
from tests.support.drive.limits import HOUR_MS, fill_bucket, set_rate, subscription, tokens, wakes
from tests.support.drive.one_queue import HandWorker, OneQueue

LANE = {"retry_lane_retries": 1, "max_retries": 0, "min_backoff_ms": 0}


def one_limited(queue: OneQueue) -> HandWorker:
    queue.enqueue(*"ab")
    queue.worker("w0").turn(want=1)
    worker = queue.worker("w1")
    assert worker.whole_turn(want=1).limited
    return worker


def is_about_an_hour(ms: int | None) -> bool:
    return ms is not None and HOUR_MS - 60_000 < ms <= HOUR_MS


def test_pulse_waits_for_no_more_tokens_than_the_bucket_holds(queue: OneQueue) -> None:
    set_rate(queue, 10, 1000, burst=1)
    one_limited(queue)
    set_rate(queue, 1000, 1000, burst=2)
    assert (queue.recovery().promote(queue.name) or 0) <= 2


def test_pulse_waits_at_least_a_millisecond(queue: OneQueue) -> None:
    set_rate(queue, 100_000, 1000, burst=1)
    queue.redis.hset(queue.key("counts"), "bucket_us", str((time.time() + 60) * 1e6))
    queue.enqueue("a")
    with subscription(queue) as pulse:
        assert queue.worker().whole_turn(want=1).limited
        assert pulse.delays() == [1], "the token is due in 10 µs"


def test_pulse_learns_when_the_retry_process_may_start(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.create(**LANE)
    queue.enqueue("a")
    worker, child = queue.worker("w1"), queue.worker("r1", lane="retry")
    worker.turn(want=1)
    worker.turn(failed="a")
    with subscription(queue) as pulse:
        assert child.turn(want=1) == []
        assert all(is_about_an_hour(ms) for ms in pulse.delays() or [0])


def test_pulse_gets_no_time_while_the_retry_process_waits_for_a_place(queue: OneQueue) -> None:
    queue.create(max_active=1, **LANE)
    queue.enqueue(*"ab")
    worker, child = queue.worker("w1"), queue.worker("r1", lane="retry")
    worker.turn(want=1)
    assert worker.turn(want=1, failed="a") == ["b"]
    with subscription(queue) as pulse:
        assert child.turn(want=1) == []
        assert pulse.delays() == []
    worker.turn(done="b")
    assert queue.state().retry_tokens == 1
    assert child.turn(want=1) == ["a"]


def test_promote_comes_back_for_a_suspect(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.recover(worker, running=True, outcome="suspect")
    assert is_about_an_hour(queue.recovery().promote(queue.name))


def test_promote_has_no_next_time_while_no_worker_is_limited(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue(*"ab")
    queue.worker().turn(want=1)
    assert queue.recovery().promote(queue.name) is None


@pytest.mark.parametrize("by", ["configure", "create"])
def test_a_changed_rate_is_published(queue: OneQueue, by: str) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    with subscription(queue) as pulse:
        if by == "create":
            queue.create(rate_count=0)
        else:
            queue.registry.configure(queue.name, {"rate_count": 0}, {})
        assert pulse.delays() == [0]


def test_a_heartbeat_wakes_workers_whose_limit_was_lifted(queue: OneQueue) -> None:
    queue.create(max_active=1)
    worker = one_limited(queue)
    queue.create(max_active=0)
    queue.recovery().heartbeat(queue.name, 15_000, [])
    assert wakes(queue, worker) == 1


def limit_external_worker(queue: ExternalQueue, waiting: str) -> None:
    """w1 takes the only token; w2 is idle."""
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue("a", *waiting)
    assert queue.work("w1") == "a"
    assert queue.idle("w2") is None


@pytest.mark.parametrize("waits", ["a job", "a job of the retry lane", "nothing"])
def test_pulse_learns_when_external_workers_may_start(redis_url: str, waits: str) -> None:
    with external_queue(redis_url, retry_lane_retries=1, max_retries=0, min_backoff_ms=0) as queue:
        limit_external_worker(queue, "b" if waits == "a job" else "")
        if waits == "a job of the retry lane":
            queue.fail("a")
        with subscription(queue) as pulse:
            queue.promote()
            delays = pulse.delays()
        assert bool(delays) == (waits != "nothing")
        assert all(is_about_an_hour(ms) for ms in delays)


def test_promote_comes_back_for_external_workers(redis_url: str) -> None:
    with external_queue(redis_url) as queue:
        limit_external_worker(queue, "b")
        set_rate(queue, 1, 60_000, burst=1)
        assert 0 < (queue.promote() or 0) <= 60_000, "the lease is longer"


def test_no_external_worker_is_notified_while_no_job_may_start(redis_url: str) -> None:
    with external_queue(redis_url) as queue:
        limit_external_worker(queue, "b")
        queue.promote()
        assert queue.redis.zcard(queue.key("awaiting")) == 1, (
            "a notified worker would be removed until it sends idle again"
        )
        fill_bucket(queue)
        queue.promote()
        assert queue.redis.zcard(queue.key("awaiting")) == 0
        assert queue.fetch_assigned("w2") == "b"


def test_no_job_may_start_while_more_are_active_than_a_lowered_limit(queue: OneQueue) -> None:
    queue.enqueue(*"abc")
    queue.worker().turn(want=3)
    queue.create(max_active=1)
    assert tokens(queue) == 0


def test_a_queue_without_a_rate_has_no_bucket(queue: OneQueue) -> None:
    queue.create(max_active=5)
    queue.enqueue("a")
    queue.worker().turn(want=1)
    assert "bucket_us" not in queue.hash("counts")


@pytest.mark.parametrize(("job_ms", "tick_ms"), [(600_000, 900_000), (900_000, 600_000), (-5000, 600_000)])
def test_status_shows_when_the_next_job_or_tick_is_due(queue: OneQueue, job_ms: int, tick_ms: int) -> None:
    now_ms = int(time.time() * 1000)
    queue.set_due({"a": now_ms + job_ms})
    queue.redis.zadd(queue.key("schedules:next"), {"k": now_ms + tick_ms})
    due = queue.inspector.counts().next_due_seconds
    assert due is not None
    assert max(0, min(job_ms, tick_ms) / 1000 - 5) <= due <= max(0, min(job_ms, tick_ms) / 1000)
