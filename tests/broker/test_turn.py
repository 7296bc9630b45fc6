"""turn: settle, keep or return jobs, and claim."""

from typing import Any

import pytest

from forq.broker.claim import Results, Settled, Turn
from forq.broker.scripts import NO_QUEUE, OK, script
from forq.errors import Fenced, UnknownQueue
from tests.support.drive.limits import wakes
from tests.support.drive.one_queue import HandWorker, OneQueue, State, one_queue


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


def settle_claims(
    worker: HandWorker, fences: dict[str, str], failed: str = "", results: Results | None = None, want: int = 0
) -> Turn:
    """Takes a turn that settles jobs of several claims. `fences`: by id, in the order in which the jobs ended."""
    worker.number += 1
    done: Settled = [part for job_id, fence in fences.items() for part in (job_id, fence, 7)]
    gave_up: Settled = [part for job_id in failed for part in (job_id, worker.fence, 7, "{}", "{}", "", "", "0.5")]
    return worker.consumer.turn(worker.number, done, gave_up, 0, want, results)


def claim_one_by_one(queue: OneQueue, worker: HandWorker, ids: str) -> dict[str, str]:
    """Returns the fence of each."""
    fences = {}
    for number, job_id in enumerate(ids):
        queue.enqueue(job_id)
        assert worker.turn(want=1, keep=number) == [job_id]
        fences[job_id] = worker.fence
    assert len(set(fences.values())) == len(ids)
    return fences


def kept_results(queue: OneQueue) -> dict[str, str]:
    """By id: the line of a kept job with its result."""
    return {job_id: kept.split("\n")[1] for job_id, kept in queue.hash("done:jobs").items()}


def test_jobs_of_several_claims_are_settled_by_one_turn(queue: OneQueue) -> None:
    worker = queue.worker()
    fences = claim_one_by_one(queue, worker, "abc")
    turn = settle_claims(worker, fences)
    assert (turn.refused, turn.held) == ([], True)
    assert queue.state() == State(jobs=set())
    assert queue.redis.get(queue.key("processed:count")) == b"3"
    ended = [(event.job, str(event.fence)) for event in queue.events() if event.verb == "done"]
    assert ended == list(fences.items())


def test_an_id_that_was_moved_while_jobs_of_several_claims_ran_is_claimed(queue: OneQueue) -> None:
    worker = queue.worker()
    fences = claim_one_by_one(queue, worker, "abc")
    queue.enqueue("x")
    worker.block()
    assert settle_claims(worker, fences, want=1).jobs[::2] == [b"x"]
    assert queue.state() == State(jobs={"x"}, active={"x": "w1"}, processing={"w1": ["x"]})
    assert "dropped" not in [verb for verb, _ in queue.journal_events()]


def test_a_failure_behind_several_claims_is_settled(queue: OneQueue) -> None:
    worker = queue.worker()
    fences = claim_one_by_one(queue, worker, "abc")
    del fences["c"]
    assert settle_claims(worker, fences, failed="c").refused == []
    assert queue.state() == State(jobs=set(), dead=["c"])


@pytest.mark.parametrize("keep_done_ms", [60_000, 0])
def test_results_are_numbered_over_all_claims_of_a_turn(redis_url: str, keep_done_ms: int) -> None:
    with one_queue(redis_url, keep_done_ms=keep_done_ms) as queue:
        worker = queue.worker()
        fences = claim_one_by_one(queue, worker, "abcd")
        queue.redis.hset(queue.key("active"), "b", "w9:1")
        turn = settle_claims(
            worker, fences, results=["1 90000", b"1", "2 91000", b"2", "3 92000", b"3", "4 93000", b"4"]
        )
        assert turn.refused == [b"b"]
        assert kept_results(queue) == {"a": "1", "c": "3", "d": "4"}
        until = dict(queue.redis.zrange(queue.key("done:own"), 0, -1, withscores=True))
        assert (until[b"c"] - until[b"a"], until[b"d"] - until[b"c"]) == (2000, 1000)


