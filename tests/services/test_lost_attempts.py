"""The log line about an attempt that was lost with its process: in the queue's log, otherwise in the service's log."""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forq.broker.recovery import Outcome
from forq.broker.scripts import Fate
from forq.output.format import FIFO_NAME, MARK, Line, open_fifo, unpack
from forq.services.pulse import log_lost_attempt

AGAIN = Fate("returned", 0, 1, 4)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[int]:
    fd = open_fifo(tmp_path)
    yield fd
    os.close(fd)


def read_line(fifo: int) -> Line:
    line = unpack(os.read(fifo, 65536).removeprefix(MARK).rstrip(b"\n"))
    assert isinstance(line, Line)
    return line


@pytest.mark.parametrize(
    ("outcome", "fate", "level", "text"),
    [
        ("stalled", AGAIN, "WARNING", "lost with its process (signal 9 (SIGKILL)): attempt 1 of 4, retry at once"),
        (
            "stalled",
            Fate("dead", 0, 4, 4),
            "ERROR",
            "lost with its process (signal 9 (SIGKILL)): attempt 4 of 4, failed for good (see: forqctl why q 'a b')",
        ),
        ("timed_out", AGAIN, "WARNING", "timed out after 1.5 s: attempt 1 of 4, retry at once"),
        (
            "suspect",
            Fate("suspect", 0, 1, 1),
            "WARNING",
            "lost with others of its process (signal 9 (SIGKILL)): "
            "attempt 1, not counted, retry at once alone in its process",
        ),
        (
            "interrupted",
            Fate("interrupted", 0, 1, 1),
            "INFO",
            "interrupted, since its process was stopped: attempt 1, not counted, retry at once",
        ),
    ],
)
def test_a_lost_attempt_is_written_to_the_queue_log(
    fifo: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, outcome: Outcome, fate: Fate, level: str, text: str
) -> None:
    caplog.set_level(logging.INFO)
    log_lost_attempt(str(tmp_path), "q", "a b", fate, outcome=outcome, cause="signal_9_(SIGKILL)", micros=1_500_000)
    line = read_line(fifo)
    assert (line.level, line.job, line.logger, line.stream, line.text) == (level, "a b", "forq", "log", f"job {text}")


def test_the_log_level_applies_to_lost_attempts(fifo: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    log_lost_attempt(str(tmp_path), "q", "a", AGAIN, outcome="stalled", cause="exit_1", micros=None)
    log_lost_attempt(str(tmp_path), "q", "b", Fate("dead", 0, 4, 4), outcome="stalled", cause="exit_1", micros=None)
    assert read_line(fifo).job == "b"


def test_a_lost_fail_job_is_logged_with_the_id_of_the_failed_job(fifo: int, tmp_path: Path) -> None:
    log_lost_attempt(str(tmp_path), "q#fail", "a:17", AGAIN, outcome="stalled", cause="exit_1", micros=None)
    line = read_line(fifo)
    assert (line.job, line.text) == ("a", "fail handler lost with its process (exit 1): attempt 1 of 4, retry at once")


@pytest.mark.parametrize("there", ["nothing", "full", "no reader", "unknown"])
def test_without_a_fifo_the_line_goes_to_the_service_log_and_no_fifo_is_created(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: str
) -> None:
    held = -1
    if there == "full":
        held = open_fifo(tmp_path)
        with suppress(BlockingIOError):
            while True:
                os.write(held, b"x" * 4096)
    elif there == "no reader":
        os.mkfifo(tmp_path / FIFO_NAME)
    directory = None if there == "unknown" else str(tmp_path / "deleted" if there == "nothing" else tmp_path)
    try:
        log_lost_attempt(directory, "q", "a", AGAIN, outcome="stalled", cause="exit_1", micros=None)
    finally:
        if held >= 0:
            os.close(held)
    assert caplog.messages == ["job lost with its process (exit 1): attempt 1 of 4, retry at once queue=q job=a"]
    assert not (tmp_path / "deleted").exists()
