"""Queues with the same name in two databases: messages of one are not received in the other."""

import select
from collections.abc import Iterator

import pytest

from forq.broker.claim import report_progress
from forq.broker.enqueue import new_job
from forq.broker.keys import (
    DEFAULT_PREFIX,
    due_channels,
    ended_channel,
    fail_queue,
    handed_channels,
    outbox_channels,
    progress_channels,
    queue_base,
    queue_of_channel,
)
from forq.broker.outbox import OutboxSubscription
from forq.broker.pubsub import Subscription
from forq.errors import UnknownJob
from forq.redis_url import database_of
from tests.broker.test_wait import Waiting, run_next
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.release_queue import gate

# A cluster has one database.
pytestmark = pytest.mark.one_server

HOUR_MS = 3_600_000
OTHER = 3


def in_other(url: str) -> str:
    return f"{url}?db={OTHER}"


@pytest.fixture
def two(redis_url: str) -> Iterator[tuple[OneQueue, OneQueue]]:
    """Queue q in database 0 and in another database."""
    other_url = in_other(redis_url)
    with one_queue(redis_url, keep_done_ms=HOUR_MS) as here, one_queue(other_url, keep_done_ms=HOUR_MS) as there:
        yield here, there


class Subscriptions:
    """Receives messages on channels that match some patterns."""

    def __init__(self, url: str, patterns: list[str]) -> None:
        self._subscription = [Subscription(url, pattern, name="subscription") for pattern in patterns]
        for subscription in self._subscription:
            subscription.connect()

    def receive(self, number: int) -> list[tuple[str, str]]:
        """Returns the next messages as (channel, message)."""
        received: list[tuple[str, str]] = []
        while len(received) < number:
            readable, _, _ = select.select(self._subscription, [], [], 10)
            assert readable, f"received only {received}"
            for subscription in readable:
                received += subscription.receive()
        return received

    def close(self) -> None:
        for subscription in self._subscription:
            subscription.close()


def test_a_wait_is_not_ended_by_the_same_id_in_another_database(two: tuple[OneQueue, OneQueue]) -> None:
    here, there = two
    workers = [queue.worker() for queue in two]
    for queue in two:
        queue.enqueue("a")
    waits = [Waiting(queue).begun() for queue in two]
    subscription = Subscriptions(here.url, [f"{here.base}@0:*"])
    there.producer.cancel("a")
    with pytest.raises(UnknownJob):
        waits[1].result()
    there.enqueue("a")
    run_next(there, workers[1], "there")
    here.redis.publish(f"{here.base}@0:over", "")
    assert [channel for channel, _ in subscription.receive(1)] == [f"{here.base}@0:over"], (
        "messages of the other database are not received here"
    )
    assert waits[0].waits
    run_next(here, workers[0], "here")
    assert waits[0].result() == "here"
    subscription.close()


@pytest.mark.parametrize("where", [0, OTHER])
def test_every_channel_name_has_its_database_number(redis_url: str, where: int) -> None:
    url = redis_url if where == 0 else in_other(redis_url)
    patterns = [due_channels, progress_channels, outbox_channels]
    subscription = Subscriptions(url, [pattern(DEFAULT_PREFIX, where) for pattern in patterns])
    others = Subscriptions(url, [pattern(DEFAULT_PREFIX, OTHER - where) for pattern in patterns])
    with one_queue(url) as queue:
        queue.producer.enqueue([new_job(1, id="later", run_in=60)])
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        report_progress(queue.link, DEFAULT_PREFIX, queue.name, worker.name, "a", int(worker.fence), 0.5, "half")
        worker.turn(failed="a")
        names = {channel.rpartition("}")[2] for channel, _ in subscription.receive(4)}
        assert names == {f"@{where}:{name}" for name in ("due", "progress", "outbox")}
        queue.redis.publish(f"{queue.base}@{OTHER - where}:due", "1")
        assert [message for _, message in others.receive(1)] == ["1"], "nothing was published before it"
    subscription.close()
    others.close()


def test_an_awaiter_is_notified_in_its_own_database(redis_url: str) -> None:
    url = in_other(redis_url)
    subscription = Subscriptions(url, [handed_channels(DEFAULT_PREFIX, OTHER, "clerk")])
    with gate(url, "on_request") as queue:
        assert queue.ask("x", via="clerk") is None
        queue.enqueue("a")
        assert subscription.receive(1) == [(f"{queue.base}@{OTHER}:handed:clerk", "x")]
    subscription.close()


def test_a_new_queue_is_published_in_its_own_database(redis_url: str) -> None:
    url = in_other(redis_url)
    subscription = Subscriptions(url, [due_channels(DEFAULT_PREFIX, OTHER)])
    with gate(url, "on_request") as queue:
        assert subscription.receive(1) == [(f"{queue.base}@{OTHER}:due", "new")]
    subscription.close()


def test_a_queue_moved_to_another_database_publishes_there_once_it_is_joined(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        assert queue.hash("options")["db"] == "0"
        queue.set_options(db=7)
        outbox_subscription = OutboxSubscription(queue.url, DEFAULT_PREFIX, "test")
        outbox_subscription.connect()
        queue.create()
        assert queue.hash("options")["db"] == "0"
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(failed="a")
        select.select([outbox_subscription], [], [], 10)
        assert outbox_subscription.receive_queues() == {"q"}
        outbox_subscription.close()


def test_the_database_is_read_from_a_url_and_the_queue_from_a_channel() -> None:
    urls = {
        "redis://host": 0,
        "redis://host/4": 4,
        "unix:///tmp/redis.sock?db=2": 2,
        "redis+cluster://a,b": 0,
        "redis+sentinel://a,b/master": 0,
        "redis+sentinel://a,b/master/5": 5,
    }
    assert {url: database_of(url) for url in urls} == urls
    for name in ("q", fail_queue("q")):
        assert queue_of_channel(ended_channel(queue_base(DEFAULT_PREFIX, name), 3, "x")) == name
