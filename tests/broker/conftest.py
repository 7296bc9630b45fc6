"""A fresh queue per test."""

from collections.abc import Iterator

import pytest

from tests.support.one_queue import OneQueue, one_queue


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue
