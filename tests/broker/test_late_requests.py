"""Late requests: sent over an abandoned connection, they arrive after newer requests of the same worker."""

import pytest

from forq.broker.recovery import Position
from forq.errors import Fenced
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, OneQueue, State

LARGEST = 2**53 - 1


def send_late(
    worker: HandWorker, number: int, *, done: str = "", fence: str = "", keep: int = 0, want: int = 3
) -> None:
    """Delivers a turn with this number; it must be refused."""
    settled: list[bytes | str | int] = [part for job_id in done for part in (job_id, fence, 7)]
    with pytest.raises(Fenced, match="another process uses the name of this worker of queue 'q'"):
        worker.consumer.turn(number, settled, [], keep, want)


def beat(queue: OneQueue, worker: HandWorker) -> None:
    queue.recovery().heartbeat("q", EXPIRY_MS, [worker.position(0, running=True)])


@pytest.mark.parametrize("keep", [0, 1])
def test_a_late_turn_takes_no_jobs_from_its_worker(queue: OneQueue, keep: int) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    before = queue.state()

    send_late(worker, 1, keep=keep)

    assert queue.state() == before
    assert worker.whole_turn(done="a").refused == []


def test_a_late_turn_settles_nothing(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    late = worker.number, worker.fence
    worker.turn(keep=1)

    send_late(worker, late[0], done="a", fence=late[1])

    assert queue.state() == State(jobs={"a"}, active={"a": "w1"}, processing={"w1": ["a"]})


def test_a_late_turn_does_not_lower_the_registered_turn_number(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    for _ in range(3):
        worker.turn()
    worker.turn(want=2)

    send_late(worker, 2)

    assert queue.hash("processor:p1:workers") == {"w1": "4"}
    assert queue.rescue(worker, 0) == 1


def test_a_turn_that_arrives_twice_is_applied_once(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    send_late(worker, worker.number)
    assert queue.state().active == {"a": "w1"}


def test_a_late_turn_is_still_refused_after_a_rescue(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    worker = queue.worker()
    worker.turn()
    worker.turn(want=3)
    assert queue.rescue(worker, 1) == 1
    assert queue.hash("processor:p1:workers") == {"w1": "2:1"}

    send_late(worker, 2)
    send_late(worker, 1)

    assert queue.state().active == {"b": "w1"}
    assert worker.whole_turn(done="b").refused == []


def test_turn_numbers_are_distinguished_up_to_53_bits(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.number = LARGEST - 3
    worker.turn()
    send_late(worker, LARGEST - 3)
    # In the packed word of the scoreboard these two would be equal.
    send_late(worker, LARGEST - 2 - 2**20)
    assert worker.turn(want=1) == ["a"]
    send_late(worker, LARGEST - 2)
    worker.turn(done="a")
    assert queue.hash("processor:p1:workers") == {"w1": str(LARGEST)}


def test_turn_numbers_are_compared_as_numbers(queue: OneQueue) -> None:
    worker = queue.worker()
    for _ in range(11):
        worker.turn()
    assert queue.hash("processor:p1:workers") == {"w1": "11"}


def test_a_late_turn_returns_the_job_moved_by_its_blmove(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    worker = queue.worker()
    worker.turn()
    worker.turn(want=1)

    assert worker.block() == "b"
    send_late(worker, 1)

    assert queue.state() == State(
        jobs={"a", "b", "c"}, waiting={5: ["b", "c"]}, active={"a": "w1"}, processing={"w1": ["a"]}
    )
    assert worker.whole_turn(done="a").refused == []


def test_a_late_blmove_of_an_id_that_its_worker_runs_leaves_the_job_with_the_worker(queue: OneQueue) -> None:
    """A stale hint of the same id, from before it was cancelled and enqueued again."""
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn()
    worker.turn(want=1)
    queue.redis.rpush(queue.key("pending"), "a")
    queue.set_stale("5:a", 1)
    assert worker.block() == "a"

    send_late(worker, 1)

    assert queue.state() == State(jobs={"a"}, active={"a": "w1"}, processing={"w1": ["a"]})


def test_a_wake_token_moved_by_a_late_blmove_is_replaced(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn()
    worker.turn(want=1)
    queue.enqueue("b", priority=3)
    assert worker.block() == ""

    send_late(worker, 1)

    assert worker.held() == ["a"]
    assert queue.pending() == [""]


def test_heartbeats_return_a_job_moved_late_behind_a_long_job(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    beat(queue, worker)
    assert worker.block() == "b"

    beat(queue, worker)

    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["b"]}, active={"a": "w1"}, processing={"w1": ["a"]})


def test_a_heartbeat_leaves_the_list_of_an_active_worker_alone(queue: OneQueue) -> None:
    """The worker's turns clean it up; checking every batch would cost the server more."""
    queue.enqueue("a", "b")
    worker = queue.worker()
    beat(queue, worker)
    worker.turn(want=1)
    assert worker.block() == "b"

    beat(queue, worker)
    assert worker.held() == ["a", "b"]

    assert worker.turn(done="a", want=1) == ["b"]


def test_a_heartbeat_does_not_return_jobs_just_given_to_a_waiting_worker(queue: OneQueue) -> None:
    worker = queue.worker()
    worker.turn()
    beat(queue, worker)
    queue.enqueue("a")
    worker.block()
    beat(queue, worker)
    assert worker.turn(want=1) == ["a"]


def test_a_late_join_does_not_lower_the_turn_number(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn()
    worker.turn(want=1)

    worker.consumer.join(EXPIRY_MS)

    send_late(worker, 1)
    assert queue.state().active == {"a": "w1"}


def test_a_late_join_of_a_removed_worker_is_refused(queue: OneQueue) -> None:
    worker = queue.worker()
    worker.turn()
    queue.recover(worker)
    with pytest.raises(Fenced):
        worker.consumer.join(EXPIRY_MS)
    assert queue.hash("processor:p1:workers") == {}


def test_a_late_join_of_a_queue_deleted_and_created_again_is_refused(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.registry.delete("q", force=True)
    queue.registry.purge("q", lambda lines: None)
    queue.create()
    with pytest.raises(Fenced):
        worker.consumer.join(EXPIRY_MS)
    assert queue.worker("w2").turn() == []


def test_a_late_rescue_does_not_apply_to_a_later_turn(queue: OneQueue) -> None:
    """Even if the turn numbers have the same low bits."""
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.number = 2**20
    worker.turn(want=2)
    assert queue.recovery().rescue("q", Position("w1", 1, 0, True)) == 0
    assert queue.state().active == {"a": "w1", "b": "w1"}
