"""The fate of a failed or lost attempt, as reported to the worker, the recovery, the eviction or the heartbeat."""

import time
from typing import Any

import pytest

from forq.broker.claim import Settled
from forq.broker.enqueue import Update, new_job
from forq.broker.recovery import Outcome, Recovered
from forq.broker.scripts import Fate
from tests.support.drive.one_queue import EXPIRY_MS, NO, HandWorker, OneQueue, one_queue

OPTIONS: dict[str, Any] = {
    "max_retries": 2,
    "retry_lane_retries": 1,
    "min_backoff_ms": 2000,
    "max_backoff_ms": 60_000,
    "jitter": 0,
}


def fail(worker: HandWorker, job_id: str = "a", kind: str = "retriable", retry_at_ms: int | str = "") -> Fate:
    worker.number += 1
    failed: Settled = [job_id, worker.fence, 7, NO, NO, kind, retry_at_ms, "0.5"]
    (fate,) = worker.consumer.turn(worker.number, [], failed, 0, 0).fates
    return fate


def make_due(queue: OneQueue) -> None:
    queue.set_due({"a": 1000})


def lose(queue: OneQueue, worker: HandWorker, outcome: Outcome) -> Recovered:
    at = worker.position(0, running=True)
    return queue.recovery().recover(queue.name, "p1", at, outcome=outcome, cause="signal 9")


