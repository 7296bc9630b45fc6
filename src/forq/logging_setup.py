"""Sets up `logging` in forq's processes: one format, on stderr.

1. LineFormatter formats a record with its extra fields.
2. StderrHandler never blocks: the supervisor's loop must not stop while its log is not read.
3. WarningThrottle limits warnings that a client can cause to one line per second.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from forq.log_format import LogFormat, Redaction, choose_format, iso_time
from forq.output.forwarding import Forwarder

# At exit, time for a slow reader to take the buffered lines.
CLOSE_SECONDS = 1.0
THROTTLE_SECONDS = 1.0

_QUEUE_OR_JOB = re.compile(r"(?:^|\s)(queue|job)=(\S+)")
_STANDARD_FIELDS = frozenset(
    {*logging.LogRecord("", 0, "", 0, "", None, None).__dict__, "message", "asctime", "taskName"}
)


class LineFormatter(logging.Formatter):
    def __init__(self, log_format: LogFormat, redact: Redaction | None = None) -> None:
        super().__init__("%(message)s")
        self._format = log_format
        self._redact = redact or Redaction()

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {"time": iso_time(record.created), "level": record.levelname}
        if self._format.json:
            # The first match wins: an error text later in the message may contain anything.
            fields |= dict(reversed(_QUEUE_OR_JOB.findall(record.getMessage())))
        fields |= {"pid": record.process, "logger": record.name, "message": self._redact(super().format(record))}
        return self._format.render(fields)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message, followed by its `extra` fields as key=value."""
        extra = [f"{key}={value}" for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS]
        return " ".join([super().formatMessage(record), *extra])


class WriterLoop(Protocol):
    """A loop that calls back when a descriptor is writable."""

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None: ...

    def remove_writer(self, fd: int) -> None: ...


class StderrHandler(logging.Handler):
    """Writes without blocking. Lines that cannot be written are buffered up to a limit; more are dropped and counted.
    The buffer is flushed when the loop (`attach`) finds stderr writable, or with the next record. A forked process
    starts with an empty buffer."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd
        self._forwarder = Forwarder(fd)
        self._loop: WriterLoop | None = None
        self._registered = False
        self._pid = os.getpid()
        # Forwarders of parent processes. Kept alive: their descriptor numbers are reused here and must not be closed.
        self._inherited: list[Forwarder] = []

    def attach(self, loop: WriterLoop) -> None:
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:
            # The parent's descriptors were closed after the fork, and its buffered lines are the parent's to write.
            self._inherited.append(self._forwarder)
            self._forwarder, self._loop, self._registered, self._pid = Forwarder(self._fd), None, False, os.getpid()
        try:
            self._forwarder.send(self._line(record))
            self._flush()
        except Exception:  # as logging's own handlers do
            self.handleError(record)

    def close(self) -> None:
        """Waits a moment for a slow reader."""
        if os.getpid() == self._pid:
            deadline = time.monotonic() + CLOSE_SECONDS
            while self._forwarder.waiting and (left := deadline - time.monotonic()) > 0:
                self._forwarder.wait(left)
                self._forwarder.flush()
            if self._loop is not None and self._registered:
                self._loop.remove_writer(self._forwarder.fileno())
            self._loop, self._pid = None, 0
            self._forwarder.close()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode("utf-8", "backslashreplace") + b"\n"

    def _flush(self) -> None:
        self._forwarder.flush()
        if count := self._forwarder.take_dropped():
            text = "stderr was not read; dropped log lines count=%s"
            self._forwarder.send(self._line(logging.LogRecord("forq", logging.WARNING, "", 0, text, (count,), None)))
            self._forwarder.flush()
        if self._loop is not None and self._forwarder.waiting != self._registered:
            self._registered = self._forwarder.waiting
            if self._registered:
                self._loop.add_writer(self._forwarder.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._forwarder.fileno())


class WarningThrottle:
    """Logs the first warning at once, then at most one per second with the number of warnings suppressed."""

    def __init__(self, logger: logging.Logger, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._logger = logger
        self._call_later = call_later
        self._last: str | None = None
        self._count = 0
        self._quiet = False

    def warn(self, text: str) -> None:
        if self._quiet:
            self._last, self._count = text, self._count + 1
            return
        self._logger.warning("%s", text)
        self._start_quiet()

    def _start_quiet(self) -> None:
        self._quiet = True
        self._call_later(THROTTLE_SECONDS, self._end_quiet)

    def _end_quiet(self) -> None:
        self._quiet = False
        if self._last is not None:
            self._logger.warning("%s (and %s more within %g s)", self._last, self._count - 1, THROTTLE_SECONDS)
            self._last, self._count = None, 0
            self._start_quiet()


def configure(
    setting: str = "auto", level: str = "info", redact: Sequence[str] = (), *, blocking: bool = True
) -> logging.Handler:
    """Sends all messages of this process and its children to stderr. `blocking`: wait for a slow reader; otherwise
    lines are dropped while stderr is not read (StderrHandler)."""
    log_format = choose_format(setting, 2, os.environ)
    handler = logging.StreamHandler(sys.stderr) if blocking else StderrHandler()
    handler.setFormatter(LineFormatter(log_format, Redaction(redact)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return handler
