from collections.abc import Iterator

import pytest

from forq.client import Client, Queue
from tests.support.drive.fake_server import FakeServer
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    with server.installed():
        yield server


@pytest.fixture
def queue(fake: FakeServer) -> Iterator[OneQueue]:
    with one_queue(fake.url, keep_done_ms=60_000) as queue:
        yield queue


@pytest.fixture
def q(fake: FakeServer, queue: OneQueue) -> Iterator[Queue]:
    client = Client(fake.url)
    yield client.queue(queue.name)
    client.close()


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()
