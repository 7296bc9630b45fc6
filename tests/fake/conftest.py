from collections.abc import Iterator

import pytest
import redis

from forq.client import Client, Queue
from forq.testing.fake_server import FakeServer
from tests.support.drive import one_queue as one_queue_module
from tests.support.drive import redis_cluster
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer()

    def connect(url: str, key: str) -> redis.Redis:
        return server.connect() if url == server.url else redis_cluster.connect(url, key)

    monkeypatch.setattr(one_queue_module, "connect", connect)
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
