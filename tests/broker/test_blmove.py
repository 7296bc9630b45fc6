"""A job moved by BLMOVE into a worker's list is claimed by its next turn or goes back to where it was."""

import pytest

from forq.broker.claim import Turn
from forq.errors import BackPressure, Fenced
from tests.support.drive.one_queue import HandWorker, OneQueue, State

NAME = "w" * 48


def wait(worker: HandWorker, want: int = 1) -> Turn:
    """Sends BLMOVE and a turn together, like an idle worker."""
    worker.turn()
    worker.number += 1
    turn = worker.consumer.wait_for_turn(worker.number, want)
    assert turn is not None
    worker.fence = turn.fence
    return turn


@pytest.mark.spec("R10", "R11")
def test_a_blocking_wait_returns_the_job(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b", "c")
    assert wait(worker, want=2).jobs[::2] == [b"a", b"b"]
    held = ["a", "b"]
    assert queue.state() == State(
        jobs={"a", "b", "c"}, waiting={5: ["c"]}, active=dict.fromkeys(held, "w1"), processing={"w1": held}
    )
    assert worker.turn(done="ab", want=1) == ["c"]


def test_a_wait_ended_by_a_token_claims_the_job_behind_the_token(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", priority=0)
    assert wait(worker).jobs[::2] == [b"a"]
    assert queue.state() == State(jobs={"a"}, active={"a": "w1"}, processing={"w1": ["a"]})


def test_a_removed_worker_is_fenced_when_its_wait_ends(queue: OneQueue) -> None:
    worker = queue.worker()
    worker.turn()
    queue.recover(worker)
    queue.enqueue("a")
    with pytest.raises(Fenced):
        worker.consumer.wait_for_turn(2, 1)


def test_a_lost_script_is_loaded_again_with_the_next_turn(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    queue.redis.function_flush()
    assert worker.consumer.wait_for_turn(1, 1) is None
    worker.number = 1
    assert worker.turn(want=1) == ["a"]


def test_out_of_memory_a_wait_is_refused_unless_there_is_work(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn()
    queue.redis.config_set("maxmemory", 1)
    assert wait(worker).jobs[::2] == [b"a"]
    worker.turn(done="a")
    with pytest.raises(BackPressure):
        worker.consumer.wait_for_turn(worker.number + 1, 1)


def test_jobs_beyond_the_wanted_number_go_back_in_order(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b", "c")
    assert [worker.block(), worker.block()] == ["a", "b"]
    assert worker.turn(want=1) == ["a"]
    assert queue.pending() == ["b", "c"]


def test_a_moved_job_goes_back_behind_a_higher_priority(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    assert worker.block() == "a"
    queue.enqueue("b", priority=0)
    assert worker.turn(want=1) == ["b"]
    assert queue.pending()[0] == "a"


def test_a_moved_job_goes_back_to_a_paused_queue(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    assert worker.block() == "a"
    queue.registry.pause(queue.name, paused=True)
    assert worker.turn(want=1) == []
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_a_moved_job_goes_back_when_it_may_not_start(queue: OneQueue) -> None:
    queue.create(max_active=1)
    worker, other = queue.worker(), queue.worker("w2")
    queue.enqueue("a", "b")
    assert other.turn(want=1) == ["a"]
    assert worker.block() == "b"
    assert worker.turn(want=1) == []
    assert queue.pending() == ["b"]


def test_a_job_removed_after_a_claim_with_a_lost_reply_does_not_start(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    assert worker.turn(want=1) == ["a"]  # this reply is lost
    queue.producer.remove("a")
    assert worker.turn(want=1) == []
    assert queue.state() == State(jobs=set())


def test_a_moved_hint_of_a_job_that_another_worker_runs_leaves_that_job_alone(queue: OneQueue) -> None:
    worker, other = queue.worker(), queue.worker("w2")
    queue.enqueue("a")
    assert other.turn(want=1) == ["a"]
    queue.redis.rpush(queue.key("pending"), "a")
    assert worker.block() == "a"
    assert worker.turn(want=1) == []
    assert queue.state() == State(jobs={"a"}, active={"a": "w2"}, processing={"w2": ["a"]})
    assert not other.whole_turn(done="a").refused


def test_an_id_in_the_list_of_a_retry_process_goes_back(queue: OneQueue) -> None:
    worker = queue.worker(lane="retry")
    queue.enqueue("a")
    queue.redis.lmove(queue.key("pending"), worker.processing)
    assert worker.turn(want=1) == []
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_a_stale_moved_hint_is_consumed(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b")
    assert worker.block() == "a"
    assert queue.producer.cancel("a")
    assert worker.turn(want=1) == ["b"]
    queue.enqueue("a")
    assert worker.turn(done="b", want=1) == ["a"]


def test_the_owners_of_running_jobs_are_found_without_a_scan(queue: OneQueue) -> None:
    worker = queue.worker(NAME)
    queue.enqueue("a")
    assert worker.turn(want=1) == ["a"]
    assert queue.redis.object("encoding", queue.key("active")) == b"hashtable"


def test_a_list_with_only_settled_jobs_does_not_count_as_holding_kept_jobs(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b", "c")
    assert worker.turn(want=3) == ["a", "b", "c"]
    assert queue.rescue(worker, 0) == 2
    assert not worker.whole_turn(done="a", keep=2).held
    assert queue.pending() == ["b", "c"]
