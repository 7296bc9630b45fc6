"""Progress of running jobs: who may report it, who receives it, and its removal at the end of the attempt."""

import time
from collections.abc import Callable, Iterator

import pytest

from forq.broker.claim import Consumer, report_progress
from forq.broker.explain import why
from forq.broker.keys import DEFAULT_PREFIX, fail_queue, progress_channels
from forq.broker.leases import Leases
from forq.broker.pubsub import Subscription
from forq.errors import BackPressure, UnknownQueue
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, OneQueue, one_queue
from tests.support.drive.wait import wait_until


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue


def report(
    queue: OneQueue, worker: HandWorker, job_id: str, fraction: float = 0.4, text: str = "page 12 of 30", fence: int = 0
) -> bool:
    fence = fence or int(worker.fence)
    return report_progress(queue.link, DEFAULT_PREFIX, queue.name, worker.name, job_id, fence, fraction, text)


def stored_ids(queue: OneQueue) -> set[str]:
    return {job_id.decode() for job_id in queue.redis.hkeys(queue.key("progress"))}


def running(queue: OneQueue, *ids: str) -> HandWorker:
    """Returns a worker that holds these jobs and has reported progress of each."""
    queue.enqueue(*ids)
    worker = queue.worker()
    worker.turn(want=len(ids))
    for job_id in ids:
        assert report(queue, worker, job_id)
    return worker


def test_the_progress_of_a_running_job_is_shown_with_its_time(queue: OneQueue) -> None:
    queue.enqueue("a")
    assert queue.inspector.job("a")["progress"] is None
    worker = queue.worker()
    worker.turn(want=1)
    assert queue.inspector.job("a")["progress"] is None
    assert report(queue, worker, "a", 1 / 3, "two  blanks, ü")
    progress = queue.inspector.job("a")["progress"]
    assert (progress["fraction"], progress["text"]) == (0.333333, "two  blanks, ü")
    assert abs(progress["at"] - time.time()) < 60
    assert report(queue, worker, "a", 1, "")
    assert queue.hash("progress")["a"].startswith("1 ")
    assert queue.inspector.job("a")["progress"]["text"] == ""


def test_why_shows_the_progress_of_a_running_job(queue: OneQueue) -> None:
    running(queue, "a")
    assert why(queue.link, DEFAULT_PREFIX, "q", "a")[1] == "it is running now (worker w1): 40% page 12 of 30"


