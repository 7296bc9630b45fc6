"""Captures stdout, stderr and logging in a queue's process.

`install` runs right after the fork: the FIFO becomes descriptor 1 and 2, and sys.stdout, sys.stderr and the root logger
write lines tagged with their job. In a process without it the functions here do nothing.
"""

import io
import logging
import os
import sys
import threading
from collections.abc import Sequence

from forq.output.format import open_fifo
from forq.output.writer import CURRENT_JOB, OutputWriter
from forq.procs.scoreboard import Slot

log = logging.getLogger("forq")

_MESSAGE_ONLY = logging.Formatter("%(message)s")


class CapturedStream(io.TextIOBase):
    """Replaces sys.stdout or sys.stderr. Subprocesses inherit `fileno`."""

    errors = "backslashreplace"
    line_buffering = True

    def __init__(self, output: OutputWriter, stream: str, fd: int) -> None:
        self._output = output
        self._stream = stream
        self._fd = fd
        self.buffer = _CapturedBuffer(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def name(self) -> str:
        return f"<{self._stream}>"

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        self._output.flush(self._stream)

    def close(self) -> None:
        """Does not close: the next job prints, too."""
        self.flush()

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def reconfigure(self, **settings: object) -> None:
        """Accepted for compatibility, without effect."""


class _CapturedBuffer(io.RawIOBase):
    """sys.stdout.buffer."""

    def __init__(self, writer: CapturedStream) -> None:
        self._writer = writer

    def write(self, data: object) -> int:
        text = bytes(data).decode(errors="backslashreplace")  # type: ignore[call-overload]
        self._writer.write(text)
        return memoryview(data).nbytes  # type: ignore[arg-type]

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self.flush()

    def fileno(self) -> int:
        return self._writer.fileno()

    def writable(self) -> bool:
        return True


class CaptureHandler(logging.Handler):
    def __init__(self, output: OutputWriter) -> None:
        super().__init__()
        self._output = output
        # The default formatter would repeat level and logger.
        self.setFormatter(_MESSAGE_ONLY)
        self._thread = threading.local()

    def lines(self) -> int:
        """Number of lines it has written for the calling thread."""
        return getattr(self._thread, "lines", 0)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = _without_queue_and_job(self.format(record), record)
        except Exception:  # for example, arguments that do not match the message
            if _is_job_log_entry(record):
                # The job log then writes the entry without calling the exception's methods.
                raise
            self.handleError(record)
            return
        self._output.write_message("log", record.levelname, message, job=self._output.current_job(), logger=record.name)
        self._thread.lines = self.lines() + 1


def _without_queue_and_job(message: str, record: logging.LogRecord) -> str:
    """Lines of the queue's log begin with queue and job, so forq's own entries need not repeat them."""
    if not _is_job_log_entry(record):
        return message
    fields = record.__dict__
    return message.replace(f" queue={fields.get('queue')} job={fields['job_id']}", "", 1)


def _is_job_log_entry(record: logging.LogRecord) -> bool:
    """Whether workers/job_log.py made it."""
    return record.name == "forq" and "job_id" in record.__dict__


_LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}

_installed: OutputWriter | None = None
# Created before the fork, so that processes share their pages.
_prepared = OutputWriter()
_stdout = CapturedStream(_prepared, "stdout", 1)
_stderr = CapturedStream(_prepared, "stderr", 2)
_root_handler = CaptureHandler(_prepared)
# Keeps replaced objects alive: freeing them would copy shared pages.
_replaced: list[object] = []


def install(directory: str, slots: Sequence[Slot], level: str) -> None:
    """Sends all output of this process to the FIFO in `directory`. Raises ForqError."""
    global _installed
    fd = open_fifo(directory)
    blocking = open_fifo(directory, blocking=True)
    for number in (1, 2):
        os.dup2(blocking, number)
    os.close(blocking)
    _prepared.open(fd, slots)
    _installed = _prepared
    _replaced.extend((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, logging.root.handlers))
    sys.stdout = sys.__stdout__ = _stdout  # type: ignore[assignment,misc]
    sys.stderr = sys.__stderr__ = _stderr  # type: ignore[assignment,misc]
    # Not logging.basicConfig, which would close the supervisor's handler and copy its pages.
    logging.root.handlers = [_root_handler]
    if logging.root.level != _LEVELS.get(level):
        logging.root.setLevel(level.upper())
    os.register_at_fork(before=_remember_job, after_in_child=_restore_job)


_forking = threading.local()


def _remember_job() -> None:
    _forking.job = None if _installed is None else _installed.current_job()


def _restore_job() -> None:
    """In a process that a handler forked: its output still belongs to that job when the worker runs the next one."""
    CURRENT_JOB.set(_forking.job)


def finish_output() -> None:
    """Writes incomplete lines of the jobs that ended in this thread."""
    if _installed is not None and _installed.pending:
        _installed.finish_jobs()


def mark_job_end(job: str) -> None:
    if _installed is not None:
        _installed.mark_job_end(job)


def write_past_logging(level: str, job: str, text: str) -> None:
    """Writes a line of forq that `logging` did not accept."""
    if _installed is not None:
        _installed.write_message("log", level, text, job=job, logger="forq")


def count_logged_lines() -> int:
    """Number of lines that this thread has written to the queue's log through `logging`."""
    return _root_handler.lines()


def write_program_line(queue: str, job: str | None, text: str) -> None:
    """Writes a line of a program's output."""
    if _installed is not None:
        _installed.write_message("stderr", "INFO", text, job=job)
    elif job is None:
        log.info("program wrote queue=%s text=%s", queue, text)
    else:
        log.info("program wrote queue=%s job=%s text=%s", queue, job, text)
