"""Stalls and timeouts: how the running job comes back, and when it is dead instead."""

import json
from typing import Any

import pytest

from forq.broker.claim import Limits
from forq.broker.recovery import MAX_STACK, Outcome, Position
from forq.settings import stored_defaults
from tests.support.drive.one_queue import HandWorker, OneQueue, State, one_queue


def counts(queue: OneQueue, job_id: str) -> tuple[int, int, int]:
    job = queue.inspector.job(job_id)
    return job["retry_count"], job["stall_count"], job["timeout_count"]


def lose(queue: OneQueue, outcome: Outcome, lane: str = "main", **more: Any) -> HandWorker:
    """A worker claims one job, starts it and is lost."""
    worker = queue.worker(f"w{len(queue.workers) + 1}", lane=lane)
    assert len(worker.turn(want=1)) == 1
    at = Position(worker.name, worker.number, 0, True)
    queue.recovery().recover(queue.name, "p1", at, outcome=outcome, cause="signal 9", **more)
    return worker


@pytest.mark.parametrize(
    ("outcome", "place", "expected", "verbs"),
    [
        ("stalled", ["b", "c", "d", "e"], (0, 1, 0), ["stalled", "returned"]),
        ("timed_out", ["c", "d", "e", "b"], (0, 0, 1), ["timed_out", "returned"]),
        ("interrupted", ["b", "c", "d", "e"], (0, 0, 0), ["interrupted", "returned"]),
    ],
)
@pytest.mark.spec("Q17", "Q19")
def test_the_running_job_is_counted_by_its_outcome_and_the_rest_is_returned_uncounted(
    queue: OneQueue, outcome: Outcome, place: list[str], expected: tuple[int, int, int], verbs: list[str]
) -> None:
    queue.enqueue("a", "b", "c", "d", "e")
    worker = queue.worker()
    worker.turn(want=4)
    queue.recover(worker, 1, running=True, outcome=outcome)
    assert queue.state() == State(jobs=set("bcde"), waiting={5: place})
    assert [counts(queue, job_id) for job_id in "bcde"] == [expected, *[(0, 0, 0)] * 3]
    about_b = [event for event in queue.events() if event.job == "b"][2:]
    assert [event.verb for event in about_b] == verbs
    assert (about_b[0].fence, about_b[0].cause) == (int(worker.fence), "signal_9")
    [attempt] = queue.inspector.job("b")["attempts"]
    assert (attempt["outcome"], attempt["cause"]) == (outcome, "signal 9")


def test_a_timed_out_job_goes_to_the_back_of_its_priority(queue: OneQueue) -> None:
    queue.enqueue("a", "b", priority=3)
    queue.enqueue("c")
    lose(queue, "timed_out")
    assert queue.state() == State(jobs=set("abc"), waiting={3: ["b", "a"], 5: ["c"]})


@pytest.mark.parametrize("outcome", ["stalled", "timed_out", "interrupted", "suspect"])
def test_recovering_twice_counts_once(queue: OneQueue, outcome: Outcome) -> None:
    queue.enqueue("a")
    worker = lose(queue, outcome)
    before, records = queue.state(), queue.hash("jobs")
    queue.recover(worker, running=True, outcome=outcome)
    assert (queue.state(), queue.hash("jobs")) == (before, records)
    assert len(queue.inspector.job("a")["attempts"]) == 1


@pytest.mark.parametrize("outcome", ["stalled", "timed_out", "interrupted", "suspect"])
def test_a_removed_job_is_cancelled_for_every_loss_of_its_worker(queue: OneQueue, outcome: Outcome) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.producer.remove("a")
    queue.recover(worker, running=True, outcome=outcome)
    assert queue.state() == State(jobs=set())
    assert queue.hash("attempts") == {}
    assert queue.journal_events()[-1] == ("cancelled", "a")


def test_an_attempt_has_its_start_time_and_stack(queue: OneQueue) -> None:
    queue.enqueue("a")
    stack = 'File "a.py", line 7\n\ttime.sleep(99) # "ü" \\ \ud800\n'
    lose(queue, "timed_out", micros=2_500_000, stack=stack)
    [attempt] = queue.inspector.job("a")["attempts"]
    assert attempt["ended_at"] - attempt["started_at"] == pytest.approx(2.5, abs=0.002)
    assert attempt["stack"] == stack.replace("\ud800", "?")


def test_a_long_stack_is_truncated_at_its_end_and_a_missing_one_is_not_stored(queue: OneQueue) -> None:
    queue.enqueue("a")
    lose(queue, "timed_out", stack="x" * MAX_STACK + "y")
    lose(queue, "timed_out")
    first, second = queue.inspector.job("a")["attempts"]
    assert first["stack"] == "x" * MAX_STACK
    assert first["started_at"] is None
    assert "stack" not in second


def test_peak_memory_is_stored_if_known(queue: OneQueue) -> None:
    queue.enqueue("a")
    lose(queue, "stalled", peak_bytes=5_000_000_000)
    lose(queue, "stalled")
    first, second = queue.inspector.job("a")["attempts"]
    assert first["peak_memory"] == 5_000_000_000
    assert "peak_memory" not in second


