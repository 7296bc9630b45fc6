"""Fixtures for the tests of forqctl."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ctl.fake_supervisor import FakeSupervisor


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSupervisor]:
    fake = FakeSupervisor(str(tmp_path / "c.sock"))
    yield fake
    fake.close()
