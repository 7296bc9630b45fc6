"""Bugs of other queues with jobs that wait for others: each as a test of what happens here instead."""

import threading
from collections.abc import Iterator

import pytest

from forq.batch import Batch
from forq.broker.dependencies import AS_LIST
from forq.broker.flows import FlowJob, store_flow
from forq.broker.reports import Reports
from forq.client import Client, new_job
from forq.errors import Fenced
from tests.broker.test_batches import callbacks, deliver, ids
from tests.broker.test_flows import is_clean
from tests.broker.test_held import after, held, store, verbs
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue


@pytest.fixture
def other(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, "other") as queue:
        yield queue


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    client = Client(redis_url)
    yield client
    client.close()


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


def test_a_member_that_runs_twice_counts_once(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    """sidekiq#6852: each run of a job that ran twice decremented the batch, so callbacks ran again."""
    with client.batch("q", **callbacks("on_done")) as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("q", 1, id="b")
    assert worker.turn(1) == ["a"]
    first = worker.fence
    queue.recover(worker, 0, running=True)
    second = queue.worker("w2")
    assert sorted(second.turn(2)) == ["a", "b"]
    assert second.turn(5, done="a", keep=1) == []
    # The first worker was only slow.
    with pytest.raises(Fenced):
        worker.turn(0, done="a", fence=first)
    assert (batch.info()["open"], batch.info()["done"]) == (1, 1)
    assert second.turn(5, done="b") == ids(batch, "on_done")
    second.consumer.turn(9, [ids(batch, "on_done")[0].encode(), second.fence, 7], [], 0, 0)
    assert verbs(queue, ids(batch, "on_done")[0]) == ["enqueued", "options", "held", "met", "claimed", "done"]
    assert is_clean(queue)


def test_a_parent_whose_child_fails_does_not_wait_for_ever(queue: OneQueue, worker: HandWorker) -> None:
    """bullmq#3362: a parent waited for ever for a child that had failed."""
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "a", when="ended"))
    worker.turn(1)
    assert worker.turn(5, failed="a") == ["c"]
    assert queue.state().dead == ["a", "b"]
    assert queue.inspector.job("b")["error"]["message"] == "job a, for which it waited, ended as dead"


@pytest.mark.parametrize("keep_done_ms", [0, 60_000])
def test_a_parent_that_is_added_after_its_child_has_ended_runs(
    queue: OneQueue, worker: HandWorker, keep_done_ms: int
) -> None:
    """bullmq#2554: a parent waited for ever for a child that had ended before the parent was added."""
    queue.set_options(flows=2, keep_done_ms=keep_done_ms)
    queue.enqueue("a")
    worker.turn(1)
    worker.turn(0, done="a")
    store(queue, after("b", "a"))
    assert worker.turn(5) == ["b"]
    worker.turn(0, done="b")
    assert is_clean(queue)


def test_jobs_that_wait_for_one_whose_workers_die_get_its_end(queue: OneQueue) -> None:
    """rq#2006: a dependant that may run after a failure never ran if the worker of the other job had died."""
    queue.set_options(max_stalls=1)
    store(queue, new_job(1, id="a"), after("b", "a", when="ended"), after("c", "a"), after("d", "a", when="dead"))
    for name in ("w1", "w2"):
        worker = queue.worker(name)
        assert worker.turn(1) == ["a"]
        queue.recover(worker, 0, running=True)
    # That it has stalled too often is found when it is claimed again.
    last = queue.worker("w3")
    assert last.turn(5) == []
    assert queue.state().dead == ["a", "c"]
    assert last.turn(5) == ["b", "d"]


