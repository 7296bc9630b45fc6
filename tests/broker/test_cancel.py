"""cancel and remove are O(1) and leave nothing behind that could hide a later job."""

import pytest

from forq.broker.enqueue import JobIdentity, new_job
from forq.errors import UnknownQueue
from tests.support.drive.one_queue import OneQueue, State


@pytest.mark.spec("N8")
@pytest.mark.parametrize("verb", ["cancel", "remove"])
def test_a_waiting_job_is_removed(queue: OneQueue, verb: str) -> None:
    queue.enqueue("a", "b", "c")
    assert getattr(queue.producer, verb)("b") is True
    assert queue.state() == State(jobs={"a", "c"}, waiting={5: ["a", "b", "c"]}, stale={"5:b": 1})
    assert queue.worker().turn(want=3) == ["a", "c"]
    assert queue.state().stale == {}
    assert queue.inspector.counts().dropped == 0


@pytest.mark.spec("N8")
@pytest.mark.parametrize("verb", ["cancel", "remove"])
def test_an_unknown_job_is_reported_as_missing(queue: OneQueue, verb: str) -> None:
    assert getattr(queue.producer, verb)("a") is False
    queue.registry.delete(queue.name, force=True)
    with pytest.raises(UnknownQueue):
        getattr(queue.producer, verb)("a")


def test_a_job_enqueued_again_goes_to_its_new_place(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.producer.cancel("a")
    queue.enqueue("a")
    assert queue.worker().turn(want=9) == ["b", "a"]
    assert queue.state().stale == {}


def test_a_job_may_be_enqueued_again_with_another_priority(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.producer.cancel("a")
    queue.enqueue("a", priority=9)
    assert queue.worker().turn(want=9) == ["b", "a"]
    assert queue.state().stale == {}


def test_enqueueing_and_cancelling_leaves_nothing_behind(queue: OneQueue) -> None:
    for priority in (5, 3):
        for _ in range(20):
            queue.enqueue("a", "b", "c", priority=priority)
            for job_id in "abc":
                queue.producer.cancel(job_id)
    assert queue.state() == State(jobs=set())
    assert queue.summary().other_hints == 0


def test_cancelling_behind_a_waiting_job_leaves_only_that_job(queue: OneQueue) -> None:
    queue.enqueue("z")
    for _ in range(20):
        queue.enqueue("a", "b")
        queue.producer.cancel("a")
        queue.producer.cancel("b")
    assert queue.state() == State(jobs={"z"}, waiting={5: ["z"]})


def test_cancel_leaves_a_running_job_alone(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.worker().turn(want=1)
    before = queue.state()
    assert queue.producer.cancel("a") is False
    assert queue.state() == before
    assert not queue.inspector.job("a")["removed"]


@pytest.mark.parametrize("end", ["done", "failed", "crash", "hand back"])
def test_a_removed_running_job_disappears_when_it_ends(queue: OneQueue, end: str) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    assert queue.producer.remove("a") is True
    assert queue.producer.remove("a") is True
    assert queue.inspector.job("a")["removed"]
    assert queue.state().active == {"a": "w1"}
    if end == "crash":
        queue.recover(worker, running=True)
    else:
        turn = worker.whole_turn(done="a" * (end == "done"), failed="a" * (end == "failed"))
        assert turn.refused == []
    assert queue.state() == State(jobs=set())
    assert queue.enqueue("a") == ["a"]


def test_a_stale_count_never_outlives_its_hint_in_a_processing_list(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.block()
    queue.producer.cancel("a")
    worker.turn()
    assert queue.state().stale == {}
    queue.enqueue("a")
    assert queue.worker("w2").turn(want=2) == ["b", "a"]


def test_a_stale_hint_of_a_job_running_from_another_list_consumes_its_count(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    blocked, other = queue.worker("w1"), queue.worker("w2")
    blocked.block()
    queue.producer.cancel("a")
    queue.enqueue("a", priority=0)
    assert other.turn(want=1) == ["a"]
    blocked.turn()
    other.turn(done="a")
    queue.enqueue("a")
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["b", "a"]})
    assert other.turn(want=2) == ["b", "a"]


def test_a_hint_in_flight_counts_for_the_job_enqueued_again(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    blocked, other = queue.worker("w1"), queue.worker("w2")
    blocked.block()
    queue.producer.cancel("a")
    queue.enqueue("a")
    assert other.turn(want=3) == ["b"]
    assert blocked.turn(want=1) == ["a"]
    assert queue.state().stale == {}


def test_cancelling_does_not_move_the_job_in_front_of_it(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.producer.cancel("a")
    queue.enqueue("a", "c")
    queue.producer.cancel("c")
    assert queue.worker().turn(want=9) == ["b", "a"]


def stored(queue: OneQueue) -> JobIdentity:
    ((_, identity),) = queue.producer.enqueue_identified([new_job(1, id="a")])
    assert identity is not None
    return identity


def test_only_the_waiting_job_that_is_meant_is_cancelled(queue: OneQueue) -> None:
    first = stored(queue)
    assert queue.producer.cancel("a", first)
    second = stored(queue)
    assert not queue.producer.cancel("a", first)
    assert queue.producer.cancel("a", second)


def test_only_the_blocked_job_that_is_meant_is_cancelled(queue: OneQueue) -> None:
    worker = queue.worker()
    first = stored(queue)
    worker.turn(want=1)
    behind = stored(queue)
    assert not queue.producer.cancel("a", first), "it runs"
    assert queue.inspector.counts().blocked == 1
    assert worker.turn(want=1, done="a") == ["a"]
    later = stored(queue)
    assert not queue.producer.cancel("a", behind), "it runs"
    assert queue.producer.cancel("a", later)
    assert queue.inspector.counts().blocked == 0


def test_a_job_with_a_broken_record_can_be_cancelled(queue: OneQueue) -> None:
    identity = stored(queue)
    queue.redis.hset(queue.key("jobs"), "a", "broken")
    assert queue.producer.cancel("a", identity)
