"""Writes the lines of a queue's process to its FIFO, each tagged with its job.

1. A line is written at once: output before a crash is not lost.
2. A flood is dropped before it is written, and counted. So are lines for which the FIFO stays full for longer than a
   moment. Printing never blocks for long and never raises.

No locks: a handler may fork, or be interrupted by a signal, anywhere in this code.
"""

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from threading import get_ident

from forq.output.format import (
    BURST,
    ELLIPSIS,
    LINE_COST,
    MAX_LOGGER,
    MAX_MESSAGE,
    RATE,
    URGENT_BURST,
    URGENT_LEVELS,
    URGENT_RATE,
    Allowance,
    Line,
    pack_line,
    pack_notice,
)
from forq.procs.scoreboard import Slot

# A write to a full FIFO waits this long. After a timeout, writes do not wait at all for NO_WAIT_SECONDS.
FULL_WAIT_SECONDS = 0.2
NO_WAIT_SECONDS = 5.0
# For this long a flood is assumed to go on: dropping a line must be quick.
FLOOD_SECONDS = 0.25
# Lines of one call share a write up to this length.
GROUP_CHARS = 900

# The job of code that runs outside its worker's thread or may outlive its job: tasks, asyncio.to_thread, forked
# processes.
CURRENT_JOB: ContextVar[str | None] = ContextVar("forq_job", default=None)


