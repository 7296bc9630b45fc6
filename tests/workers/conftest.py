"""Fixtures that make exec handlers."""

import logging
from collections.abc import Iterator

import pytest

from forq.queue_spec import read_program
from forq.workers.exec_handlers import ExecHandler, close_handlers, running_programs
from tests.workers.exec_attempts import Made


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes exec handlers; their programs are ended after the test."""
    handlers: list[ExecHandler] = []

    def make(line: str) -> ExecHandler:
        handlers.append(ExecHandler(read_program(line), "q"))
        return handlers[-1]

    yield make
    close_handlers(handlers)
    assert not running_programs()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="forq")
    return caplog