def test_a_dead_job_shows_the_stacks_of_its_attempts(redis_url: str) -> None:
    with one_queue(redis_url, max_timeouts=0) as queue:
        queue.enqueue("a")
        lose(queue, "timed_out", stack='in "f"\nin g')
        assert queue.worker("w9").turn(want=1) == []
        assert queue.inspector.job("a")["attempts"][0]["stack"] == 'in "f"\nin g'


@pytest.mark.spec("Q14", "Q17")
def test_a_timeout_settled_by_a_turn_is_counted_and_the_job_waits_behind_the_others(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    assert worker.turn(failed="a", kind="timeout") == []
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["b", "a"]})
    assert counts(queue, "a") == (0, 0, 1)
    [attempt] = queue.inspector.job("a")["attempts"]
    assert (attempt["outcome"], attempt["cause"], attempt["error"]) == ("timed_out", "timeout", {"message": "no"})
    *_, timed_out, returned = queue.events()
    assert (timed_out.verb, timed_out.fence) == ("timed_out", int(worker.fence))
    assert (timed_out.cause, timed_out.micros) == ("timeout", 7)
    assert (returned.verb, returned.fence, returned.job) == ("returned", 0, "a")


def test_a_dispatch_blocked_behind_a_timed_out_job_updates_it(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.enqueue("a", priority=2, if_exists="update")
    worker.turn(failed="a", kind="timeout")
    assert queue.state() == State(jobs={"a"}, waiting={2: ["a"]})
    assert counts(queue, "a") == (0, 0, 0), "the blocked dispatch resets the counts"
    assert [verb for verb, _ in queue.journal_events()[-3:]] == ["timed_out", "merged", "returned"]


def test_a_removed_job_that_times_out_is_cancelled(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.producer.remove("a")
    worker.turn(failed="a", kind="timeout")
    assert queue.state() == State(jobs=set())
    assert queue.journal_events()[-1] == ("cancelled", "a")


def test_a_timed_out_job_with_an_invalid_record_is_dead(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.redis.hset(queue.key("jobs"), "a", "garbage")
    worker.turn(failed="a", kind="timeout")
    assert queue.state() == State(jobs=set(), dead=["a"])


@pytest.mark.parametrize(("outcome", "name"), [("stalled", "StallError"), ("timed_out", "TimeoutError")])
@pytest.mark.spec("Q20", "Q39")
def test_a_job_lost_too_often_is_buried_by_the_claim(redis_url: str, outcome: Outcome, name: str) -> None:
    with one_queue(redis_url, max_stalls=2, max_timeouts=2) as queue:
        queue.enqueue("a")
        for _ in range(3):
            lose(queue, outcome)
        queue.enqueue("b")
        worker = queue.worker("w9")
        assert worker.turn(want=2) == ["b"]
        assert queue.state() == State(jobs={"b"}, active={"b": "w9"}, processing={"w9": ["b"]}, dead=["a"])
        job = queue.inspector.job("a")
        assert (job["error"]["name"], job["error"]["kind"], job["error"]["traceback"]) == (name, "stall", None)
        option = "max_stalls" if outcome == "stalled" else "max_timeouts"
        assert job["error"]["message"].endswith(f": 3; {option} is 2")
        assert [attempt["outcome"] for attempt in job["attempts"]] == [outcome] * 3
        assert queue.hash("attempts") == {}
        [line] = map(json.loads, queue.redis.lrange(queue.key("outbox"), 0, -1))
        assert (line["id"], line["fence"], line["error"]) == ("a", int(worker.fence), job["error"])
        fate = [(event.verb, event.fence, event.micros) for event in queue.events() if event.job == "a"][-2:]
        assert fate == [("claimed", int(worker.fence), None), ("dead", int(worker.fence), None)]
        assert (queue.inspector.counts().failed, queue.inspector.counts().waiting) == (1, 0)


def test_a_job_may_be_lost_as_often_as_allowed(redis_url: str) -> None:
    with one_queue(redis_url, max_stalls=1, max_timeouts=1) as queue:
        queue.enqueue("a")
        lose(queue, "stalled")
        lose(queue, "timed_out")
        assert queue.worker("w9").turn(want=1) == ["a"]


def test_a_claim_that_only_buries_returns_an_empty_batch_without_a_fence(redis_url: str) -> None:
    with one_queue(redis_url, max_stalls=0) as queue:
        queue.enqueue("a")
        lose(queue, "stalled")
        turn = queue.worker("w9").whole_turn(want=4)
        assert (turn.jobs, turn.fence) == ([], "")
        assert queue.state() == State(jobs=set(), dead=["a"])


def test_a_job_buried_by_the_claim_has_its_own_fence(redis_url: str) -> None:
    with one_queue(redis_url, max_stalls=0) as queue:
        queue.enqueue("a")
        lose(queue, "stalled")
        worker = queue.worker("w9")
        worker.turn(want=1)
        buried = next(event.fence for event in queue.events() if event.verb == "dead")
        queue.enqueue("b")
        worker.turn(want=1)
        assert int(worker.fence) > buried


def test_an_invalid_record_that_seems_to_have_counts_is_claimed_so_that_it_can_fail(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.hset(queue.key("jobs"), "a", "c")
    worker = queue.worker()
    assert worker.turn(want=1) == ["a"]
    worker.turn(failed="a")
    assert queue.state() == State(jobs=set(), dead=["a"])


@pytest.mark.spec("Q9", "Q20")
def test_the_current_maximum_applies(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        queue.enqueue("a", "b")
        lose(queue, "stalled")
        queue.create(max_stalls=0)
        assert queue.worker("w9").turn(want=2) == ["b"]
        assert queue.state().dead == ["a"]


@pytest.mark.spec("Q9")
def test_a_turn_returns_the_current_limits(redis_url: str) -> None:
    others = {"timeout_ms": 1500, "size": 7, "priority": 4, "max_retries": 6, "retry_lane_retries": 2}
    with one_queue(redis_url, max_data=99) as queue:
        queue.create(**others)
        worker = queue.worker()
        assert worker.whole_turn().limits == Limits(1500, 7, 4, 99, False, 6, 2)
        queue.create(timeout_ms=0, size=3)
        queue.enqueue("a")
        assert worker.whole_turn(want=1).limits == Limits(0, 3, 4, 99, False, 6, 2)


def test_a_queue_of_an_earlier_release_has_no_timeout_and_the_usual_limits(queue: OneQueue) -> None:
    for name in ("timeout_ms", "size", "priority", "max_stalls", "max_timeouts"):
        assert queue.redis.hdel(queue.key("options"), name) == 1
    queue.enqueue("a")
    for outcome in ("stalled", "timed_out") * 3:
        lose(queue, outcome)
    turn = queue.worker("w9").whole_turn(want=1)
    limits = turn.limits
    assert (limits.timeout_ms, limits.size, limits.priority, turn.jobs[0]) == (0, 1, 0, b"a")
    queue.recover(queue.workers[-1], running=True)
    assert queue.worker("w10").turn(want=1) == []


@pytest.mark.spec("Q6", "Q20")
def test_a_job_stalled_too_often_gets_a_fail_job_that_follows_the_same_rule(redis_url: str) -> None:
    with one_queue(redis_url, max_stalls=0) as queue:
        options, fail_options = {"fail_handler": 1, "max_stalls": 0}, {"max_stalls": 0}
        queue.registry.create(queue.name, "work", 100, stored_defaults(), options, fail_options=fail_options)
        queue.enqueue("a")
        lose(queue, "stalled")
        assert queue.worker("w9").turn(want=1) == []
        assert queue.redis.lrange(queue.key("failed"), 0, -1) == [b""]
        _, record = queue.claim_fail_job("r1")
        assert json.loads(record.partition(b"\n")[2])[2][2]["name"] == "StallError"
        queue.lose_fail_worker("r1", "stalled")
        assert queue.claim_fail_job("r2") == []
        assert queue.redis.zcard(queue.key("fail:dead")) == 1
        assert queue.redis.llen(queue.key("outbox")) == 1, "the failed job has its line already"


@pytest.mark.spec("Q20")
def test_the_same_rule_applies_in_the_retry_lane(redis_url: str) -> None:
    with one_queue(redis_url, max_stalls=0, retry_lane_retries=5, min_backoff_ms=0, max_backoff_ms=0) as queue:
        queue.enqueue("a", "b")
        worker = queue.worker()
        for job_id in "ab":
            worker.turn(want=1)
            worker.turn(failed=job_id)
        lose(queue, "stalled", "retry")
        assert queue.inspector.counts().retry == 2
        retry = queue.worker("r9", lane="retry")
        assert retry.turn(want=1) == ["b"]
        assert (queue.state().dead, queue.inspector.counts().retry) == (["a"], 0)


def test_a_job_in_the_retry_lane_that_times_out_stays_there(redis_url: str) -> None:
    with one_queue(redis_url, retry_lane_retries=5, min_backoff_ms=0, max_backoff_ms=0) as queue:
        queue.enqueue("a")
        worker, retry = queue.worker(), queue.worker("r1", lane="retry")
        worker.turn(want=1)
        worker.turn(failed="a")
        assert retry.turn(want=1) == ["a"]
        retry.turn(failed="a", kind="timeout")
        assert (queue.inspector.job("a")["state"], queue.inspector.counts().retry) == ("retry", 1)
        assert retry.turn(want=1) == ["a"]


def test_one_claim_buries_a_bounded_number_and_the_next_continues(redis_url: str) -> None:
    with one_queue(redis_url, max_stalls=0, max_items=0) as queue:
        ids = [f"n{number}" for number in range(400)]
        queue.enqueue(*ids)
        for job_id in ids:
            queue.redis.hset(queue.key("jobs"), job_id, "c5 1 0 1 0 0\n[null,null,1]")
        worker, dead = queue.worker(), 0
        for _ in range(10):
            assert worker.turn(want=1) == []
            now_dead = queue.inspector.counts().dead
            assert 0 < now_dead - dead <= 100
            dead = now_dead
            if dead == 400:
                break
            assert worker.block() is not None, "a blocked worker is woken for the rest"
        assert dead == 400
