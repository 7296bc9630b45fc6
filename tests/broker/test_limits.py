"""rate, burst and max_active in the claim; which workers are limited, and what wakes them."""

import time

import pytest

from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.leases import ExternalJobs
from tests.support.drive.limits import HOUR_MS, limited, pass_hours, set_rate, subscription, tokens, wakes
from tests.support.drive.one_queue import OneQueue, one_queue


def test_no_more_jobs_start_than_the_burst_allows(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=3)
    queue.enqueue(*"abcde")
    one, other = queue.worker("w1"), queue.worker("w2")
    assert one.turn(want=2) == ["a", "b"]
    assert other.turn(want=5) == ["c"]
    turn = one.whole_turn(want=5, done="ab")
    assert (turn.jobs, turn.limited, turn.paused) == ([], True, False)
    assert limited(queue) == ["p1 w1"]
    assert queue.state().waiting == {5: ["d", "e"]}


def test_tokens_refill_over_time_up_to_the_burst(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=2)
    queue.enqueue(*"abcdefgh")
    worker = queue.worker()
    assert worker.turn(want=8) == ["a", "b"]
    assert worker.turn(want=8, done="ab") == []
    pass_hours(queue, 6)
    assert worker.turn(want=8) == ["c", "d"], "six tokens would have had time to refill, but the burst is the limit"


def test_the_default_burst_is_a_tenth_of_a_second_of_the_rate(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=0)
    assert tokens(queue) == 1
    set_rate(queue, 50, 1000, burst=0)
    assert tokens(queue) == 5


def test_a_clock_set_back_delays_no_longer_than_an_empty_bucket(queue: OneQueue) -> None:
    set_rate(queue, 100, 1000, burst=10)
    queue.redis.hset(queue.key("counts"), "bucket_us", str((time.time() + 3600) * 1e6))
    queue.enqueue("a")
    assert tokens(queue) == 0
    assert queue.worker().whole_turn(want=1).limited
    assert 1 <= (queue.recovery().promote(queue.name) or 0) <= 20


def test_a_returned_or_buried_job_takes_no_token(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=2)
    queue.create(max_stalls=0)
    queue.enqueue("a")
    worker = queue.worker("w1")
    worker.turn(want=1)
    queue.recover(worker, running=True)
    assert tokens(queue) == 1
    assert queue.worker("w2").turn(want=1) == [], "the job has stalled too often"
    assert queue.state().dead == ["a"]
    assert tokens(queue) == 1