def test_a_job_waits_until_the_other_one_is_not_retried_any_more(queue: OneQueue, worker: HandWorker) -> None:
    """rq#813: a dependant ran as soon as an attempt of the other job had failed, although it was retried."""
    queue.set_options(max_retries=2, min_backoff_ms=0)
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "a", when="ended"), after("d", "a", when="dead"))
    worker.turn(1)
    for _ in range(2):
        assert worker.turn(5, failed="a") == ["a"]
        assert held(queue) == {"b", "c", "d"}
    assert worker.turn(5, done="a") == ["b", "c"]
    assert verbs(queue, "d")[-1] == "cancelled"


def test_a_job_that_is_revived_does_not_run_those_behind_it_again(queue: OneQueue, worker: HandWorker) -> None:
    """rq#813, too: one that was run again by hand later. Here the jobs behind it are dead, and revived one by one."""
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "a", when="ended"))
    worker.turn(1)
    assert worker.turn(1, failed="a") == ["c"]
    jobs = Client(queue.url).queue("q")
    jobs.retry_dead("a")
    assert worker.turn(5, done="c") == ["a"]
    assert worker.turn(5, done="a") == []
    jobs.retry_dead("b")
    assert worker.turn(5) == ["b"]
    worker.turn(0, done="b")
    assert is_clean(queue)


