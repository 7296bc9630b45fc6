"""One job per id: every kind of dispatch to an existing id, in every state of that job.

The expected result is computed a second time in the simplest way: each dispatch in turn is applied to a small Python
object. The script merges blocked dispatches into one entry; the result must be the same.
"""

import itertools
from dataclasses import dataclass, replace

import pytest

from forq.broker.claim import Settled
from forq.broker.enqueue import Update, new_job
from tests.support.drive.one_queue import HandWorker, OneQueue, State, one_queue

FUTURE = 4_000_000_000  # epoch seconds
LATER = 5_000_000_000
RUN_AT = (None, FUTURE, LATER)
HOW = (True, False, "if_later", "if_earlier")


@dataclass(frozen=True)
class Job:
    """The visible fields of a job: data, run_at (0 = at once) and retry count."""

    data: str
    run_at: int
    retries: int


@dataclass(frozen=True)
class Dispatch:
    data: str
    run_at: int | None
    update_data: bool = True
    update_run_at: bool | str = True
    reset: bool | None = None

    def on(self, job: Job) -> Job:
        """Returns the job after this dispatch."""
        at = self.run_at or 0
        run_at = {True: at, False: job.run_at, "if_later": max(job.run_at, at), "if_earlier": min(job.run_at, at)}
        resets = self.update_data if self.reset is None else self.reset
        return replace(
            job,
            data=self.data if self.update_data else job.data,
            run_at=run_at[self.update_run_at],
            retries=0 if resets else job.retries,
        )

    def new(self) -> Job:
        return Job(self.data, self.run_at or 0, 0)


def send(queue: OneQueue, dispatch: Dispatch, job_id: str = "a") -> None:
    job = new_job(dispatch.data, id=job_id, run_at=dispatch.run_at)
    update = Update("update", dispatch.update_data, dispatch.update_run_at, dispatch.reset)
    assert queue.producer.enqueue([job], update) == [job_id]


def seen(queue: OneQueue, job_id: str = "a") -> Job:
    job = queue.inspector.job(job_id)
    assert job["state"] in ("waiting", "scheduled")
    assert (job["state"] == "scheduled") == (job["run_at"] is not None)
    return Job(job["data"], round(job["run_at"] or 0), job["retry_count"])


def fail(worker: HandWorker, retry_at: int = 0, kind: str = "retriable") -> None:
    worker.number += 1
    failed: Settled = ["a", worker.fence, 1, "{}", "{}", kind, retry_at * 1000, "0.5"]
    worker.consumer.turn(worker.number, [], failed, 0, 0)


def with_one_retry(queue: OneQueue, worker: HandWorker, run_at: int = 0) -> Job:
    """Makes `a` a waiting or scheduled job that has failed once."""
    send(queue, Dispatch("first", None))
    worker.turn(want=1)
    fail(worker, run_at)
    return Job("first", run_at, 1)


FLAGS = list(itertools.product(RUN_AT, (True, False), HOW, (None, True, False)))


@pytest.mark.spec("Q3", "Q26", "Q27", "Q28")
@pytest.mark.parametrize("was_at", [0, FUTURE + 7])
@pytest.mark.parametrize(("run_at", "update_data", "how", "reset"), FLAGS)
def test_a_waiting_or_scheduled_job_is_updated_according_to_the_flags(
    redis_url: str, was_at: int, run_at: int | None, update_data: bool, how: bool | str, reset: bool | None
) -> None:
    with one_queue(redis_url, max_retries=9) as queue:
        before = with_one_retry(queue, queue.worker(), was_at)
        dispatch = Dispatch("second", run_at, update_data, how, reset)
        send(queue, dispatch)
        assert seen(queue) == dispatch.on(before)
        assert queue.state().jobs == {"a"}


SHORT_FLAGS = [
    (FUTURE, True, True, None),
    (None, True, True, None),
    (FUTURE, False, False, None),
    (LATER, False, "if_later", True),
    (FUTURE, True, "if_earlier", False),
    (None, False, "if_later", None),
    (None, False, "if_earlier", None),
]


@pytest.mark.spec("Q1", "Q5", "Q6")
@pytest.mark.parametrize("ending", ["done", "dead", "removed"])
@pytest.mark.parametrize(("one", "two"), list(itertools.product(SHORT_FLAGS, [None, *SHORT_FLAGS])))
def test_a_blocked_dispatch_becomes_a_new_job_when_the_active_one_ends(
    redis_url: str, ending: str, one: tuple[object, ...], two: tuple[object, ...] | None
) -> None:
    with one_queue(redis_url, max_retries=9) as queue:
        worker = queue.worker()
        send(queue, Dispatch("first", None))
        worker.turn(want=1)
        dispatches = [Dispatch("second", *one)] + ([Dispatch("third", *two)] if two else [])  # type: ignore[arg-type]
        for dispatch in dispatches:
            send(queue, dispatch)
        assert queue.inspector.counts().blocked == 1
        assert worker.turn(want=5, keep=1) == [], "a blocked job can never be claimed"
        expected = dispatches[0].new()
        for dispatch in dispatches[1:]:
            expected = dispatch.on(expected)
        if ending == "removed":
            queue.redis.hset(queue.key("active"), "a", f"w1:{worker.fence}:removed")
        if ending == "dead":
            fail(worker, kind="permanent")
        else:
            worker.turn(done="a")
        assert seen(queue) == replace(expected, retries=0)
        assert queue.inspector.counts().blocked == 0


