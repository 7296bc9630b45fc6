"""Jobs that wait for others: `after` and `when` within a queue."""

from collections.abc import Iterator
from typing import Any

import pytest

from forq.api_types import When
from forq.broker.chunks import NewJob
from forq.broker.dependencies import AS_LIST
from forq.broker.enqueue import Update, new_job
from forq.broker.scripts import script
from forq.errors import Exists, FlowsOff, QueueFull, UnknownDependency, UsageError
from tests.support.drive.one_queue import HandWorker, OneQueue
from tests.support.models.journal_replay import Replay


def after(job_id: str, *names: str, when: When = "done", **more: Any) -> NewJob:
    return new_job({"n": job_id}, id=job_id, after=names, when=when, **more)


def store(queue: OneQueue, *jobs: NewJob, if_exists: str = "update") -> list[str]:
    return queue.producer.enqueue(list(jobs), Update(if_exists))


def held(queue: OneQueue) -> set[str]:
    return set(queue.hash("held"))


def is_clean(queue: OneQueue) -> bool:
    """Nothing is left of holds and edges."""
    names = ("held", "held:jobs", "held:open", "inputs", "sources", "edges", "resolving")
    return not any(queue.redis.exists(queue.key(name)) for name in names)


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


@pytest.fixture(autouse=True)
def _journal(queue: OneQueue) -> Iterator[None]:
    """At the end of each test the journal has the same jobs as the queue."""
    yield
    by_journal = Replay().read_all(queue.entries())
    assert set(by_journal.held) == held(queue)
    assert {*by_journal.ready, *by_journal.active} == queue.state().jobs
    assert {member.rpartition("@")[0] for member in by_journal.archived} == set(queue.state().dead)


def verbs(queue: OneQueue, job_id: str) -> list[str]:
    return [verb for verb, job in queue.journal_events() if job == job_id]


def test_a_job_runs_after_the_one_it_waits_for_is_done(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    assert held(queue) == {"b"}
    assert queue.inspector.counts().held == 1
    assert queue.inspector.counts().waiting == 1
    assert worker.turn(5) == ["a"]
    assert worker.turn(5, done="a") == ["b"]
    assert worker.turn(5, done="b") == []
    assert is_clean(queue)
    assert verbs(queue, "b") == ["enqueued", "held", "met", "claimed", "done"]


def test_a_chain_is_stored_in_one_call(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "b"))
    assert [worker.turn(5, done=done) for done in ("", "a", "b", "c")] == [["a"], ["b"], ["c"], []]
    assert is_clean(queue)


def test_a_job_waits_for_all_its_dependencies(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a", "b"))
    assert worker.turn(5) == ["a", "b"]
    assert worker.turn(5, done="a", keep=1) == []
    assert worker.turn(5, done="b") == ["c"]


def test_many_jobs_may_wait_for_one(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "a"))
    store(queue, after("d", "a"))
    worker.turn(1)
    assert worker.turn(5, done="a") == ["b", "c", "d"]
    worker.turn(0, done="bcd")
    assert is_clean(queue)


def test_a_job_whose_dependency_dies_is_dead_and_so_are_those_behind_it(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "b"), after("d", "c", when="ended"))
    worker.turn(1)
    assert worker.turn(5, failed="a") == ["d"]
    assert queue.state().dead == ["a", "b", "c"]
    error = queue.inspector.job("b")["error"]
    assert (error["name"], error["kind"]) == ("DependencyFailed", "dependency")
    assert error["message"] == "job a, for which it waited, ended as dead"
    worker.turn(0, done="d")
    assert is_clean(queue)
    assert verbs(queue, "b") == ["enqueued", "held", "unmet", "claimed", "dead"]


@pytest.mark.parametrize(("ends", "runs"), [("done", True), ("dead", True), ("cancelled", True)])
def test_when_ended_runs_however_the_others_end(queue: OneQueue, worker: HandWorker, ends: str, runs: bool) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", when="ended"))
    end(queue, worker, "a", ends)
    assert (worker.turn(5) == ["b"]) is runs


@pytest.mark.parametrize(("ends", "runs"), [("done", False), ("dead", True), ("cancelled", False)])
def test_when_dead_runs_after_a_death_and_is_cancelled_otherwise(
    queue: OneQueue, worker: HandWorker, ends: str, runs: bool
) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", when="dead"))
    end(queue, worker, "a", ends)
    assert (worker.turn(5) == ["b"]) is runs
    if not runs:
        assert verbs(queue, "b") == ["enqueued", "held", "cancelled"]
        assert is_clean(queue)