def test_a_refused_job_of_a_group_leaves_the_others_settled(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    worker = queue.worker()
    worker.turn(want=3)
    queue.redis.hset(queue.key("active"), "b", "w9:1")
    turn = worker.whole_turn(done="abc")
    assert turn.refused == [b"b"]
    assert queue.state().active == {"b": "w9"}
    assert queue.state().jobs == {"b"}
    assert queue.redis.get(queue.key("processed:count")) == b"2"
    assert [event.job for event in queue.events() if event.verb == "done"] == ["a", "c"]


def test_jobs_of_a_queue_that_keeps_results_are_kept_without_one(redis_url: str) -> None:
    with one_queue(redis_url, keep_done_ms=60_000) as queue:
        queue.enqueue("a", "b")
        worker = queue.worker()
        worker.turn(want=2)
        worker.turn(done="ab")
        assert kept_results(queue).keys() == {"a", "b"}


IDS = [f"n{number}" for number in range(20)]


def claimed_with_duplicates(queue: OneQueue, ids: list[str], **settled: Any) -> tuple[list[str], Turn]:
    """Claims jobs of which the first and the third have a second hint, the first in front of the others."""
    worker = settled.pop("worker", None) or queue.worker()
    queue.enqueue(*ids)
    queue.redis.lpush(queue.key("pending"), ids[0])
    queue.redis.linsert(queue.key("pending"), "BEFORE", ids[4], ids[2])
    turn = worker.whole_turn(want=len(ids) + 2, **settled)
    for job_id, record in zip(turn.jobs[::2], turn.jobs[1::2], strict=True):
        assert b'{"n":"%s"}' % job_id in record
    found = [job_id.decode() for job_id in turn.jobs[::2]]
    assert queue.state() == State(
        jobs=set(ids), active=dict.fromkeys(ids, worker.name), processing={worker.name: ids}, dead=queue.state().dead
    )
    assert [event.job for event in queue.events() if event.verb == "claimed"][-len(ids) :] == ids
    return found, turn


@pytest.mark.parametrize("number", [6, 15, 16, 20])
def test_duplicate_hints_in_a_batch_of_any_size_are_claimed_once(queue: OneQueue, number: int) -> None:
    assert claimed_with_duplicates(queue, IDS[:number])[0] == IDS[:number]


@pytest.mark.parametrize("number", [6, 20])
def test_one_duplicate_hint_in_a_batch_is_claimed_once(queue: OneQueue, number: int) -> None:
    queue.enqueue(*IDS[:number])
    queue.redis.rpush(queue.key("pending"), IDS[1])
    worker = queue.worker()
    assert worker.turn(want=30) == worker.held() == IDS[:number]


@pytest.mark.one_server  # it looks at the server's statistics
def test_a_claim_of_one_job_looks_at_that_one_only(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn()
    queue.redis.config_resetstat()
    assert worker.turn(want=1) == ["a"]
    assert "cmdstat_hlen" not in queue.redis.info("commandstats")


@pytest.mark.parametrize("number", [6, 20])
def test_the_fates_of_failed_jobs_come_before_a_batch_with_duplicate_hints(queue: OneQueue, number: int) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    found, turn = claimed_with_duplicates(queue, IDS[:number], worker=worker, failed="a")
    assert found == IDS[:number]
    assert [fate.kind for fate in turn.fates] == ["dead"]


@pytest.mark.one_server  # another server may keep hashes differently
@pytest.mark.parametrize("number", [16, 17])
def test_a_large_batch_makes_active_a_table(queue: OneQueue, number: int) -> None:
    queue.enqueue(*IDS[:number])
    worker = queue.worker()
    assert worker.turn(want=20) == IDS[:number]
    assert queue.hash("active").keys() == set(IDS[:number])
    assert (queue.redis.object("encoding", queue.key("active")) == b"hashtable") == (number > 16)


def test_a_claim_takes_plain_jobs_of_several_lists(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.enqueue("c", "d", priority=3)
    queue.enqueue("e", "f", priority=9)
    worker = queue.worker()
    assert worker.turn(want=6) == ["c", "d", "a", "b", "e", "f"]
    assert queue.state() == State(
        jobs=set("abcdef"), active=dict.fromkeys("cdabef", "w1"), processing={"w1": list("cdabef")}
    )


def test_a_job_with_hints_in_two_lists_is_claimed_once(queue: OneQueue) -> None:
    queue.enqueue("a", "b", priority=3)
    queue.enqueue("c", "d")
    queue.redis.rpush(queue.key("pending"), "a")
    worker = queue.worker()
    assert worker.turn(want=5) == ["a", "b", "c", "d"]
    assert worker.held() == ["a", "b", "c", "d"]


def test_a_hint_without_a_record_in_a_batch_is_dropped(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    queue.redis.hdel(queue.key("jobs"), "b")
    assert queue.worker().turn(want=3) == ["a", "c"]
    assert queue.state() == State(jobs={"a", "c"}, active={"a": "w1", "c": "w1"}, processing={"w1": ["a", "c"]})
    assert ("dropped", "b") in queue.journal_events()


@pytest.mark.parametrize("flag", ["c", "o"])
def test_a_record_with_counts_in_a_batch_is_checked(queue: OneQueue, flag: str) -> None:
    queue.enqueue("a", "b", "c")
    options = " 0 -" if flag == "o" else ""
    queue.redis.hset(queue.key("jobs"), "b", f"{flag}5 1 0 9 0 0{options}\n[null,null,1]")
    assert queue.worker().turn(want=3) == ["a", "c"]
    assert queue.state().dead == ["b"]


def test_a_waiting_worker_also_claims_jobs_of_other_priorities(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b", priority=3)
    worker.block()
    worker.number += 1
    epoch = queue.hash("options")["epoch"]
    args = (epoch, worker.processor, worker.name, worker.number, 2, 0, "waiting", 0, 0)
    reply = queue.link.run(script("turn"), queue.base, *args)
    assert reply[10::2] == [b"a", b"b"]


def settle(queue: OneQueue, worker: HandWorker, ids: str, *, epoch: str = "", fence: str = "") -> list[Any]:
    """Calls the verb `settle` for jobs of one claim."""
    epoch, fence = epoch or queue.hash("options").get("epoch", "1"), fence or worker.fence
    entries = " ".join(f"{job_id} 7" for job_id in ids)
    args = (epoch, worker.processor, worker.name, fence, len(ids), entries, *ids)
    return queue.link.run(script("settle"), queue.base, *args)


def test_settle_ends_jobs_and_leaves_other_ids_in_the_list(queue: OneQueue) -> None:
    queue.enqueue(*"abcxy")
    worker = queue.worker()
    worker.turn(want=3)
    for _ in range(2):
        worker.block()
    assert settle(queue, worker, "ab") == [OK, []]
    assert queue.state() == State(jobs=set("cxy"), active={"c": "w1"}, processing={"w1": ["c", "x", "y"]})
    assert queue.journal_events()[-2:] == [("done", "a"), ("done", "b")]
    assert settle(queue, worker, "ab") == [OK, [b"a", b"b"]]
    assert settle(queue, worker, "ac") == [OK, [b"a"]]
    assert queue.state() == State(jobs=set("xy"), processing={"w1": ["x", "y"]})
    assert queue.redis.get(queue.key("processed:count")) == b"3"
    assert worker.turn(want=2) == ["x", "y"]


def test_settle_keeps_the_order_of_ids_in_front_of_the_settled_ones(queue: OneQueue) -> None:
    queue.enqueue(*"abxy")
    worker = queue.worker()
    worker.turn(want=2)
    queue.redis.lpush(worker.processing, "y", "x")
    settle(queue, worker, "ab")
    assert worker.held() == ["x", "y", "a", "b"]


def test_settle_removes_one_entry_per_job(queue: OneQueue) -> None:
    """The next job of that id has a hint there too."""
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.redis.lpush(worker.processing, "a")
    settle(queue, worker, "ab")
    assert worker.held() == ["a", "b"]


def test_a_settle_for_a_deleted_queue_is_refused(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    before = queue.state()
    assert settle(queue, worker, "ab", epoch="1") == [NO_QUEUE]
    assert queue.state() == before
    epoch = queue.hash("options")["epoch"]
    queue.registry.delete("q", force=True)
    assert settle(queue, worker, "ab", epoch=epoch) == [NO_QUEUE]


def test_a_settle_wakes_a_worker_held_back_by_the_limits(redis_url: str) -> None:
    with one_queue(redis_url, max_active=1) as queue:
        queue.enqueue("a", "b")
        one, two = queue.worker(), queue.worker("w2")
        assert one.turn(want=1) == ["a"]
        assert two.whole_turn(want=1).limited
        assert settle(queue, one, "a") == [OK, []]
        assert wakes(queue, two) == 1
        assert two.turn(want=1) == ["b"]


def test_a_settle_after_results_are_kept_says_why_there_is_none(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.registry.configure("q", {"keep_done_ms": 60_000}, {})
    assert settle(queue, worker, "a") == [OK, []]
    assert kept_results(queue) == {"a": "!it ran before its queue kept results"}


def test_a_settle_of_a_lost_worker_changes_nothing(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.recover(worker, 0, running=False)
    before = queue.state()
    assert settle(queue, worker, "a") == [OK, [b"a"]]
    assert queue.state() == before
