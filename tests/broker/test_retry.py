"""Failed attempts: when the job is retried, and when it is dead."""

import json
import time

import pytest

from forq.broker.claim import Settled
from tests.support.drive.one_queue import HandWorker, OneQueue, State, one_queue

ERROR = '{"name":"ValueError","message":"no","kind":"retriable","traceback":"..."}'
BRIEF = '{"name":"ValueError","message":"no","kind":"retriable"}'


def fail(
    worker: HandWorker, job_id: str, *, kind: str = "retriable", retry_at_ms: int | str = "", chance: float = 0.5
) -> None:
    worker.number += 1
    failed: Settled = [job_id, worker.fence, 2000, ERROR, BRIEF, kind, retry_at_ms, f"{chance}"]
    worker.consumer.turn(worker.number, [], failed, 0, 0)


def claim_and_fail(queue: OneQueue, worker: HandWorker, job_id: str, **how: object) -> float:
    """Returns the seconds until the next attempt."""
    assert worker.turn(want=1) == [job_id]
    fail(worker, job_id, **how)  # type: ignore[arg-type]
    due = queue.redis.zscore(queue.key("scheduled"), job_id)
    now = queue.redis.time()
    return due / 1000 - (now[0] + now[1] / 1e6) if due is not None else 0.0


def make_due(queue: OneQueue, *ids: str) -> None:
    for number, job_id in enumerate(ids):
        queue.set_due({job_id: 1000 + number})


@pytest.mark.spec("Q36", "Q37", "M12")
def test_each_failure_doubles_the_wait_up_to_the_maximum(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=10, min_backoff_ms=2000, max_backoff_ms=10_000) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        waits = []
        for _ in range(5):
            waits.append(claim_and_fail(queue, worker, "a"))
            make_due(queue, "a")
        assert waits == pytest.approx([2, 4, 8, 10, 10], abs=0.2)
        assert queue.inspector.job("a")["retry_count"] == 5


@pytest.mark.spec("Q7", "M12")
def test_a_retried_job_is_scheduled_and_then_waits_again(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=1, min_backoff_ms=60_000, max_backoff_ms=60_000) as queue:
        worker = queue.worker()
        queue.enqueue("a", priority=3)
        claim_and_fail(queue, worker, "a")
        assert queue.state() == State(jobs={"a"})
        counts = queue.inspector.counts()
        assert (counts.waiting, counts.scheduled, counts.active) == (0, 1, 0)
        assert queue.inspector.job("a")["state"] == "scheduled"
        assert worker.turn(want=1) == []
        make_due(queue, "a")
        assert queue.recovery().promote(queue.name) is None
        assert queue.state() == State(jobs={"a"}, waiting={3: ["a"]})
        assert queue.journal_events()[-3:] == [("retried", "a"), ("scheduled", "a"), ("promoted", "a")]


@pytest.mark.spec("Q35", "M13")
def test_a_job_without_retries_left_is_dead_with_all_its_attempts(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        for _ in range(3):
            claim_and_fail(queue, worker, "a")
        assert queue.state().dead == ["a"]
        job = queue.inspector.job("a")
        assert (job["state"], job["retry_count"], job["error"]) == ("dead", 2, json.loads(ERROR))
        assert [attempt["outcome"] for attempt in job["attempts"]] == ["failed"] * 3
        assert job["attempts"][0]["error"] == json.loads(BRIEF)
        assert job["attempts"][0]["ended_at"] - job["attempts"][0]["started_at"] == pytest.approx(0.002, abs=0.002)
        assert queue.hash("attempts") == {}


@pytest.mark.spec("Q35")
def test_a_permanent_failure_is_not_retried(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=10) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        claim_and_fail(queue, worker, "a", kind="permanent")
        assert queue.state() == State(jobs=set(), dead=["a"])


@pytest.mark.spec("Q37")
def test_the_retry_time_of_the_handler_overrides_the_backoff(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=10) as queue:
        worker = queue.worker()
        queue.enqueue("a", "b")
        wait = claim_and_fail(queue, worker, "a", retry_at_ms=round(time.time() * 1000) + 90_000)
        assert wait == pytest.approx(90, abs=1)
        claim_and_fail(queue, worker, "b", retry_at_ms=1)
        assert queue.state().waiting == {5: ["b"]}


@pytest.mark.parametrize(("chance", "wait"), [(0.0, 80), (0.5, 100), (1.0, 120)])
def test_jitter_spreads_the_waits(redis_url: str, chance: float, wait: float) -> None:
    with one_queue(redis_url, max_retries=1, min_backoff_ms=100_000, max_backoff_ms=100_000, jitter=20) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        assert claim_and_fail(queue, worker, "a", chance=chance) == pytest.approx(wait, abs=0.5)


@pytest.mark.spec("Q9", "M3")
def test_changed_options_apply_to_jobs_already_in_the_queue(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=10, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        claim_and_fail(queue, worker, "a")
        queue.create(max_retries=1)
        claim_and_fail(queue, worker, "a")
        assert queue.state().dead == ["a"]


def test_only_the_last_ten_attempts_are_kept(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=50, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        for _ in range(14):
            claim_and_fail(queue, worker, "a")
        assert len(queue.inspector.job("a")["attempts"]) == 10
        worker.turn(want=1)
        worker.turn(done="a")
        assert queue.hash("attempts") == {}


def test_stalled_and_interrupted_attempts_are_stored_with_their_cause(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    queue.recover(worker, 0, running=True)
    other = queue.worker("w2")
    other.turn(want=1)
    queue.recover(other, 0, running=True, outcome="interrupted")
    outcomes = [(attempt["outcome"], attempt["cause"]) for attempt in queue.inspector.job("a")["attempts"]]
    assert outcomes == [("stalled", "signal 9"), ("interrupted", "signal 9")]
    assert queue.stall_count("a") == 1


@pytest.mark.spec("Q29")
def test_cancel_takes_a_scheduled_job(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=3) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        claim_and_fail(queue, worker, "a")
        assert queue.producer.cancel("a")
        assert queue.state() == State(jobs=set())
        assert (queue.hash("attempts"), queue.inspector.counts().scheduled) == ({}, 0)


def test_jobs_due_at_the_same_time_keep_their_order(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=3) as queue:
        worker = queue.worker()
        ids = [chr(ord("z") - n) for n in range(20)]
        queue.enqueue(*ids)
        for job_id in ids:
            claim_and_fail(queue, worker, job_id, retry_at_ms=round(time.time() // 1000 * 10**6) + 2 * 10**6)
        for job_id, score in queue.redis.zrange(queue.key("scheduled"), 0, -1, withscores=True):
            queue.set_due({job_id: score - 3 * 10**6})
        assert queue.recovery().promote(queue.name) is None
        assert queue.pending() == ids


def test_pages_show_scheduled_jobs_after_the_waiting_ones(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=3) as queue:
        worker = queue.worker()
        queue.enqueue("a", "b")
        claim_and_fail(queue, worker, "a")
        page = queue.inspector.jobs()
        assert [(job["id"], job["state"]) for job in page.jobs] == [("b", "waiting"), ("a", "scheduled")]
        assert [job["id"] for job in queue.inspector.jobs("scheduled").jobs] == ["a"]