def test_only_the_worker_that_runs_a_job_can_report_its_progress(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    first, second = queue.worker("w1"), queue.worker("w2")
    first.turn(want=1)
    old_fence = int(first.fence)
    assert not report(queue, second, "a", fence=old_fence)
    assert not report(queue, first, "b"), "the job is waiting"
    assert not report(queue, first, "nothing")
    first.turn(failed="a", kind="timeout")
    first.turn(want=2)
    assert not report(queue, first, "a", fence=old_fence), "that attempt is over"
    assert stored_ids(queue) == set()
    assert report(queue, first, "a")


def test_a_removed_running_job_may_still_report_progress(queue: OneQueue) -> None:
    worker = running(queue, "a")
    queue.producer.remove("a")
    assert report(queue, worker, "a", 0.9)


def test_an_unknown_queue_is_an_error(queue: OneQueue) -> None:
    worker = running(queue, "a")
    queue.registry.delete("q", force=True)
    with pytest.raises(UnknownQueue):
        report(queue, worker, "a")


def test_out_of_memory_progress_is_refused_and_the_job_can_still_be_settled(queue: OneQueue) -> None:
    worker = running(queue, "a")
    queue.redis.config_set("maxmemory", 1)
    with pytest.raises(BackPressure):
        report(queue, worker, "a")
    worker.turn(done="a")
    assert queue.state().jobs == set()


def lose_the_host(queue: OneQueue, worker: HandWorker) -> None:
    queue.recovery("p2").evict("q", worker.processor, "host_lost")


def remove_and_fail(queue: OneQueue, worker: HandWorker) -> None:
    queue.producer.remove("a")
    worker.turn(failed="a", keep=1)


def fail_with_retries_left(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(max_retries=3)
    worker.turn(failed="a", keep=1)


def exhaust(queue: OneQueue, worker: HandWorker) -> None:
    worker.turn(failed="a", kind="permanent", keep=1)
    assert queue.state().dead == ["a"]


# How the attempt of the first of two jobs ends, and whether the second is still held afterwards.
ENDS: dict[str, tuple[Callable[[OneQueue, HandWorker], object], bool]] = {
    "done": (lambda queue, worker: worker.turn(done="a", keep=1), True),
    "retried": (fail_with_retries_left, True),
    "timed out": (lambda queue, worker: worker.turn(failed="a", kind="timeout", keep=1), True),
    "dead": (exhaust, True),
    "removed": (remove_and_fail, True),
    "given back": (lambda queue, worker: worker.turn(), False),
    "recovered, it had run": (lambda queue, worker: queue.recover(worker, 1), False),
    "recovered, it was running": (lambda queue, worker: queue.recover(worker, 0, running=True), False),
    "killed": (lambda queue, worker: queue.recover(worker, 0, running=True, outcome="cancelled"), False),
    "rescued": (lambda queue, worker: queue.rescue(worker, 0), False),
    "evicted": (lose_the_host, False),
    "deleted": (lambda queue, worker: queue.registry.delete("q", force=True), False),
}


@pytest.mark.parametrize("end", ENDS)
def test_progress_is_gone_when_its_job_leaves_active(queue: OneQueue, end: str) -> None:
    worker = running(queue, "a", "b")
    act, kept = ENDS[end]
    act(queue, worker)
    expected = {"a"} if end == "rescued" else {"b"} if kept else set()
    assert stored_ids(queue) == expected
    if end != "deleted":
        assert stored_ids(queue) == set(queue.state().active)


def test_progress_of_an_item_is_gone_when_it_is_released_or_goes_back(redis_url: str) -> None:
    """The holder of a lease owns its item as a worker owns its job."""
    with one_queue(redis_url, mode="on_request", lease_ms=60_000) as queue:
        queue.enqueue("a", "b")
        leases = Leases(queue.link, DEFAULT_PREFIX, "q")
        for awaiter, job_id in (("one", "a"), ("two", "b")):
            lease = leases.request(awaiter, None, mode="on_request", register=False).lease
            assert lease is not None
            assert report_progress(queue.link, DEFAULT_PREFIX, "q", awaiter, job_id, lease.fence, 0.5, "")
            if awaiter == "one":
                leases.ack(awaiter, job_id, lease.fence)
                assert stored_ids(queue) == set()
        leases.leave("two")
        assert (stored_ids(queue), queue.state().active) == (set(), {})


def test_a_returned_hint_leaves_the_progress_of_others_alone(queue: OneQueue) -> None:
    running(queue, "a")
    queue.enqueue("b")
    other = queue.worker("w2")
    assert other.block() == "b"
    assert other.turn() == []
    assert (stored_ids(queue), queue.pending()) == ({"a"}, ["b"])


def test_only_changes_and_ends_are_published(queue: OneQueue) -> None:
    subscription = Subscription(queue.url, progress_channels(DEFAULT_PREFIX, 0), name="subscription")
    subscription.connect()
    received: list[tuple[str, str]] = []

    def receive(number: int) -> list[str]:
        def received_enough() -> bool:
            received.extend(subscription.receive())
            return len(received) >= number

        wait_until(received_enough)
        return [message for _, message in received]

    queue.enqueue("a", "b", "c", "d")
    worker = queue.worker()
    worker.turn(want=2)
    worker.turn(done="ab", want=2)
    report(queue, worker, "c")
    assert receive(1) == ["c"]
    assert received[0][0] == queue.channel("progress")
    worker.turn(done="cd")
    assert receive(2) == ["c", "c d"]
    queue.enqueue("e")
    worker.turn(want=1)
    worker.turn(done="e")
    report_progress(queue.link, DEFAULT_PREFIX, "q", "w1", "e", 1, 0.5, "")
    queue.enqueue("f", "g")
    worker.turn(want=2)
    report(queue, worker, "f")
    worker.turn(done="g", keep=1)
    report(queue, worker, "f", 1)
    assert receive(4) == ["c", "c d", "f", "f"]
    subscription.close()


def test_a_fail_job_has_its_progress_in_the_fail_queue(redis_url: str) -> None:
    with one_queue(redis_url, fail_handler=1) as queue:
        queue.registry.create(
            "q", "work", 100, {}, {}, fail_options={"max_retries": 0, "dead_max": 10, "dead_ttl_ms": 10**9}
        )
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(failed="a", kind="permanent")
        consumer = Consumer(redis_url, DEFAULT_PREFIX, fail_queue("q"), "p1", "w9", "retry")
        consumer.join(EXPIRY_MS)
        turn = consumer.turn(1, [], [], 0, 1)
        job_id = turn.jobs[0].decode()
        assert report_progress(queue.link, DEFAULT_PREFIX, fail_queue("q"), "w9", job_id, int(turn.fence), 0.5, "x")
        assert set(queue.hash("fail:progress")) == {job_id}
        consumer.turn(2, [job_id, turn.fence, 7], [], 0, 0)
        assert queue.hash("fail:progress") == {}
        consumer.close()