def test_no_worker_is_limited_while_no_job_waits(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    turn = worker.whole_turn(want=1, done="a")
    assert not turn.limited
    assert limited(queue) == []


def test_a_hint_moved_to_a_limited_worker_goes_back(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue("a", "b")
    queue.worker("w1").turn(want=1)
    worker = queue.worker("w2")
    assert worker.block() == "b"
    assert worker.whole_turn(want=1).limited
    assert worker.held() == []
    assert queue.state().waiting == {5: ["b"]}


def test_max_active_is_never_exceeded_and_each_worker_claims_one(queue: OneQueue) -> None:
    queue.create(max_active=2)
    queue.enqueue(*"abcde")
    one, two, three = (queue.worker(name) for name in ("w1", "w2", "w3"))
    assert one.turn(want=5) == ["a"]
    assert two.turn(want=5) == ["b"]
    assert three.whole_turn(want=5).limited
    assert one.turn(want=5, done="a") == ["c"], "its own place is free in the same turn"
    assert wakes(queue, three) == 0


def test_a_freed_place_wakes_the_first_limited_worker(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"abc")
    one, two, three = (queue.worker(name) for name in ("w1", "w2", "w3"))
    one.turn(want=1)
    for waiting in (two, three):
        waiting.turn(want=1)
    one.turn(want=0, done="a")
    assert (wakes(queue, two), wakes(queue, three)) == (1, 0)
    assert limited(queue) == ["p1 w3"]
    assert two.turn(want=1) == ["b"]
    assert wakes(queue, three) == 0, "there is no free place for it"


@pytest.mark.parametrize("how", ["recover", "evict", "heartbeat", "rescue"])
def test_a_removed_worker_frees_its_place(queue: OneQueue, how: str) -> None:
    queue.create(max_active=2)
    queue.enqueue(*"abcd")
    gone, waiting = queue.worker("w1", "p1"), queue.worker("w2", "p2")
    if how == "rescue":
        queue.create(max_active=0)
        gone.turn(want=2)
        queue.create(max_active=2)
    else:
        gone.turn(want=1)
        queue.worker("w3", "p1").turn(want=1)
    assert waiting.whole_turn(want=1).limited
    if how == "recover":
        queue.recover(gone, running=True)
    elif how == "evict":
        queue.recovery().evict(queue.name, "p1", "supervisor_lost")
    elif how == "rescue":
        queue.rescue(gone, 0)
    else:
        queue.redis.zadd(queue.key("processors"), {"p1": 1})
        queue.redis.hset(queue.key("counts"), "last_beat_ms", str(int(time.time() * 1000)))
        queue.recovery("p2").heartbeat(queue.name, 15_000, [])
    assert wakes(queue, waiting) == 1


def test_a_woken_worker_wakes_the_next_while_places_are_free(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue(*"abcd")
    queue.worker("w0").turn(want=1)
    workers = [queue.worker(name) for name in ("w1", "w2", "w3")]
    for worker in workers:
        assert worker.whole_turn(want=1).limited
    set_rate(queue, 1, HOUR_MS, burst=3)
    queue.redis.hset(queue.key("counts"), "bucket_us", 0)
    queue.recovery().promote(queue.name)
    for at, worker in enumerate(workers):
        assert [wakes(queue, each) for each in workers] == [1] * (at + 1) + [0] * (2 - at)
        assert worker.turn(want=1) == ["bcd"[at]]


def test_all_limited_workers_wake_in_turn_even_if_no_job_waits_any_more(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue(*"ab")
    queue.worker("w0").turn(want=1)
    workers = [queue.worker(name) for name in ("w1", "w2")]
    for worker in workers:
        assert worker.whole_turn(want=1).limited
    queue.producer.cancel("b")
    queue.redis.hset(queue.key("counts"), "bucket_us", 0)
    queue.recovery().promote(queue.name)
    assert not workers[0].whole_turn(want=1).limited
    assert wakes(queue, workers[1]) == 1


def test_two_tokens_must_refill_before_a_worker_is_woken_at_a_high_rate(queue: OneQueue) -> None:
    set_rate(queue, 100, 1000, burst=10)
    queue.enqueue(*(str(number) for number in range(20)))
    queue.redis.zadd(queue.key("limited"), {"p1 w2": 1})
    with subscription(queue) as due:
        assert len(queue.worker("w1").turn(want=20)) == 10
        # The turn that takes the last token publishes it, so the time does not depend on the speed of the test.
        assert due.delays()[-1] == 20


def test_a_limited_turn_promote_and_heartbeat_report_when_the_next_token_arrives(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue(*"ab")
    worker = queue.worker()
    worker.turn(want=1)
    last_minute = range(HOUR_MS - 60_000, HOUR_MS + 1)
    with subscription(queue) as due:
        assert worker.whole_turn(want=1).limited
        (delay_ms,) = due.delays()
    assert delay_ms in last_minute
    assert queue.recovery().promote(queue.name) in last_minute
    assert queue.recovery().heartbeat(queue.name, 15_000, []).due_ms in last_minute
    pass_hours(queue, 1)
    assert queue.recovery().promote(queue.name) is None, "no worker is limited any more"
    assert wakes(queue, worker) == 1


def test_max_active_alone_gives_promote_no_next_time(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"ab")
    queue.worker("w1").turn(want=1)
    assert queue.worker("w2").whole_turn(want=1).limited
    assert queue.recovery().promote(queue.name) is None


def test_tokens_that_max_active_blocks_give_promote_no_next_time(queue: OneQueue) -> None:
    queue.create(max_active=1)
    set_rate(queue, 1000, 1, burst=100)
    queue.enqueue(*"ab")
    queue.worker("w1").turn(want=1)
    assert queue.worker("w2").whole_turn(want=1).limited
    assert queue.recovery().promote(queue.name) is None


@pytest.mark.parametrize("by", ["configure", "create"])
def test_a_changed_limit_is_published_and_promote_wakes_workers(queue: OneQueue, by: str) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"abc")
    queue.worker("w1").turn(want=1)
    workers = [queue.worker("w2"), queue.worker("w3")]
    for worker in workers:
        worker.turn(want=1)
    subscription = queue.redis.pubsub(ignore_subscribe_messages=True)
    subscription.subscribe(queue.channel("due"))
    subscription.get_message(timeout=1)
    if by == "create":
        queue.create(max_active=0)
    else:
        queue.registry.configure(queue.name, {"max_active": 0}, {})
    assert subscription.get_message(timeout=1)["data"] == b"0"
    subscription.close()
    queue.recovery().promote(queue.name)
    assert [wakes(queue, worker) for worker in workers] == [1, 1]
    assert limited(queue) == []


def test_a_dead_limited_worker_is_not_woken_in_place_of_a_live_one(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"abc")
    first, gone, waiting = (queue.worker(name) for name in ("w1", "w2", "w3"))
    first.turn(want=1)
    gone.turn(want=1)
    waiting.turn(want=1)
    queue.recover(gone)
    assert limited(queue) == ["p1 w3"]
    first.turn(done="a")
    assert wakes(queue, waiting) == 1


def test_the_retry_process_is_woken_only_when_it_may_start(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.create(retry_lane_retries=1, max_retries=0, min_backoff_ms=0)
    queue.enqueue("a")
    worker, child = queue.worker("w1"), queue.worker("r1", lane="retry")
    worker.turn(want=1)
    worker.turn(failed="a")
    assert queue.state().retry_tokens == 0
    turn = child.whole_turn(want=1)
    assert (turn.jobs, turn.limited) == ([], False)
    assert queue.recovery().promote(queue.name) in range(1, HOUR_MS + 1)
    pass_hours(queue, 1)
    queue.recovery().promote(queue.name)
    assert queue.state().retry_tokens == 1
    assert child.turn(want=1) == ["a"]


def test_a_paused_queue_reports_paused_whatever_its_limits(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue(*"ab")
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(want=1, done="a")
    queue.registry.pause(queue.name, paused=True)
    assert worker.whole_turn(want=1).paused
    assert limited(queue) == []


def test_limits_apply_to_external_workers(redis_url: str) -> None:
    with one_queue(redis_url, mode="external", lease_ms=60_000, max_active=1) as queue:
        external = ExternalJobs(queue.link, DEFAULT_PREFIX, queue.name)
        queue.enqueue(*"abc")
        first = external.idle("one", "bridge").lease
        assert first is not None
        assert external.idle("two", "bridge").lease is None
        external.accept("one", "a")
        external.finish("one", "a")
        second = external.fetch_assigned("two", "bridge").lease
        assert second is not None
        assert second.job_id == "b"
        queue.create(max_active=0)
        set_rate(queue, 1, HOUR_MS, burst=1)
        assert (third := external.idle("one", "bridge").lease) is not None
        assert third.job_id == "c"
        queue.enqueue("d")
        assert external.idle("three", "bridge").lease is None
        wait_ms = queue.recovery().promote(queue.name)
        assert wait_ms is not None
        assert 0 < wait_ms <= HOUR_MS


def test_deleting_the_queue_removes_its_limit_keys(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"ab")
    queue.worker("w1").turn(want=1)
    queue.worker("w2").turn(want=1)
    queue.registry.delete(queue.name, force=True)
    assert not queue.redis.exists(queue.key("limited"))


def test_status_shows_tokens_limited_workers_and_the_next_due_time(queue: OneQueue) -> None:
    counts = queue.inspector.counts()
    assert (counts.limits, counts.next_due_seconds) == (None, None)
    queue.create(max_active=2)
    set_rate(queue, 1, 60_000, burst=1)
    queue.enqueue(*"ab")
    queue.worker("w1").turn(want=1)
    queue.worker("w2").turn(want=1)
    counts = queue.inspector.counts()
    assert counts.limits == {"rate": "1/1m", "max_active": 2, "may_begin": 0, "limited_workers": 1}
