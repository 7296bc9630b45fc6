"""An app that enqueues into one queue, whose workers a test drives by hand."""

from collections.abc import Iterator

import pytest

import forq
from tests.support.drive.one_queue import OneQueue, one_queue


@pytest.fixture
def app(redis_url: str) -> Iterator[forq.App]:
    app = forq.App("q", url=redis_url)
    yield app
    app.client.close()


@pytest.fixture
def queue(redis_url: str, app: forq.App) -> Iterator[OneQueue]:
    """Keeps results for an hour."""
    with one_queue(redis_url, keep_done_ms=3_600_000) as queue:
        yield queue