def test_every_failure_reports_the_next_attempt_until_the_job_is_dead(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a")
        worker, lane, fates = queue.worker(), queue.worker("w2", lane="retry"), []
        for each in (worker, worker, worker, lane):
            assert each.turn(want=1) == ["a"]
            fates.append(fail(each))
            make_due(queue)
        assert fates == [
            Fate("retried", 2000, 1, 4),
            Fate("retried", 4000, 2, 4),
            Fate("lane", 8000, 3, 4),
            Fate("dead", 0, 4, 4),
        ]


def test_the_reported_wait_is_the_stored_one(redis_url: str) -> None:
    """Computed from the current options, with jitter."""
    with one_queue(redis_url, **OPTIONS | {"jitter": 50}) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        queue.set_options(min_backoff_ms=10_000, max_retries=7)
        worker.number += 1
        failed: Settled = ["a", worker.fence, 7, NO, NO, "retriable", "", "0.9"]
        before_ms = time.time() * 1000
        (fate,) = worker.consumer.turn(worker.number, [], failed, 0, 0).fates
        due_ms = queue.redis.zscore(queue.key("scheduled"), "a")
        assert fate == Fate("retried", 14_000, 1, 9)
        assert -1 <= due_ms - before_ms - fate.wait_ms < 5000


def test_a_permanent_failure_reports_remaining_attempts(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        assert fail(worker, kind="permanent") == Fate("dead", 0, 1, 4)


def test_the_retry_time_of_the_handler_is_reported(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        fate = fail(worker, retry_at_ms=round(time.time() * 1000) + 90_000)
        assert (fate.kind, fate.attempt, fate.max_attempts) == ("retried", 1, 4)
        assert 80_000 < fate.wait_ms <= 90_001
        make_due(queue)
        worker.turn(want=1)
        assert fail(worker, retry_at_ms=1) == Fate("retried", 0, 2, 4)


def test_timeouts_are_counted_separately(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS | {"max_timeouts": 1}) as queue:
        queue.enqueue("a")
        worker, fates = queue.worker(), []
        for kind in ("timeout", "retriable", "timeout"):
            worker.turn(want=1)
            fates.append(fail(worker, kind=kind))
            if kind == "retriable":
                make_due(queue)
        assert fates == [Fate("returned", 0, 1, 2), Fate("retried", 2000, 2, 5), Fate("dead", 0, 3, 3)]
        assert worker.turn(want=1) == []
        assert queue.state().jobs == set(), "the next claim has moved it to dead"


def test_a_failure_of_a_removed_or_returned_job_is_reported_as_such(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a", "b")
        worker = queue.worker()
        worker.turn(want=2)
        queue.producer.remove("a")
        assert fail(worker).kind == "removed"
        assert fail(worker, "b").kind == "refused", "it went back with the previous turn"


def test_a_turn_returns_fates_in_the_order_of_its_failures_and_before_its_jobs(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a", "b", "c", "d")
        worker = queue.worker()
        worker.turn(want=2)
        queue.producer.remove("a")
        turn = worker.whole_turn(want=2, failed="ab")
        assert [fate.kind for fate in turn.fates] == ["removed", "retried"]
        assert turn.jobs[::2] == [b"c", b"d"]
        assert worker.whole_turn(done="cd").fates == ()


def test_counts_reset_by_a_blocked_dispatch_do_not_change_the_reported_attempt(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        for number in (1, 2):
            worker.turn(want=1)
            if number == 2:
                queue.producer.enqueue([new_job(2, id="a")], Update(reset_counts=True))
            assert fail(worker).attempt == number
            make_due(queue)
        assert queue.inspector.job("a")["retry_count"] == 0


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("stalled", [Fate("returned", 0, 1, 2), Fate("dead", 0, 2, 2)]),
        ("timed_out", [Fate("returned", 0, 1, 3), Fate("returned", 0, 2, 3), Fate("dead", 0, 3, 3)]),
        ("interrupted", [Fate("interrupted", 0, 1, 1)] * 2),
        ("suspect", [Fate("suspect", 0, 1, 1)]),
    ],
)
def test_a_recovery_reports_the_fate_of_the_running_job(redis_url: str, outcome: Outcome, expected: list[Fate]) -> None:
    with one_queue(redis_url, **OPTIONS | {"max_stalls": 1, "max_timeouts": 2}) as queue:
        queue.enqueue("a", "b")
        for number, fate in enumerate(expected):
            worker = queue.worker(f"w{number}")
            worker.turn(want=2)
            assert lose(queue, worker, outcome) == Recovered(2, "a", fate)
            assert lose(queue, worker, outcome) == Recovered(0), "a second recovery finds nothing"
            queue.producer.cancel("b")
            queue.enqueue("b")


def test_a_lost_job_rescheduled_by_a_blocked_dispatch_reports_its_time(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        queue.producer.enqueue([new_job(2, id="a", run_in=60)])
        fate = lose(queue, worker, "stalled").fate
        assert fate is not None
        assert (fate.kind, fate.attempt) == ("returned", 1)
        assert 50_000 < fate.wait_ms <= 60_001


def test_a_recovery_without_a_running_job_reports_no_fate(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        at = worker.position(0, running=False)
        assert queue.recovery().recover(queue.name, "p1", at, outcome="stalled", cause="x") == Recovered(1)


def lost_supervisor(queue: OneQueue) -> None:
    """Processor p2 runs "a" and "b" and holds "c"."""
    queue.enqueue("a", "b", "c")
    first, second = queue.worker("w1", "p2"), queue.worker("w2", "p2")
    first.turn(want=1)
    second.turn(want=2)
    at = [first.position(0, running=True), second.position(0, running=True)]
    queue.recovery("p2").heartbeat(queue.name, EXPIRY_MS, at)


LOST = [("a", Fate("returned", 0, 1, 2)), ("b", Fate("returned", 0, 1, 2))]


def test_an_eviction_reports_the_fate_of_each_running_job(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS | {"max_stalls": 1}) as queue:
        lost_supervisor(queue)
        lost: list[tuple[str, Fate]] = []
        queue.recovery().evict(queue.name, "p2", "supervisor_lost", lambda job, fate: lost.append((job, fate)))
        assert sorted(lost) == LOST


def test_a_heartbeat_that_evicts_reports_the_same_fates_once(redis_url: str) -> None:
    with one_queue(redis_url, **OPTIONS | {"max_stalls": 1}) as queue:
        lost_supervisor(queue)
        queue.redis.zadd(queue.key("processors"), {"p2": 1})
        queue.redis.hset(queue.key("counts"), "sweep_after_ms", 0)
        assert sorted(queue.recovery().heartbeat(queue.name, EXPIRY_MS, []).lost) == LOST
        assert queue.recovery().heartbeat(queue.name, EXPIRY_MS, []).lost == []


def interrupt(worker: HandWorker, kind: str, job_id: str = "a", cause: str = "killed", stack: str = '""') -> Fate:
    worker.number += 1
    failed: Settled = [job_id, worker.fence, 7000, stack, cause, kind, "", "0.5"]
    (fate,) = worker.consumer.turn(worker.number, [], failed, 0, 0).fates
    return fate


def test_an_interrupted_job_returns_to_the_front_uncounted_and_shows_the_attempt(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b")
    worker.turn(want=1)
    assert interrupt(worker, "interrupted", stack='"File x, in y"') == Fate("interrupted", 0, 1, 1)
    job = queue.inspector.job("a")
    assert (job["state"], job["retry_count"], job["stall_count"], job["timeout_count"]) == ("waiting", 0, 0, 0)
    (attempt,) = job["attempts"]
    assert (attempt["outcome"], attempt["cause"], attempt["stack"]) == ("interrupted", "killed", "File x, in y")
    assert attempt["ended_at"] - attempt["started_at"] == pytest.approx(0.007, abs=0.002)
    assert worker.turn(want=2) == ["a", "b"]


def test_an_interrupted_job_takes_the_changes_of_the_dispatch_that_is_blocked_behind_it(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    queue.producer.enqueue([new_job({"changed": True}, id="a")])
    interrupt(worker, "interrupted")
    assert (queue.inspector.job("a")["data"], queue.hash("blocked")) == ({"changed": True}, {})


def test_a_cancelled_job_is_removed_and_the_dispatch_blocked_behind_it_becomes_a_job(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b")
    worker.turn(want=2)
    queue.producer.enqueue([new_job({"next": True}, id="a")])
    worker.number += 1
    failed: Settled = [x for job in "ab" for x in (job, worker.fence, 7, '""', "killed", "cancelled", "", "0.5")]
    assert worker.consumer.turn(worker.number, [], failed, 0, 0).fates == (Fate("removed", 0, 0, 0),) * 2
    assert (queue.inspector.job("a")["data"], queue.hash("attempts")) == ({"next": True}, {})
    assert worker.turn(want=2) == ["a"]


def test_a_job_that_was_marked_for_removal_is_removed_even_if_it_was_to_return(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    assert queue.producer.remove("a")
    assert interrupt(worker, "interrupted") == Fate("removed", 0, 0, 0)
    assert worker.turn(want=1) == []


@pytest.mark.parametrize("kind", ["interrupted", "cancelled"])
def test_an_interruption_of_an_earlier_claim_is_refused(queue: OneQueue, kind: str) -> None:
    """The worker was slow, and its job went to itself again."""
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    fence = worker.fence
    assert worker.turn(want=1) == ["a"], "it was returned and claimed again"
    worker.fence, claimed = fence, worker.fence
    assert interrupt(worker, kind) == Fate("refused", 0, 0, 0)
    assert claimed != fence
    assert queue.inspector.job("a")["state"] == "waiting", "what the worker does not know of returns"
    assert queue.inspector.job("a")["attempts"] == []


def test_an_interrupted_job_returns_before_the_jobs_behind_it(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b", "c", "d")
    worker.turn(want=3)
    assert interrupt(worker, "interrupted") == Fate("interrupted", 0, 1, 1)
    assert worker.turn(want=4) == ["a", "b", "c", "d"]