def end(queue: OneQueue, worker: HandWorker, job_id: str, how: str) -> None:
    if how == "cancelled":
        assert queue.producer.cancel(job_id)
        return
    assert worker.turn(1) == [job_id]
    if how == "done":
        worker.turn(0, done=job_id)
    else:
        worker.turn(0, failed=job_id)


def test_the_first_death_is_enough_for_when_dead(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a", "b", when="dead"))
    worker.turn(2)
    fence = worker.fence
    assert worker.turn(5, failed="a", keep=1) == ["c"]
    worker.turn(0, done="c", keep=1)
    worker.turn(0, done="b", fence=fence)
    assert is_clean(queue)


def test_a_dependency_that_has_ended_counts_at_once(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="x"), after("y", "x"))
    worker.turn(1)
    worker.turn(1, done="x")
    assert store(queue, after("z", "x"))
    assert worker.turn(5, done="y") == ["z"]
    worker.turn(0, failed="z")
    store(queue, after("late", "z"), after("always", "z", when="ended"))
    assert set(queue.state().dead) == {"z", "late"}
    assert worker.turn(5) == ["always"]


def test_a_dependency_without_a_record_ends_as_dropped(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    queue.redis.hdel(queue.key("jobs"), "a")
    assert worker.turn(1) == []
    assert queue.state().dead == ["b"]
    dropped = [event for event in queue.journal_events() if event[0] in ("dropped", "unmet", "dead")]
    assert dropped == [("dropped", "a"), ("unmet", "b"), ("dead", "b")]


def test_an_unknown_dependency_is_refused_and_nothing_is_stored(queue: OneQueue, worker: HandWorker) -> None:
    with pytest.raises(UnknownDependency, match="did not remember ended jobs before"):
        store(queue, new_job(1, id="a"), after("b", "nobody"))
    assert queue.state().jobs == set()
    store(queue, new_job(1, id="a"), after("b", "a"))
    with pytest.raises(UnknownDependency, match="it never existed, or ended before the last 50,000 jobs"):
        store(queue, after("c", "nobody"))


def test_a_job_cannot_wait_for_itself_or_for_a_later_one(queue: OneQueue) -> None:
    with pytest.raises(UnknownDependency):
        store(queue, after("a", "a"))
    with pytest.raises(UnknownDependency):
        store(queue, after("a", "b"), new_job(1, id="b"))


def test_dependencies_for_a_live_id_are_refused(queue: OneQueue) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a"))
    for live in "bc":
        with pytest.raises(Exists):
            store(queue, after(live, "a"))
    assert store(queue, after("b", "a"), if_exists="skip")
    assert held(queue) == {"c"}


def test_an_update_of_a_held_job_keeps_it_held(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    store(queue, new_job({"new": 1}, id="b", priority=2, max_retries=7))
    assert held(queue) == {"b"}
    worker.turn(1)
    assert worker.turn(1, done="a") == ["b"]
    job = queue.inspector.job("b")
    assert (job["data"], job["priority"], job["options"]) == ({"new": 1}, 2, {"max_retries": 7})


def test_a_held_job_can_be_cancelled_and_removed(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "b", when="ended"), after("d", "a"))
    assert queue.producer.cancel("b")
    assert queue.producer.remove("d")
    assert worker.turn(5) == ["a", "c"]
    worker.turn(0, done="ac")
    assert is_clean(queue)


def test_an_id_that_is_used_again_is_not_counted_down_by_old_edges(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a"))
    queue.producer.cancel("c")
    store(queue, after("c", "b"))
    worker.turn(2)
    assert worker.turn(5, done="a", keep=1) == []
    assert worker.turn(5, done="b") == ["c"]


def test_a_later_run_time_counts_once_the_job_is_ready(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", run_in=3600))
    worker.turn(1)
    assert worker.turn(5, done="a") == []
    assert queue.inspector.job("b")["state"] == "scheduled"


def test_expires_in_counts_from_the_time_the_job_is_ready(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", expires_in=3600))
    worker.turn(1)
    before = queue.inspector.counts()
    assert before.held == 1
    assert worker.turn(1, done="a") == ["b"]
    seconds, _ = queue.redis.time()
    assert seconds + 3590 < queue.inspector.job("b")["expires_at"] <= seconds + 3601


def test_an_edge_binds_to_the_enqueue_that_is_blocked_behind_an_active_job(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="x"), after("first", "a"))
    worker.turn(1)
    store(queue, new_job(2, id="a"))
    store(queue, after("second", "a"))
    queue.producer.cancel("x")
    assert worker.turn(5, done="a") == ["a", "first"]
    assert held(queue) == {"second"}
    assert worker.turn(5, done="a", keep=1) == ["second"]


def test_an_edge_to_a_blocked_enqueue_moves_when_it_updates_the_job(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(max_retries=5, min_backoff_ms=0)
    store(queue, new_job(1, id="a"), after("first", "a"))
    worker.turn(1)
    store(queue, new_job(2, id="a"))
    store(queue, after("second", "a"))
    assert worker.turn(5, failed="a") == ["a"]
    assert worker.turn(5, done="a") == ["first", "second"]


def test_a_withdrawn_enqueue_ends_as_cancelled(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("first", "a"))
    worker.turn(1)
    store(queue, new_job(2, id="a"))
    store(queue, after("second", "a"), after("third", "a", when="ended"))
    assert queue.producer.cancel("a")
    assert queue.state().dead == ["second"]
    assert worker.turn(5, done="a") == ["third", "first"]


def test_a_held_job_does_not_count_as_waiting_for_the_retry_lane(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(retry_lane_retries=1, min_backoff_ms=0)
    store(queue, new_job(1, id="a"), after("b", "a"))
    worker.turn(1)
    worker.turn(0, failed="a")
    retry = queue.worker("r1", lane="retry")
    assert retry.turn(1) == ["a"]
    retry.turn(0, done="a")
    assert worker.turn(1) == ["b"]


def test_max_items_counts_held_jobs(queue: OneQueue) -> None:
    queue.set_options(max_items=2)
    store(queue, new_job(1, id="a"), after("b", "a"))
    with pytest.raises(QueueFull):
        store(queue, new_job(1, id="c"))


def test_flows_off_refuses_dependencies(queue: OneQueue) -> None:
    queue.set_options(flows=0)
    with pytest.raises(FlowsOff, match="forqctl set q flows=auto"):
        store(queue, new_job(1, id="a"), after("b", "a"))


def test_a_queue_without_held_jobs_remembers_no_ends(queue: OneQueue, worker: HandWorker) -> None:
    queue.enqueue("a")
    worker.turn(1)
    worker.turn(0, done="a")
    assert not queue.redis.exists(queue.key("ends"))
    queue.set_options(flows=2)
    queue.enqueue("b")
    worker.turn(1)
    worker.turn(0, done="b")
    assert queue.hash("ends") == {"b": "done"}


def test_too_many_dependencies_are_refused() -> None:
    with pytest.raises(UsageError, match="1001 jobs are too many"):
        new_job(1, after=[f"j{number}" for number in range(1001)])


def test_more_edges_than_a_call_may_follow_are_left_to_pulse(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"))
    for part in range(3):
        store(queue, *(after(f"j{part}.{number}", "a") for number in range(400)))
    worker.turn(1)
    worker.turn(0, done="a")
    counts = queue.inspector.counts()
    assert (counts.waiting, counts.held) == (500, 700)
    recovery = queue.recovery()
    assert recovery.promote("q") == 0
    recovery.promote("q")
    assert queue.inspector.counts().held == 0
    assert queue.inspector.counts().waiting == 1200
    assert is_clean(queue)


def test_deaths_cascade_over_several_calls(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), *(after(f"j{number}", "a") for number in range(300)), after("end", "j299"))
    worker.turn(1)
    worker.turn(0, failed="a")
    assert 40 < len(queue.state().dead) < 60, "a burial is as long as several edges"
    for _ in range(10):
        queue.recovery().promote("q")
    assert len(queue.state().dead) == 302
    assert is_clean(queue)


def test_results_are_passed_to_the_job_that_waits(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "b", "a", with_results=True))
    turn = worker.whole_turn(5)
    assert [b"w=1" in record for record in turn.jobs[1::2]] == [True, True]
    worker.turn(0, done="ab", results={"a": "1", "b": '"x"'})
    assert queue.hash("inputs") == {
        "c": "2 1",
        "c 1": 'done "x"',
        "c 2": "done 1",
    }
    record = worker.whole_turn(1).jobs[1]
    assert b"i=2,I=1" in record
    worker.turn(0, done="c")
    assert is_clean(queue)


def test_a_result_that_another_job_needs_is_not_lost_with_its_worker(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="x"), after("b", "a", with_results=True))
    worker.turn(2)
    queue.recover(worker, 1, running=True)
    other = queue.worker("w2")
    assert other.turn(5) == ["a", "x"]
    assert queue.stall_count("a") == 0
    assert queue.stall_count("x") == 1
    other.turn(0, done="ax", results={"a": "5"})
    assert queue.hash("inputs")["b 1"] == "done 5"


def test_the_result_of_a_running_job_cannot_be_asked_for_later(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="k", keep_done=60), new_job(1, id="x"), after("y", "x"))
    worker.turn(2)
    with pytest.raises(UsageError, match="the result of job 'a' of queue 'q' is not kept"):
        store(queue, after("b", "a", with_results=True))
    store(queue, after("b", "k", with_results=True))
    worker.consumer.turn(9, [b"a", worker.fence, 7, b"k", worker.fence, 7], [], 0, 0, ["2 60000", b"3"])
    with pytest.raises(UsageError, match="the result of job 'a' of queue 'q' is not kept"):
        store(queue, after("c", "a", with_results=True))
    store(queue, after("c", "k", with_results=True))


def test_a_deleted_queue_leaves_nothing(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", with_results=True))
    assert queue.registry.delete("q", force=True) == 2
    assert is_clean(queue)
    epoch = queue.redis.smembers(queue.key("trash")).pop().decode()
    assert set(queue.hash(f"trash:{epoch}:jobs")) == {"a", "b"}


def test_a_waiter_of_a_held_job_gets_its_end(queue: OneQueue) -> None:
    store(queue, new_job(1, id="a", keep_done=60), after("b", "a", keep_done=60))
    reply = queue.link.run(script("wait"), queue.base, "b", "", "", 1000, 0, "")
    assert reply[1] == b"live"
    queue.producer.cancel("b")
    again = queue.link.run(script("wait"), queue.base, "b", reply[2].decode(), reply[3].decode(), 1000, 0, "")
    assert again[1] == b"cancelled"


def test_results_as_the_first_argument_are_marked(queue: OneQueue, worker: HandWorker) -> None:
    job = new_job({}, id="b")._replace(after=f"done {AS_LIST} ja")
    store(queue, new_job(1, id="a"), job)
    worker.turn(1)
    record = worker.consumer.turn(9, [b"a", worker.fence, 7], [], 0, 1, [1, b"4"]).jobs[1]
    assert b"i=1,I=3" in record


@pytest.mark.parametrize("ids", ["x", "xy", "xyz"])
def test_a_job_that_waits_for_an_id_stored_later_waits_for_the_one_that_has_ended(
    queue: OneQueue, worker: HandWorker, ids: str
) -> None:
    """Each waits for the next one, the last for the first: bound to the new jobs, they would wait for ever."""
    queue.set_options(flows=2)
    queue.enqueue(*ids)
    worker.turn(5)
    worker.turn(0, done=ids)
    store(queue, *(after(job_id, ids[(at + 1) % len(ids)]) for at, job_id in enumerate(ids)))
    assert worker.turn(5) == list(ids[:-1] or ids)


def test_the_result_of_an_earlier_job_is_not_that_of_a_death(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(flows=2, keep_done_ms=60_000)
    queue.enqueue("a")
    worker.turn(1)
    worker.turn(0, done="a", results={"a": "1"})
    queue.enqueue("a")
    worker.turn(1)
    worker.turn(0, failed="a")
    store(queue, after("b", "a", when="ended", with_results=True))
    assert queue.hash("inputs") == {"b": "1 1", "b 1": "dead "}


def test_a_result_that_was_lost_with_its_worker_counts_as_not_kept(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(flows=2, keep_done_ms=60_000)
    queue.enqueue("a", "b")
    worker.turn(2)
    queue.recover(worker, 1, running=True)
    assert queue.hash("ends") == {"a": "done"}
    with pytest.raises(UsageError, match="the result of job 'a' of queue 'q' is not kept"):
        store(queue, after("c", "a", with_results=True))


def test_the_size_of_held_records_counts_while_no_other_job_exists(queue: OneQueue, worker: HandWorker) -> None:
    """Claims read as many records at once as fit into their limit, if none is larger than this."""
    store(queue, new_job(1, id="a"))
    for part in range(4):
        store(queue, *(after(f"j{part}.{number}", "a", when="dead") for number in range(300)))
    store(queue, new_job("x" * 100_000, id="last", after="a"))
    worker.turn(1)
    assert worker.turn(1, done="a") == []
    queue.recovery().heartbeat("q", 15_000, [])
    assert queue.state().jobs == set()
    assert "last" in held(queue)
    assert int(queue.hash("options")["largest_record"]) > 100_000


def test_a_job_whose_record_is_lost_leaves_no_inputs(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", with_results=True), after("c", "b", when="ended"))
    worker.turn(1)
    worker.turn(0, done="a", results={"a": "1"})
    queue.redis.hdel(queue.key("jobs"), "b")
    assert worker.turn(1) == ["c"]
    worker.turn(0, done="c")
    assert is_clean(queue)
    assert verbs(queue, "c") == ["enqueued", "held", "met", "claimed", "done"]


def test_a_job_that_can_never_run_has_no_expiry_of_a_job_that_was_ready(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", expires_in=3600, max_retries=4))
    worker.turn(1)
    worker.turn(0, failed="a")
    job = queue.inspector.job("b")
    assert job["state"] == "dead"
    assert "expires_at" not in job
    assert job["options"] == {"max_retries": 4}
