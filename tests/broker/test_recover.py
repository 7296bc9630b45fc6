"""recover and rescue: a worker's position tells which jobs ran, which was running, and which were not started."""

import pytest

from forq.errors import Fenced
from tests.support.drive.one_queue import HandWorker, OneQueue, State


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    """A worker that holds a, b, c and d; e waits behind them."""
    queue.enqueue("a", "b", "c", "d", "e")
    worker = queue.worker()
    assert worker.turn(want=4) == ["a", "b", "c", "d"]
    return worker


@pytest.mark.fault("worker killed mid-job")
def test_recover_settles_finished_jobs_counts_the_running_one_and_returns_the_rest_in_order(
    queue: OneQueue, worker: HandWorker
) -> None:
    assert queue.recover(worker, 1, running=True) == 4
    assert queue.state() == State(jobs={"b", "c", "d", "e"}, waiting={5: ["b", "c", "d", "e"]})
    assert [queue.stall_count(job_id) for job_id in "bcde"] == [1, 0, 0, 0]
    assert queue.inspector.counts().done == 1


def test_recover_counts_nothing_when_told_not_to(queue: OneQueue, worker: HandWorker) -> None:
    queue.recover(worker, 1, running=True, outcome="interrupted")
    assert queue.state() == State(jobs={"b", "c", "d", "e"}, waiting={5: ["b", "c", "d", "e"]})
    assert queue.stall_count("b") == 0


def test_recover_counts_nothing_when_no_job_was_running(queue: OneQueue, worker: HandWorker) -> None:
    queue.recover(worker, 2, running=False)
    assert queue.state() == State(jobs={"c", "d", "e"}, waiting={5: ["c", "d", "e"]})
    assert queue.stall_count("c") == 0


@pytest.mark.parametrize("off", [-1, 1])
def test_recover_with_the_position_of_another_turn_returns_all_and_counts_nothing(
    queue: OneQueue, worker: HandWorker, off: int
) -> None:
    queue.recover_at(worker, worker.number + off, 2, running=True)
    assert queue.state() == State(jobs=set("abcde"), waiting={5: list("abcde")})
    assert [queue.stall_count(job_id) for job_id in "abcde"] == [0] * 5
    assert queue.inspector.counts().done == 0


def test_recover_again_changes_nothing(queue: OneQueue, worker: HandWorker) -> None:
    queue.recover(worker, 1, running=True)
    before = queue.state()
    assert queue.recover(worker, 1, running=True) == 0
    assert queue.state() == before
    assert queue.stall_count("b") == 1


@pytest.mark.fault("zombie")
def test_a_turn_after_recover_is_fenced(queue: OneQueue, worker: HandWorker) -> None:
    queue.recover(worker, 1, running=True)
    before = queue.state()
    with pytest.raises(Fenced):
        worker.turn(done="ab", want=4)
    assert queue.state() == before


def test_each_stall_is_counted_and_the_data_is_kept(queue: OneQueue) -> None:
    queue.enqueue("a")
    for number in range(1, 4):
        worker = queue.worker(f"w{number}")
        worker.turn(want=1)
        queue.recover(worker, running=True)
        assert queue.stall_count("a") == number
    assert queue.inspector.job("a")["data"] == {"n": "a"}


def test_recovered_jobs_go_back_to_the_list_of_their_priority(queue: OneQueue) -> None:
    queue.enqueue("a", "b", priority=0)
    queue.enqueue("c", "d", priority=9)
    worker = queue.worker()
    worker.turn(want=3)
    queue.recover(worker)
    assert queue.state() == State(jobs=set("abcd"), waiting={0: ["a", "b"], 9: ["c", "d"]})
    assert queue.summary().other_hints == 4
    assert queue.pending() == [""]


@pytest.mark.fault("worker killed before it begins")
@pytest.mark.spec("R15")
def test_recover_returns_the_job_of_a_worker_that_died_before_it_started(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.block()
    queue.recover(worker)
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})


def test_a_job_moved_to_a_removed_worker_is_returned_by_the_next_recover_or_heartbeat(queue: OneQueue) -> None:
    for drain in (lambda w: queue.recover_at(w, -1, 0), lambda w: queue.recovery("p1").heartbeat("q", 1000, [])):
        worker = queue.worker(f"w{len(queue.workers)}")
        queue.recover(worker)
        queue.enqueue("a")
        assert worker.block() == "a"
        drain(worker)
        assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
        queue.producer.cancel("a")


def test_a_hint_between_finished_jobs_is_not_lost(queue: OneQueue, worker: HandWorker) -> None:
    queue.redis.linsert(worker.processing, "BEFORE", "a", "e")
    queue.redis.lrem(queue.key("pending"), 1, "e")
    queue.recover(worker, 2)
    assert queue.state() == State(jobs=set("ebcd"), waiting={5: list("ebcd")})


