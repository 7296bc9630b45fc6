"""Limited workers are woken in time; none of them polls, starves or stays limited without a reason."""

import time

import pytest

from forq.broker.enqueue import Update, new_job
from forq.broker.keys import wake_key
from tests.support.drive.external_queue import external_queue
from tests.support.drive.limits import HOUR_MS, fill_bucket, limited, set_rate, subscription, tokens, wakes
from tests.support.drive.one_queue import HandWorker, OneQueue
from tests.support.drive.scheduled_queue import ScheduleRig
from tests.support.drive.wait import wait_until


def two_limited(queue: OneQueue) -> list[HandWorker]:
    """Empties the bucket and returns two workers that wait for tokens."""
    queue.enqueue(*"abcde")
    queue.worker("w0").turn(want=1)
    workers = [queue.worker("w1"), queue.worker("w2")]
    for worker in workers:
        assert worker.whole_turn(want=1).limited
    return workers


def two_suspects(queue: OneQueue, retry: HandWorker) -> list[HandWorker]:
    """a and b are suspects and the retry process waits for them; the two workers run c and d, and more jobs wait."""
    queue.enqueue(*"abcdefghij")
    lost = [queue.worker("w1"), queue.worker("w2")]
    for worker in lost:
        worker.turn(want=1)
    for worker in lost:
        queue.recover(worker, running=True, outcome="suspect")
    workers = [queue.worker("w3"), queue.worker("w4")]
    assert [worker.turn(want=1) for worker in workers] == [["c"], ["d"]]
    assert retry.turn(want=1) == []
    queue.redis.delete(queue.key("failed"))
    return workers