def test_a_callback_is_not_lost_if_a_member_is_retried(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    """celery#1401: the callback of a chord never ran if a task of its header was retried."""
    queue.set_options(max_retries=1, min_backoff_ms=0)
    with client.batch("q", **callbacks("on_done", "on_dead")) as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("q", 1, id="b")
    assert worker.turn(1) == ["a"]
    assert worker.turn(2, failed="a") == ["b", "a"]
    assert worker.turn(5, done="ba") == ids(batch, "on_done")
    assert batch.info()["done"] == 2


@pytest.mark.parametrize("returns", [True, False])
def test_a_callback_is_not_lost_if_a_member_is_replaced(
    client: Client, queue: OneQueue, worker: HandWorker, returns: bool
) -> None:
    """celery#3535: the callback of a chord never ran if a task of its header was replaced."""
    queue.set_options(max_retries=1, min_backoff_ms=0)
    with client.batch("q", **callbacks("on_done", "on_end")) as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    # A job that replaces the member if that returns, and else runs after it.
    queue.producer.enqueue([new_job("other data", id="a")])
    if returns:
        assert worker.turn(1, failed="a") == ["a"]
        assert worker.turn(5, done="a") == ids(batch, "on_done", "on_end")
    else:
        assert sorted(worker.turn(5, done="a")) == sorted(["a", *ids(batch, "on_done", "on_end")])
    assert (batch.info()["members"], batch.info()["done"]) == (1, 1)
    assert is_clean(queue)


def test_no_dependant_is_lost_while_the_other_job_ends(queue: OneQueue, worker: HandWorker) -> None:
    """rq#739: a dependant that was stored while the other job ended never ran."""
    queue.set_options(flows=2)
    names = [f"a{number}" for number in range(200)]
    queue.enqueue(*names)
    claimed = worker.whole_turn(len(names)).jobs[::2]
    client = Client(queue.url)

    def store_dependants() -> None:
        for name in names:
            client.queue("q").enqueue(1, id=f"b{name}", after=name)

    thread = threading.Thread(target=store_dependants)
    thread.start()
    for number, job_id in enumerate(claimed, 1):
        worker.consumer.turn(10 + number, [job_id, worker.fence, 7], [], len(claimed) - number, 0)
    thread.join()
    assert held(queue) == set()
    assert queue.inspector.counts().waiting == len(names)
    assert is_clean(queue)


def test_a_batch_does_not_end_while_members_are_added(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    """sidekiq-batch#69: callbacks ran while a job of the batch was still adding others to it."""
    batch = client.batch("q", **callbacks("on_end"))
    batch.enqueue("q", 1, id="a")
    batch.flush()
    assert worker.turn(5) == ["a"]
    second = queue.worker("w2")
    batch.seal()
    adding = Batch(client.link, client.prefix, "q", batch.id, parent=1, parent_id="a")
    for _ in range(3):
        child = adding.enqueue("q", "x")
        adding.flush()
        assert second.turn(5) == [child]
        second.number += 1
        second.consumer.turn(second.number, [child.encode(), second.fence, 7], [], 0, 0)
        assert (batch.info()["state"], batch.info()["open"]) == ("sealed", 1)
    assert worker.turn(5, done="a") == ids(batch, "on_end")
    assert batch.info()["members"] == 4


def test_a_batch_does_not_wait_for_a_member_that_was_cancelled_while_it_ran(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    """celery#10526: a chord waited for ever for a task that was revoked while its worker had it."""
    with client.batch("q", **callbacks("on_end", "on_done")) as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("q", 1, id="b")
    assert worker.turn(2) == ["a", "b"]
    for name in "ab":
        assert queue.producer.remove(name)
    # One fails after that, the other is lost with its worker.
    assert worker.turn(0, failed="a", keep=1) == []
    queue.recover(worker, 0, running=True)
    assert queue.worker("w2").turn(5) == ids(batch, "on_end")
    assert (batch.info()["state"], batch.info()["other"]) == ("failed", 2)


@pytest.mark.parametrize("killed", ["before it reports", "after it has reported"])
def test_a_member_counts_once_wherever_its_worker_is_killed(
    client: Client, queue: OneQueue, worker: HandWorker, killed: str
) -> None:
    """dramatiq: the barrier of a group counted a message before it was acknowledged, so one whose worker was killed in
    between counted twice."""
    with client.batch("q", **callbacks("on_done")) as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("q", 1, id="b")
    assert worker.turn(1) == ["a"]
    if killed == "after it has reported":
        worker.turn(0, done="a")
    # It had run `a`, and nothing else.
    queue.recover(worker, 1 if killed == "before it reports" else 0)
    assert (batch.info()["open"], batch.info()["done"]) == (1, 1)
    second = queue.worker("w2")
    assert second.turn(5) == ["b"]
    assert second.turn(5, done="b") == ids(batch, "on_done")


def test_a_member_whose_result_is_lost_with_its_worker_runs_again_and_counts_once(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    """dramatiq, too: here the result is stored in the call that counts the member."""
    with client.batch("q", results=True, **callbacks("on_done")) as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    queue.recover(worker, 1)
    assert batch.info()["open"] == 1
    second = queue.worker("w2")
    assert second.turn(5) == ["a"]
    assert second.turn(5, done="a", results={"a": "7"}) == ids(batch, "on_done")
    assert batch.results() == [7]


def test_a_report_counts_once_if_pulse_is_killed_before_it_is_forgotten(
    client: Client, queue: OneQueue, other: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dramatiq, too: between queues, an end is delivered before it is forgotten."""
    with client.batch("q", **callbacks("on_done")) as batch:
        batch.enqueue("other", 1, id="a")
        batch.enqueue("other", 1, id="b")
    store_flow(queue.link, "forq:", "f", [flow_job("x", "other"), flow_job("z", "q", 0)])
    deliver(queue)
    runner = other.worker()
    assert runner.turn(3) == ["a", "b", "x"]
    runner.turn(0, done="ax", keep=1, results={"x": "1"})
    with monkeypatch.context() as patched:
        patched.setattr(Reports, "_forget", lambda *_: None)
        for _ in range(3):
            Reports(other.link, "forq:").deliver("other")
    assert (batch.info()["open"], batch.info()["done"]) == (1, 1)
    assert queue.hash("inputs") == {"z": "1 3", "z 1": "done 1"}
    assert worker.turn(5) == ["z"]
    runner.turn(0, done="b")
    deliver(other)
    assert worker.turn(5, done="z") == ids(batch, "on_done")
    assert is_clean(queue, other)


def flow_job(job_id: str, queue: str, *needs: int) -> FlowJob:
    return FlowJob(queue, new_job(1, id=job_id), needs, use=AS_LIST if needs else 0)
