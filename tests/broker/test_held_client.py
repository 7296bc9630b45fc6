"""Held jobs as clients see them: enqueueing them, one job, pages, searches, bulk requests and explanations."""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from forq.api_types import When
from forq.async_client import AsyncClient
from forq.client import Client, Queue
from forq.errors import UnknownDependency, UsageError
from tests.support.drive.one_queue import HandWorker, OneQueue


class Ref(NamedTuple):
    queue: str
    id: str


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    client = Client(redis_url)
    yield client
    client.close()


@pytest.fixture
def q(client: Client) -> Queue:
    return client.queue("q")


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


@pytest.mark.parametrize("after", ["a", ["a"], ("a", "a"), Ref("q", "a"), [Ref("q", "a")]])
def test_a_client_enqueues_a_job_that_waits_for_ids_and_refs(
    queue: OneQueue, q: Queue, worker: HandWorker, after: Any
) -> None:
    q.enqueue(1, id="a")
    assert q.enqueue(2, id="b", after=after) == "b"
    assert (q.status()["held"], q.status()["waiting"]) == (1, 1)
    assert worker.turn(5) == ["a"]
    assert worker.turn(5, done="a") == ["b"]


@pytest.mark.parametrize("when", ["ended", "dead"])
def test_a_client_says_when_the_job_may_run(queue: OneQueue, q: Queue, worker: HandWorker, when: When) -> None:
    q.enqueue(1, id="a")
    q.enqueue(2, id="b", after="a", when=when)
    worker.turn(1)
    assert worker.turn(5, failed="a") == ["b"]


def test_a_client_asks_for_results(queue: OneQueue, q: Queue, worker: HandWorker) -> None:
    q.enqueue(1, id="a")
    q.enqueue(2, id="b", after="a", with_results=True)
    worker.turn(1)
    worker.turn(0, done="a", results={"a": "5"})
    assert queue.hash("inputs")["b 1"] == "done 5"
    with pytest.raises(UsageError, match="with_results needs `after`"):
        q.enqueue(3, with_results=True)


def test_a_ref_of_another_queue_is_refused(queue: OneQueue, q: Queue) -> None:
    q.enqueue(1, id="a")
    with pytest.raises(
        UsageError, match="job 'a' is in queue 'other', but a job of queue 'q' can wait for jobs of its"
    ):
        q.enqueue(2, after=Ref("other", "a"))
    with pytest.raises(UnknownDependency):
        q.enqueue(2, after=["a", "nobody"])
    with pytest.raises(UsageError, match="when 'soon' is not allowed: 'done', 'ended', 'dead'"):
        q.enqueue(2, after="a", when="soon")  # type: ignore[arg-type]
    assert q.status()["held"] == 0


def test_an_async_client_enqueues_jobs_that_wait(queue: OneQueue, redis_url: str, worker: HandWorker) -> None:
    async def test() -> None:
        async with AsyncClient(redis_url) as client:
            q = client.queue("q")
            first = await q.enqueue(1, id="a")
            await q.enqueue(2, id="b", after=[first], when="ended", with_results=True)
            with pytest.raises(UsageError, match="is in queue 'other'"):
                await q.enqueue(2, after=Ref("other", "a"))

    asyncio.run(test())
    assert queue.hash("held")["b"].split(" ")[1:3] == ["ended", "1"]
