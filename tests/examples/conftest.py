"""A fixture for the tests of the containers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.running_worker import Worker, running_worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with running_worker(tmp_path) as worker:
        yield worker
