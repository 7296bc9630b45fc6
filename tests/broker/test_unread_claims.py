"""Claims that a worker does not start: how they are published, and how the jobs go back."""

import select
from collections.abc import Iterator

import pytest

from forq.broker.keys import due_channels
from forq.broker.pubsub import Subscription
from forq.broker.recovery import Position
from forq.job import new_id
from tests.support.drive.one_queue import HandWorker, OneQueue, State, one_queue

PREFIX = "forq:"


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    """A worker that holds a, b and c; d waits behind them."""
    queue.enqueue("a", "b", "c", "d")
    worker = queue.worker()
    assert worker.turn(want=3) == ["a", "b", "c"]
    return worker


@pytest.fixture
def subscription(queue: OneQueue, redis_url: str) -> Iterator[Subscription]:
    listener = Subscription(redis_url, due_channels(PREFIX, 0), name="subscription")
    listener.connect()
    yield listener
    listener.close()


def rescue(queue: OneQueue, worker: HandWorker, turn: int | None = None, index: int = 0) -> int:
    at = Position(worker.name, worker.number if turn is None else turn, index, False)
    return queue.recovery(worker.processor).rescue(queue.name, at)


def wait_for_turn(queue: OneQueue, worker: HandWorker, want: int = 1) -> list[bytes]:
    """Sends BLMOVE and the claim together, like an idle worker."""
    worker.number += 1
    turn = worker.consumer.wait_for_turn(worker.number, want)
    assert turn is not None
    return turn.jobs[::2]


def test_unstarted_jobs_go_back_uncounted_and_in_order(queue: OneQueue, worker: HandWorker) -> None:
    assert rescue(queue, worker) == 3
    assert queue.state() == State(jobs=set("abcd"), waiting={5: list("abcd")})
    assert [queue.stall_count(job_id) for job_id in "abcd"] == [0, 0, 0, 0]
    assert queue.inspector.counts().done == 0


def test_other_workers_are_woken_for_returned_jobs(queue: OneQueue) -> None:
    """By the token in `pending`, because the jobs are in another list."""
    queue.enqueue("a", priority=3)
    worker, other = queue.worker(), queue.worker("w2")
    assert worker.turn(want=1) == ["a"]
    assert rescue(queue, worker) == 1
    assert other.block() == ""
    assert other.turn(want=1) == ["a"]


def test_a_worker_that_wakes_up_later_learns_that_it_holds_nothing(queue: OneQueue, worker: HandWorker) -> None:
    rescue(queue, worker)
    turn = worker.whole_turn(keep=3)
    assert not turn.held
    assert queue.state() == State(jobs=set("abcd"), waiting={5: list("abcd")})
    assert worker.turn(want=4) == ["a", "b", "c", "d"]


def test_a_worker_with_a_newer_turn_keeps_its_jobs(queue: OneQueue, worker: HandWorker) -> None:
    number = worker.number
    worker.turn(keep=3)
    before = queue.state()
    assert rescue(queue, worker, number) == 0
    assert queue.state() == before


def test_a_worker_that_has_started_keeps_its_jobs(queue: OneQueue, worker: HandWorker) -> None:
    before = queue.state()
    assert rescue(queue, worker, index=1) == 0
    assert queue.state() == before


def test_a_second_rescue_changes_nothing(queue: OneQueue, worker: HandWorker) -> None:
    rescue(queue, worker)
    other = queue.worker("w2")
    assert other.turn(want=2) == ["a", "b"]
    before = queue.state()
    assert rescue(queue, worker) == 0
    assert queue.state() == before


def test_a_rescued_worker_that_is_removed_later_has_nothing_to_return(queue: OneQueue, worker: HandWorker) -> None:
    rescue(queue, worker)
    other = queue.worker("w2")
    other.turn(want=4)
    assert queue.recover(worker, 0, running=True) == 0
    assert queue.state().active == dict.fromkeys("abcd", "w2")
    assert [queue.stall_count(job_id) for job_id in "abcd"] == [0, 0, 0, 0]


def test_a_heartbeat_reports_workers_that_have_not_read_their_last_turn(queue: OneQueue, worker: HandWorker) -> None:
    recovery = queue.recovery(worker.processor)

    def unread(turn: int, *, running: bool = False) -> dict[str, int]:
        at = Position(worker.name, turn, 0, running)
        return recovery.heartbeat(queue.name, 60_000, [at]).unread

    assert unread(worker.number - 1) == {worker.name: worker.number}
    assert unread(worker.number) == {}
    assert unread(worker.number - 1, running=True) == {}, "it runs a job, which explains the delay"
    worker.number = 2**53 - 2
    worker.turn(want=1)
    assert unread(2**53 - 2) == {worker.name: 2**53 - 1}, "turn numbers are returned in full"
    assert recovery.registered(queue.name) == {worker.name: 2**53 - 1}


def test_registered_turns_are_read_after_a_rescue_too(queue: OneQueue, worker: HandWorker) -> None:
    queue.rescue(worker, 1)
    assert queue.recovery(worker.processor).registered(queue.name) == {worker.name: worker.number}


def published_so_far(queue: OneQueue, subscription: Subscription) -> list[str]:
    """Returns the messages published for this queue so far."""
    queue.redis.publish(queue.channel("due"), "end")
    messages: list[str] = []
    while "end" not in messages:
        select.select([subscription], [], [], 20)
        messages += [message for channel, message in subscription.receive() if channel == queue.channel("due")]
    return messages[:-1]


def test_a_claim_sent_with_blmove_is_published_at_most_once_in_two_seconds(
    redis_url: str, subscription: Subscription
) -> None:
    # A new name, because the server remembers when it last published for a queue.
    with one_queue(redis_url, new_id()) as queue:
        worker, other = queue.worker(), queue.worker("w2")
        queue.enqueue("a", "b")
        assert wait_for_turn(queue, worker) == [b"a"]
        assert wait_for_turn(queue, other) == [b"b"]
        assert published_so_far(queue, subscription) == [f"look {worker.name} {worker.number}"]


def test_a_claim_of_a_job_that_comes_alone_is_published(redis_url: str, subscription: Subscription) -> None:
    """It is short (lua/quick.lua): only the first one of a queue is not."""
    with one_queue(redis_url, new_id()) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        assert worker.turn(want=1) == ["a"]
        worker.turn(done="a")
        queue.enqueue("b")
        assert wait_for_turn(queue, worker) == [b"b"]
        assert published_so_far(queue, subscription) == [f"look {worker.name} {worker.number}"]


def test_a_claim_whose_worker_waits_for_the_reply_is_not_published(redis_url: str, subscription: Subscription) -> None:
    with one_queue(redis_url, new_id()) as queue:
        queue.enqueue("a")
        assert queue.worker().turn(want=1) == ["a"]
        assert published_so_far(queue, subscription) == []


def test_a_heartbeat_reports_which_roles_jobs_wait_for(queue: OneQueue) -> None:
    worker = queue.worker()

    def wanted() -> tuple[bool, bool]:
        beat = queue.recovery(worker.processor).heartbeat(queue.name, 60_000, [])
        return beat.main_wanted, beat.retry_wanted

    assert wanted() == (False, False)
    queue.enqueue("a", "b")
    assert wanted() == (True, False)
    worker.turn(want=2)
    assert wanted() == (False, False), "a running job does not wait"
    queue.recover(worker, 0, running=True, outcome="suspect")
    assert wanted() == (True, True)
    queue.registry.pause(queue.name, paused=True)
    assert wanted() == (False, False), "no worker may start it"