def test_a_worker_that_takes_the_tokens_publishes_when_the_next_may_start(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    first, second = two_limited(queue)
    fill_bucket(queue)
    assert queue.recovery().promote(queue.name) is None, "there are tokens, so promote need not come back"
    assert (wakes(queue, first), wakes(queue, second)) == (1, 0)
    with subscription(queue) as pulse:
        assert first.turn(want=1) == ["b"]
        (delay_ms,) = pulse.delays()
    assert HOUR_MS - 10_000 < delay_ms <= HOUR_MS


@pytest.mark.parametrize("why", ["nothing was taken", "no worker is limited", "there are more"])
def test_pulse_is_notified_only_if_a_worker_waits_for_tokens(queue: OneQueue, why: str) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    first, second = two_limited(queue)
    if why != "nothing was taken":
        fill_bucket(queue)
    if why == "no worker is limited":
        second.turn(want=0)
        first.turn(want=0)
    elif why == "there are more":
        set_rate(queue, 1, HOUR_MS, burst=2)
    with subscription(queue) as pulse:
        first.turn(want=0 if why == "nothing was taken" else 1)
        assert pulse.delays() == []


@pytest.mark.parametrize("why", ["the rate was changed", "the clock was set back"])
def test_an_overdrawn_bucket_refills_from_now(queue: OneQueue, why: str) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue(*"ab")
    worker = queue.worker()
    worker.turn(want=1)
    set_rate(queue, 100, 1000, burst=4)
    if why == "the clock was set back":
        queue.redis.hset(queue.key("counts"), "bucket_us", str((time.time() + 7200) * 1e6))
    assert worker.whole_turn(want=1, done="a").limited
    wait_until(lambda: tokens(queue) == 4, 1, "it is full")
    assert worker.turn(want=1) == ["b"]


def test_a_bucket_that_is_not_overdrawn_is_left_alone(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=2)
    queue.enqueue("a")
    queue.worker().turn(want=1)
    fill_bucket(queue)
    queue.recovery().promote(queue.name)
    assert queue.hash("counts")["bucket_us"] == "0"


@pytest.mark.parametrize(("count", "period_ms"), [(7, 1000), (7000, 1000), (29_999, 1000), (50, 1000)])
def test_each_token_takes_exactly_its_time_for_any_number_of_claims(
    queue: OneQueue, count: int, period_ms: int
) -> None:
    set_rate(queue, count, period_ms, burst=10**6)
    queue.enqueue(*(str(number) for number in range(40)))
    worker = queue.worker()
    start_us = int(time.time() + 10) * 1_000_000
    queue.redis.hset(queue.key("counts"), "bucket_us", start_us)
    for _ in range(40):
        worker.turn(want=1)
    taken_us = float(queue.hash("counts")["bucket_us"]) - start_us
    exact_us = period_ms * 1000 / count
    assert 40 * exact_us <= taken_us < 40 * (exact_us + 0.5)


def test_stale_hints_of_another_priority_do_not_wake_a_worker_repeatedly(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(want=1, done="a")
    queue.enqueue("b", "c", priority=0)
    queue.producer.enqueue([new_job({}, id="b", priority=0, run_at=time.time() + 3600)], Update("update"))
    queue.producer.cancel("c")
    assert worker.block() == "", "there is a hint, but no job waits"
    assert worker.whole_turn(want=1).limited
    fill_bucket(queue)
    assert not worker.whole_turn(want=1).limited
    assert worker.block() is None, "the turn has removed the stale hints"


@pytest.mark.parametrize("by", ["configure", "create"])
def test_a_changed_limit_is_published_even_without_limited_workers(redis_url: str, by: str) -> None:
    with external_queue(redis_url, max_active=1) as queue:
        queue.enqueue(*"ab")
        assert queue.idle("w1") == "a"
        assert queue.idle("w2") is None
        with subscription(queue) as pulse:
            if by == "create":
                queue.create(max_active=0)
            else:
                queue.registry.configure(queue.name, {"max_active": 0}, {})
            assert pulse.delays() == [0]


def test_a_queue_without_limits_publishes_no_option_changes(queue: OneQueue) -> None:
    with subscription(queue) as pulse:
        queue.create(size=2)
        queue.registry.configure(queue.name, {"size": 3}, {})
        assert pulse.delays() == []


def test_promote_comes_back_until_a_lifted_limit_has_woken_all_workers(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"ab")
    queue.worker("w0").turn(want=1)
    queue.redis.zadd(queue.key("limited"), {f"p1 v{number}": number for number in range(150)})
    queue.create(max_active=0)
    assert queue.recovery().promote(queue.name) == 0
    assert len(limited(queue)) == 50
    assert queue.recovery().promote(queue.name) is None
    assert limited(queue) == []


def test_a_schedule_fires_while_workers_are_limited(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=1)
    schedules = ScheduleRig(queue)
    schedules.set()
    two_limited(queue)
    schedules.pass_time(HOUR_MS)
    due, now_ms = schedules.due()
    fired, wait_ms = schedules.ticker.fire(queue.name, due[0], now_ms)
    schedules.close()
    assert fired
    assert wait_ms is not None


def test_a_suspect_gets_the_next_free_place_before_other_workers(queue: OneQueue) -> None:
    queue.create(max_active=2)
    retry = queue.worker("r1", lane="retry")
    first, second = two_suspects(queue, retry)
    assert first.whole_turn(want=1, done="c").limited
    assert queue.state().retry_tokens == 1
    assert wakes(queue, first) == 0
    assert retry.turn(want=1) == ["a"]
    assert second.turn(want=1, done="d") == ["e"], "only one place is reserved, and only until it is taken"


def test_a_suspect_gets_the_next_token_before_waiting_workers(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=4)
    retry = queue.worker("r1", lane="retry")
    first, second = two_suspects(queue, retry)
    assert first.whole_turn(want=1, done="c").limited
    set_rate(queue, 1, HOUR_MS, burst=1)
    fill_bucket(queue)
    queue.recovery().promote(queue.name)
    assert (wakes(queue, first), queue.state().retry_tokens) == (0, 1)
    assert second.whole_turn(want=1, done="d").limited, "a worker that comes meanwhile is limited"
    with subscription(queue) as pulse:
        assert retry.turn(want=1) == ["a"]
        assert pulse.delays(), "the next token is published for the workers still waiting"
    fill_bucket(queue)
    queue.recovery().promote(queue.name)
    assert wakes(queue, first) == 1, "the retry process is busy"


@pytest.mark.parametrize("how", ["it is taken out", "it does not come"])
def test_a_place_is_not_reserved_forever_for_a_dead_retry_process(queue: OneQueue, how: str) -> None:
    queue.create(max_active=2)
    retry = queue.worker("r1", lane="retry")
    first, _ = two_suspects(queue, retry)
    assert 20_000 < int(queue.hash("counts")["left_until_ms"]) - time.time() * 1000 < 40_000
    if how == "it is taken out":
        queue.recover(retry)
    else:
        queue.redis.hset(queue.key("counts"), "left_until_ms", int(time.time() * 1000))
    assert first.turn(want=1, done="c") == ["e"]


def test_no_place_is_reserved_for_a_helper_process_that_ends_without_a_suspect(queue: OneQueue) -> None:
    queue.create(max_active=2)
    first, _ = two_suspects(queue, queue.worker("r1", lane="retry"))
    queue.redis.hdel(queue.key("counts"), "left_until_ms")
    alone = queue.worker("o1", lane="suspects")
    assert alone.turn(want=1) == []
    assert "left_until_ms" not in queue.hash("counts")
    first.turn(done="c")
    assert alone.turn(want=1) == ["a"], "a free place is enough for it"


def test_the_retry_process_is_not_woken_again_while_a_token_is_reserved_for_it(queue: OneQueue) -> None:
    set_rate(queue, 1, HOUR_MS, burst=4)
    retry = queue.worker("r1", lane="retry")
    two_suspects(queue, retry)
    assert int(queue.hash("counts")["left_until_ms"]) - time.time() * 1000 > HOUR_MS / 2, (
        "reserved until there is a token"
    )
    queue.recovery().promote(queue.name)
    assert queue.state().retry_tokens == 0
    queue.redis.hdel(queue.key("counts"), "left_until_ms")
    queue.recovery().promote(queue.name)
    assert queue.state().retry_tokens == 1
    assert retry.block() == ""
    assert retry.turn(want=1) == []
    assert queue.state().retry_tokens == 0
    queue.recovery().promote(queue.name)
    assert queue.state().retry_tokens == 0


def test_a_worker_is_woken_when_the_last_suspect_leaves(queue: OneQueue) -> None:
    queue.create(max_active=2)
    retry = queue.worker("r1", lane="retry")
    first, _ = two_suspects(queue, retry)
    assert first.whole_turn(want=1, done="c").limited
    queue.producer.cancel("a")
    assert wakes(queue, first) == 0
    queue.producer.cancel("b")
    assert wakes(queue, first) == 1


def test_no_place_is_reserved_when_the_last_suspect_is_gone(queue: OneQueue) -> None:
    queue.create(max_active=2)
    retry = queue.worker("r1", lane="retry")
    first, _ = two_suspects(queue, retry)
    for job_id in "ab":
        queue.producer.cancel(job_id)
    assert first.turn(want=1, done="c") == ["e"]


def test_the_retry_process_is_never_limited_and_waits_for_suspects_only(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"ab")
    queue.worker("w1").turn(want=1)
    assert not queue.worker("r1", lane="retry").whole_turn(want=1).limited
    assert limited(queue) == []
    assert "left_until_ms" not in queue.hash("counts")


def test_a_worker_that_claims_nothing_is_not_limited(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"ab")
    queue.worker("w1").turn(want=1)
    assert not queue.worker("w2").whole_turn(want=0).limited
    assert limited(queue) == []


def test_the_first_limited_worker_is_woken_first_by_a_wake_that_expires(queue: OneQueue) -> None:
    queue.create(max_active=1)
    queue.enqueue(*"abc")
    first = queue.worker("w1")
    first.turn(want=1)
    earlier, later = queue.worker("z"), queue.worker("b")
    for worker in (earlier, later):
        assert worker.whole_turn(want=1).limited
    first.turn(done="a")
    assert (wakes(queue, earlier), wakes(queue, later)) == (1, 0)
    assert 50 < queue.redis.ttl(wake_key(queue.base, "p1", "z")) <= 60