def test_rescue_settles_finished_jobs_and_returns_unstarted_ones(queue: OneQueue, worker: HandWorker) -> None:
    assert queue.rescue(worker, 1) == 2
    assert queue.state() == State(
        jobs=set("bcde"), waiting={5: ["c", "d", "e"]}, active={"b": "w1"}, processing={"w1": ["b"]}
    )
    assert queue.inspector.counts().done == 1


def test_a_rescued_worker_learns_that_the_rest_is_gone(queue: OneQueue, worker: HandWorker) -> None:
    queue.rescue(worker, 1)
    turn = worker.whole_turn(done="ab", keep=2)
    assert (turn.held, turn.refused) == (False, [b"a"])
    assert queue.state() == State(jobs=set("cde"), waiting={5: ["c", "d", "e"]})
    assert queue.inspector.counts().done == 2


def test_rescue_again_finds_nothing_to_do(queue: OneQueue, worker: HandWorker) -> None:
    queue.rescue(worker, 1)
    before = queue.state()
    assert queue.rescue(worker, 1) == 0
    assert queue.state() == before


@pytest.mark.parametrize(("index", "running", "stalled"), [(1, True, 1), (2, False, None)])
def test_a_crash_after_a_rescue_is_counted_by_the_position_in_the_whole_batch(
    queue: OneQueue, worker: HandWorker, index: int, running: bool, stalled: int | None
) -> None:
    queue.rescue(worker, 1)
    queue.recover(worker, index, running=running)
    if stalled is None:
        assert queue.state() == State(jobs=set("cde"), waiting={5: list("cde")})
    else:
        assert queue.state() == State(jobs=set("bcde"), waiting={5: list("bcde")})
        assert [queue.stall_count(job_id) for job_id in "bcde"] == [1, 0, 0, 0]


def test_a_position_from_before_the_rescue_counts_and_settles_nothing(queue: OneQueue, worker: HandWorker) -> None:
    queue.rescue(worker, 2)
    queue.recover(worker, 0, running=True)
    assert queue.state() == State(jobs=set("cde"), waiting={5: list("cde")})
    assert queue.stall_count("c") == 0


def test_rescue_leaves_a_worker_with_a_newer_turn_alone(queue: OneQueue, worker: HandWorker) -> None:
    worker.turn(done="a", keep=3)
    before = queue.state()
    worker.number -= 1
    assert queue.rescue(worker, 1) == 0
    assert queue.state() == before


def test_rescue_does_not_take_the_running_job_for_its_own_stale_hint(queue: OneQueue) -> None:
    queue.enqueue("a", "z")
    queue.producer.cancel("a")
    queue.enqueue("a", priority=0)
    worker = queue.worker()
    assert worker.turn(want=1) == ["a"]
    worker.block()
    queue.rescue(worker, 0)
    assert queue.state() == State(jobs=set("az"), waiting={5: ["z"]}, active={"a": "w1"}, processing={"w1": ["a"]})


def test_settling_a_job_does_not_settle_its_own_stale_hint(queue: OneQueue) -> None:
    queue.enqueue("a", "z")
    queue.producer.cancel("a")
    queue.enqueue("a", priority=0)
    worker = queue.worker()
    worker.turn(want=1)
    worker.block()
    worker.turn(done="a")
    assert queue.state() == State(jobs={"z"}, waiting={5: ["z"]})


def test_a_removed_unstarted_job_is_gone_after_a_rescue(queue: OneQueue, worker: HandWorker) -> None:
    queue.producer.remove("d")
    queue.rescue(worker, 0)
    assert queue.state() == State(
        jobs=set("ace") | {"b"}, waiting={5: ["b", "c", "e"]}, active={"a": "w1"}, processing={"w1": ["a"]}
    )


def test_recover_and_rescue_of_a_deleted_queue_do_nothing(queue: OneQueue, worker: HandWorker) -> None:
    queue.registry.delete(queue.name, force=True)
    assert queue.recover(worker) == 0
    assert queue.rescue(worker, 0) == 0


def test_a_killed_job_is_cancelled_and_the_job_blocked_behind_it_follows(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.enqueue("a", if_exists="update")
    queue.recover(worker, running=True, outcome="cancelled")
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["b", "a"]})
    assert [event.verb for event in queue.events() if event.job == "a"][-2:] == ["cancelled", "unblocked"]
    assert queue.inspector.job("a")["attempts"] == []


def test_a_position_of_another_turn_does_not_count_even_a_single_job(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.recover_at(worker, worker.number - 1, 0, running=True, outcome="stalled")
    assert queue.stall_count("a") == 0
