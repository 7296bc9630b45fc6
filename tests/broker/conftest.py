"""A new queue for each test. For tests/broker/test_mutants.py the library is replaced by a mutant."""

from collections.abc import Iterator

import pytest

from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.models.mutants import use_the_one_asked_for

use_the_one_asked_for()


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue
