"""turn: settle, keep or return jobs, and claim."""

import pytest

from forq.errors import Fenced, UnknownQueue
from tests.support.drive.one_queue import OneQueue, State


@pytest.mark.spec("Q4", "M7", "R17")
def test_turn_claims_in_enqueue_order(queue: OneQueue) -> None:
    queue.enqueue("c", "a")
    queue.enqueue("b")
    worker = queue.worker()

    assert worker.turn(want=2) == ["c", "a"]

    assert queue.state() == State(
        jobs={"a", "b", "c"}, waiting={5: ["b"]}, active={"c": "w1", "a": "w1"}, processing={"w1": ["c", "a"]}
    )


@pytest.mark.spec("P7", "R17")
def test_turn_claims_priority_0_first_and_9_last(queue: OneQueue) -> None:
    queue.enqueue("a", "b", priority=9)
    queue.enqueue("c", "d")
    queue.enqueue("e", "f", priority=0)
    assert queue.worker().turn(want=5) == ["e", "f", "c", "d", "a"]


def test_each_claim_has_a_greater_fence_even_if_the_clock_goes_back(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    ahead = int(worker.fence) + 10**12
    queue.change_summary(fence=ahead)
    worker.turn(done="a", want=1)
    assert int(worker.fence) == ahead + 1


@pytest.mark.spec("R13")
def test_success_removes_the_job_from_everywhere(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    turn = worker.whole_turn(done="ab")
    assert (turn.held, turn.refused) == (True, [])
    assert queue.state() == State(jobs=set())
    assert queue.redis.get(queue.key("processed:count")) == b"2"


@pytest.mark.spec("R14")
def test_failure_moves_the_job_to_dead_in_the_same_step(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    assert worker.turn(failed="a", want=1) == ["b"]
    assert queue.state() == State(jobs={"b"}, active={"b": "w1"}, processing={"w1": ["b"]}, dead=["a"])
    assert queue.redis.get(queue.key("failed:count")) == b"1"
    assert queue.inspector.job("a")["error"] == {"message": "no"}


def test_the_id_of_a_dead_job_can_be_used_again(queue: OneQueue) -> None:
    worker = queue.worker()
    for _ in range(2):
        queue.enqueue("a")
        worker.turn(want=1)
        worker.turn(failed="a")
    assert queue.state() == State(jobs=set(), dead=["a", "a"])


@pytest.mark.parametrize("option", [{"dead_max": 2}, {"dead_ttl_ms": -1}])
def test_dead_jobs_beyond_the_limits_are_forgotten(queue: OneQueue, option: dict[str, int]) -> None:
    worker = queue.worker()
    for job_id in "abc":
        queue.enqueue(job_id)
        worker.turn(want=1)
        worker.turn(failed=job_id)
    queue.enqueue("d")
    queue.create(**option)
    worker.turn(want=1)
    worker.turn(failed="d")
    kept = ["c", "d"] if "dead_max" in option else []
    assert queue.state() == State(jobs=set(), dead=kept)
    assert len(queue.hash("dead:jobs")) == len(kept)


def test_a_stale_fence_is_refused_and_the_job_continues(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    old = worker.fence
    worker.turn(want=1)
    for settle in ({"done": "a"}, {"failed": "a"}):
        turn = worker.whole_turn(fence=old, want=1, **settle)  # type: ignore[arg-type]
        assert turn.refused == [b"a"]
        assert queue.state() == State(jobs={"a"}, active={"a": "w1"}, processing={"w1": ["a"]})


def test_settling_the_job_of_another_worker_is_refused(queue: OneQueue) -> None:
    queue.enqueue("a")
    owner, other = queue.worker("w1"), queue.worker("w2")
    owner.turn(want=1)
    before = queue.state()
    assert other.whole_turn(done="a", fence=owner.fence).refused == [b"a"]
    assert other.whole_turn(failed="a", fence=owner.fence).refused == [b"a"]
    assert queue.state() == before


def test_a_worker_does_not_own_jobs_of_a_worker_whose_name_starts_with_its_own(queue: OneQueue) -> None:
    queue.enqueue("a")
    other, owner = queue.worker("w1"), queue.worker("w10")
    queue.enqueue("b")
    owner.turn(want=1)
    queue.redis.rpush(queue.key("processor:p1:worker:w1:processing"), "a")
    other.turn()
    assert queue.state().active == {"a": "w10"}


def test_kept_jobs_stay_with_the_worker(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    worker = queue.worker()
    worker.turn(want=3)
    assert worker.whole_turn(done="a", keep=2).held
    assert queue.state() == State(jobs={"b", "c"}, active={"b": "w1", "c": "w1"}, processing={"w1": ["b", "c"]})


def test_jobs_neither_settled_nor_kept_go_back_to_the_front_in_order(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c", "d")
    queue.enqueue("e", priority=0)
    worker = queue.worker()
    worker.turn(want=4)
    worker.turn(done="a")
    assert queue.state() == State(jobs={"b", "c", "d", "e"}, waiting={0: ["e"], 5: ["b", "c", "d"]})


def test_a_worker_that_expects_more_jobs_than_it_holds_is_notified_and_loses_the_rest(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    assert not worker.whole_turn(done="a", keep=2).held
    assert queue.state() == State(jobs={"b"}, waiting={5: ["b"]})


def test_a_late_hint_does_not_count_as_a_kept_job(queue: OneQueue) -> None:
    queue.enqueue("a", "b", priority=4)
    worker = queue.worker()
    worker.turn(want=2)
    queue.rescue(worker, 0)
    other = queue.worker("w2")
    assert other.turn(want=1) == ["b"]
    queue.enqueue("z")
    assert [worker.block(), worker.block()] == ["", "z"]
    queue.redis.lrem(worker.processing, 1, "")
    assert not worker.whole_turn(done="a", keep=1).held
    assert queue.state() == State(jobs={"b", "z"}, waiting={5: ["z"]}, active={"b": "w2"}, processing={"w2": ["b"]})


@pytest.mark.spec("R10", "R11")
def test_a_job_moved_by_blmove_is_claimed_by_the_next_turn(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    assert worker.consumer.wait_for_job()
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["b"]}, processing={"w1": ["a"]})
    assert worker.turn(want=1) == ["a"]
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["b"]}, active={"a": "w1"}, processing={"w1": ["a"]})


@pytest.mark.spec("R15")
def test_a_turn_repeated_after_a_lost_reply_settles_once_and_claims_the_same_jobs(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    worker = queue.worker()
    worker.turn(want=1)
    first = worker.fence
    worker.turn(done="a", want=2)  # this reply is lost
    turn = worker.whole_turn(done="a", fence=first, want=2)
    assert turn.refused == [b"a"]
    assert turn.jobs[::2] == [b"b", b"c"]
    assert queue.redis.get(queue.key("processed:count")) == b"1"
    assert queue.state() == State(jobs={"b", "c"}, active={"b": "w1", "c": "w1"}, processing={"w1": ["b", "c"]})


@pytest.mark.spec("R15")
def test_a_lost_reply_does_not_settle_the_next_job_of_the_same_id(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    first = worker.fence
    worker.turn(done="a")  # this reply is lost
    queue.enqueue("a")
    worker.turn(done="a", fence=first, want=1)  # this reply is lost too; it claimed the new a
    turn = worker.whole_turn(done="a", fence=first, want=1)
    assert (turn.refused, turn.jobs[::2]) == ([b"a"], [b"a"])
    assert queue.redis.get(queue.key("processed:count")) == b"1"
    assert queue.state() == State(jobs={"a"}, active={"a": "w1"}, processing={"w1": ["a"]})


@pytest.mark.spec("R12")
def test_a_hint_whose_record_is_gone_is_dropped_and_counted(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.redis.hdel(queue.key("jobs"), "a")
    assert queue.worker().turn(want=2) == ["b"]
    assert queue.inspector.counts().dropped == 1


@pytest.mark.spec("R12")
def test_an_active_id_whose_record_is_gone_leaves_the_processing_list(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.redis.hdel(queue.key("jobs"), "a")
    worker.turn(failed="a")
    assert queue.state() == State(jobs=set())


def test_a_duplicate_hint_is_claimed_once(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.redis.lpush(queue.key("pending"), "a", "a")
    assert queue.worker("w1").turn(want=1) == ["a"]
    assert queue.worker("w2").turn(want=2) == ["b"]


def test_a_claim_gets_past_many_stale_hints(queue: OneQueue) -> None:
    queue.redis.rpush(queue.key("pending"), *(f"gone{n}" for n in range(1500)))
    queue.enqueue("a")
    worker = queue.worker()
    assert worker.turn(want=1) == []  # one call skips a limited number of hints
    assert worker.turn(want=1) == ["a"]


def test_a_paused_queue_settles_but_claims_nothing(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    queue.registry.pause(queue.name, paused=True)
    turn = worker.whole_turn(done="a", want=1)
    assert (turn.paused, turn.jobs, turn.fence) == (True, [], "")
    assert queue.state() == State(jobs={"b"}, waiting={5: ["b"]})
    queue.registry.pause(queue.name, paused=False)
    assert worker.turn(want=1) == ["b"]


def test_an_unregistered_worker_is_fenced(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.recover(worker)
    before = queue.state()
    for _ in range(2):
        with pytest.raises(Fenced):
            worker.turn(done="a", want=1)
    assert queue.state() == before


def test_a_hint_of_a_running_job_among_many_is_skipped(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.worker("w1").turn(want=1)
    queue.enqueue(*(f"b{n}" for n in range(20)))
    queue.redis.lpush(queue.key("pending"), "a")
    taken = queue.worker("w2").turn(want=20)
    assert "a" not in taken
    assert len(taken) == 20


@pytest.mark.spec("R16")
def test_a_worker_that_leaves_returns_its_jobs_and_closes_its_connection(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    worker.consumer.leave(worker.number)
    worker.consumer.close()
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
    assert queue.stall_count("a") == 0
    assert "forq-worker-w1" not in {client["name"] for client in queue.redis.client_list()}


def test_a_turn_with_the_epoch_of_a_deleted_queue_finds_no_queue(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.registry.delete(queue.name, force=True)
    queue.registry.purge(queue.name, lambda jobs: None)
    queue.create()
    queue.enqueue("a")
    with pytest.raises(UnknownQueue):
        worker.turn(want=1)
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