@pytest.mark.spec("Q7")
@pytest.mark.parametrize("coming_back", ["retried", "stalled"])
@pytest.mark.parametrize(("one", "two"), list(itertools.product(SHORT_FLAGS, [None, *SHORT_FLAGS])))
def test_a_blocked_dispatch_updates_the_active_job_when_it_comes_back(
    redis_url: str, coming_back: str, one: tuple[object, ...], two: tuple[object, ...] | None
) -> None:
    with one_queue(redis_url, max_retries=9) as queue:
        worker = queue.worker()
        with_one_retry(queue, worker)
        worker.turn(want=1)
        dispatches = [Dispatch("second", *one)] + ([Dispatch("third", *two)] if two else [])  # type: ignore[arg-type]
        for dispatch in dispatches:
            send(queue, dispatch)
        if coming_back == "retried":
            fail(worker, FUTURE + 7)
            expected = Job("first", FUTURE + 7, 2)
        else:
            queue.recover(worker, 0, running=True)
            expected = Job("first", 0, 1)
        for dispatch in dispatches:
            expected = dispatch.on(expected)
        assert seen(queue) == expected
        assert queue.inspector.counts().blocked == 0


def test_a_job_that_was_blocked_is_marked_as_delayed(queue: OneQueue) -> None:
    """Its age is not its waiting time."""
    worker = queue.worker()
    send(queue, Dispatch("first", None))
    worker.turn(want=1)
    send(queue, Dispatch("second", None))
    worker.turn(done="a")
    assert queue.state().records["a"][:1] == b"d"


@pytest.mark.parametrize("ending", ["done", "returned", "reset"])
def test_a_blocked_dispatch_with_a_future_time_is_marked_as_delayed(queue: OneQueue, ending: str) -> None:
    queue.registry.configure("q", {"max_retries": 9}, {})
    worker = queue.worker()
    send(queue, Dispatch("first", None))
    worker.turn(want=1)
    send(queue, Dispatch("second", FUTURE))
    if ending == "done":
        worker.turn(done="a")
    elif ending == "returned":
        queue.recover(worker, 0)
    else:
        fail(worker)
    assert queue.state().records["a"][:1] == b"d"


@pytest.mark.spec("Q1", "Q8")
def test_blocked_with_run_at_0_and_blocked_without_update_run_at_are_neither_claimable_nor_stuck(
    queue: OneQueue,
) -> None:
    for dispatch in (Dispatch("now", 0), Dispatch("as it was", None, update_run_at=False)):
        worker = queue.worker(f"w{dispatch.data[:1]}")
        send(queue, Dispatch("first", None))
        assert worker.turn(want=1) == ["a"]
        send(queue, dispatch)
        assert queue.worker(f"other-{dispatch.data[:1]}").turn(want=5) == []
        worker.turn(done="a")
        assert worker.turn(want=1) == ["a"]
        worker.turn(done="a")
        assert queue.state() == State(jobs=set())


@pytest.mark.spec("Q29")
def test_cancel_takes_the_blocked_job_and_leaves_the_running_one(queue: OneQueue) -> None:
    worker = queue.worker()
    send(queue, Dispatch("first", None))
    worker.turn(want=1)
    send(queue, Dispatch("second", None))
    assert queue.producer.cancel("a") is True
    assert queue.producer.cancel("a") is False
    worker.turn(done="a")
    assert queue.state() == State(jobs=set())


def test_a_blocked_job_counts_towards_max_items(redis_url: str) -> None:
    from forq.errors import QueueFull

    with one_queue(redis_url, max_items=2) as queue:
        worker = queue.worker()
        send(queue, Dispatch("first", None))
        worker.turn(want=1)
        send(queue, Dispatch("second", None))
        send(queue, Dispatch("third", None))
        with pytest.raises(QueueFull):
            queue.enqueue("b")


def test_a_changed_priority_moves_the_job_and_it_is_claimed_once(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b")
    queue.producer.enqueue([new_job(1, id="a", priority=9)])
    assert worker.turn(want=5) == ["b", "a"]
    worker.turn(done="ba")
    assert queue.state() == State(jobs=set())


def test_deleting_a_queue_logs_blocked_jobs_too(queue: OneQueue) -> None:
    worker = queue.worker()
    send(queue, Dispatch("first", None))
    worker.turn(want=1)
    send(queue, Dispatch("second", None))
    assert queue.registry.delete(queue.name, force=True) == 2
    dropped: list[tuple[object, object]] = []
    queue.registry.purge(queue.name, lambda jobs: dropped.extend((job["id"], job["data"]) for job in jobs))
    assert sorted(dropped, key=str) == [("a", "first"), ("a", "second")]


def test_the_same_id_twice_in_one_call_is_one_job_with_the_last_data(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a"), new_job(2, id="a")])
    assert queue.inspector.job("a")["data"] == 2
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_an_active_id_twice_in_one_call_adds_one_item(redis_url: str) -> None:
    with one_queue(redis_url, max_items=2) as queue:
        queue.enqueue("a")
        queue.worker().turn(want=1)
        assert queue.enqueue("a", "a", if_exists="update") == ["a", "a"]
        assert queue.inspector.counts().blocked == 1


def test_existing_jobs_can_be_updated_after_max_items_was_lowered(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        queue.enqueue("a", "b")
        queue.create(max_items=1)
        send(queue, Dispatch("second", None))
        assert queue.inspector.job("a")["data"] == "second"


def test_a_job_moved_many_times_leaves_few_stale_hints(queue: OneQueue) -> None:
    for number in range(20):
        queue.producer.enqueue([new_job(number, id="a", priority=5 if number % 2 else 3)])
    for run_at in (FUTURE, None) * 10:
        send(queue, Dispatch("there and back", run_at))
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