class OutputWriter:
    """`slots` of the workers of this process show which job a thread runs, so a job that prints nothing costs nothing.
    Nothing is written before `open`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._fd = -1
        self._identity = (0, 0)
        self._slots: Sequence[Slot] = ()
        self._now = now
        self._allowance = Allowance(RATE, BURST, now())
        self._urgent = Allowance(URGENT_RATE, URGENT_BURST, now())
        # Incomplete lines by thread and stream, with their job.
        self._partial: dict[tuple[int, str], tuple[str | None, str]] = {}
        self._dropped = [0, 0]
        self._no_wait_until = 0.0
        self._flooded = self._in_line = False
        self._flooded_until = 0.0

    def open(self, fd: int, slots: Sequence[Slot]) -> None:
        self._fd = fd
        self._identity = _identity(fd)
        self._slots = slots

    @property
    def pending(self) -> bool:
        """Whether `finish_jobs` has something to do."""
        return bool(self._partial) or self._dropped[0] > 0

    def write(self, stream: str, text: str) -> None:
        """Writes complete lines; the rest waits for its end."""
        if self._flooded and self._drop_in_flood(text):
            return
        job, key = self.current_job(), (get_ident(), stream)
        partial = self._partial.pop(key, None)
        if partial is not None:
            if partial[0] == job:
                text = partial[1] + text
            else:
                self._send_lines(stream, partial[0], partial[1])
        lines, newline, rest = text.rpartition("\n")
        if newline:
            self._send_lines(stream, job, lines)
        if rest:
            # One character more than is shown, so that the cut is marked.
            self._partial[key] = (job, rest[: MAX_MESSAGE + 1])

    def _drop_in_flood(self, text: str) -> bool:
        """Drops and counts `text`; False if the flood is over. It ends only after a complete line."""
        if self._now() >= self._flooded_until and not self._in_line:
            self._flooded = False
            return False
        self._in_line = not text.endswith("\n")
        self._dropped[0] += text.count("\n")
        self._dropped[1] += len(text)
        return True

    def flush(self, stream: str) -> None:
        """Writes an incomplete line; the reader joins the rest to it."""
        partial = self._partial.pop((get_ident(), stream), None)
        if partial is not None:
            self._send(self._line(stream, "INFO", partial[0], partial[1], more=True))

    def finish_jobs(self) -> None:
        """After the jobs of this thread: writes incomplete lines and reports dropped ones."""
        for stream in ("stdout", "stderr"):
            partial = self._partial.pop((get_ident(), stream), None)
            if partial is not None:
                self._send_lines(stream, partial[0], partial[1])
        if self._dropped[0]:
            self._send_dropped()

    def mark_job_end(self, job: str) -> None:
        """Marks the end of a job's raw output, if some is unread: later output belongs to the next job."""
        try:
            (unread,) = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0" * 4))
        except OSError:
            return
        if unread and len(self._slots) == 1:
            self._write(pack_notice({"end": job}))

    def write_message(
        self, stream: str, level: str, message: str, *, job: str | None, logger: str | None = None
    ) -> None:
        """Writes one message, which may have several lines."""
        if len(message) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2
            message = f"{message[:half]}\n{ELLIPSIS}\n{message[-half:]}"
        line = self._line(stream, level, job, message)
        self._send(line._replace(logger=logger and logger[:MAX_LOGGER]))

    def current_job(self) -> str | None:
        """The job of the calling task or thread. For a user's thread: the running job, if there is exactly one."""
        job = CURRENT_JOB.get()
        if job is not None:
            return job
        thread = get_ident()
        running = []
        for slot in self._slots:
            if slot.thread == thread:
                return _job_of(slot) if slot.position & 1 else None
            if slot.position & 1:
                running.append(slot)
        return _job_of(running[0]) if len(running) == 1 else None

    def _line(self, stream: str, level: str, job: str | None, text: str, *, more: bool = False) -> Line:
        return Line(stream, level, int(time.time() * 1000), os.getpid(), get_ident(), job, None, more, text)

    def _send_lines(self, stream: str, job: str | None, text: str) -> None:
        if len(text) <= GROUP_CHARS:
            self._send(self._line(stream, "INFO", job, text))
            return
        at = 0
        while at <= len(text):
            end = text.rfind("\n", at, at + GROUP_CHARS) if len(text) - at > GROUP_CHARS else len(text)
            if end < 0:
                found = text.find("\n", at)
                end = found if found >= 0 else len(text)
            part = text[at : min(end, at + MAX_MESSAGE + 1)]
            if not self._send(self._line(stream, "INFO", job, part)):
                # The rest is dropped.
                self._dropped[0] += text.count("\n", end)
                self._dropped[1] += len(text) - end
                return
            at = end + 1

    def _send(self, line: Line) -> bool:
        now, size = self._now(), len(line.text) + LINE_COST
        allowed = self._allowance.take(size + LINE_COST * line.text.count("\n"), now)
        if not allowed and line.level in URGENT_LEVELS:
            allowed = self._urgent.take(size, now)
        if not allowed:
            self._flooded, self._flooded_until = True, now + FLOOD_SECONDS
        elif self._dropped[0]:
            self._send_dropped()
        if allowed and all(self._write(data) for data in pack_line(line)):
            return True
        self._dropped[0] += line.text.count("\n") + 1
        self._dropped[1] += len(line.text)
        return False

    def _send_dropped(self) -> None:
        lines, size = self._dropped
        if self._write(pack_notice({"left_out": [lines, size]})):
            self._dropped[0] -= lines
            self._dropped[1] -= size

    def _write(self, data: bytes) -> bool:
        try:
            if _identity(self._fd) != self._identity:
                # A handler closed the descriptor, and its number may have been reused.
                return False
            os.write(self._fd, data)
        except BlockingIOError:
            return self._wait_for_room(data)
        except OSError:
            return False
        return True

    def _wait_for_room(self, data: bytes) -> bool:
        if self._now() < self._no_wait_until:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        until = self._now() + FULL_WAIT_SECONDS
        while (left := until - self._now()) > 0:
            poll.poll(left * 1000)
            try:
                os.write(self._fd, data)
            except BlockingIOError:
                # There is room, but not enough: poll would return at once every time.
                time.sleep(0.001)
            else:
                return True
        self._no_wait_until = self._now() + NO_WAIT_SECONDS
        return False


def _job_of(slot: Slot) -> str:
    return slot.job.decode(errors="replace")


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
