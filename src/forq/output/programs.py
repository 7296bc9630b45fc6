"""Reads the output of exec handlers' programs (not their messages) and logs it line by line.

1. A ProgramOutput belongs to one program. Lines are logged with the id of its current job. Only the last few lines are
   kept; they become part of an error.
2. One thread (PIPE_WATCHER) reads for all programs of the process, so no program waits for its reader. A flood is read,
   counted and dropped.
"""

import logging
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from forq.output.streams import write_program_line

# The size of a pipe: one read empties it.
READ_BYTES = 65536
MAX_LINE_BYTES = 2000
TAIL_LINES = 10
# Lines logged at once, and then per second.
BURST_LINES = 1000
LINES_PER_SECOND = 100

_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")

log = logging.getLogger("forq")


class ProgramOutput:
    """Owns the pipe. Called by its worker's thread and by the pipe watcher."""

    def __init__(
        self, pipe: IO[bytes], queue: str, job_id: str | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipe = pipe
        self._fd = pipe.fileno()
        os.set_blocking(self._fd, False)
        self._queue = queue
        self._now = now
        self._lock = threading.Lock()
        self._open = True
        self._partial = b""
        self._job = job_id
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._allowance = float(BURST_LINES)
        self._counted_at = now()
        self._dropped = 0
        PIPE_WATCHER.add(self._fd, self.read)

    def begin(self, job_id: str) -> None:
        """Assigns the following lines to this job."""
        with self._lock:
            self._flush_partial()
            self._job = job_id
            self._tail.clear()

    def end(self) -> list[str]:
        """Ends the job; returns its last lines."""
        with self._lock:
            self._flush_partial()
            self._job = None
            return [_readable(line) for line in self._tail]

    def read(self) -> bool:
        """Reads once; False at end of file."""
        with self._lock:
            return self._open and self._read()

    def close(self) -> None:
        PIPE_WATCHER.remove(self._fd, self.read)
        with self._lock:
            if self._open:
                self._flush_partial()
                self._open = False
                self._pipe.close()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return True
        if chunk:
            self._take(chunk)
        return bool(chunk)

    def _flush_partial(self) -> None:
        """Logs everything written so far, for the current job."""
        if self._open:
            self._read()
        if self._partial:
            self._take(b"\n")
        if self._dropped:
            self._log_dropped()

    def _take(self, chunk: bytes) -> None:
        allowed = self._refill()
        *lines, rest = (self._partial + chunk).split(b"\n", allowed)
        if lines and self._dropped:
            self._log_dropped()
        for line in lines:
            self._write(line)
        self._allowance -= len(lines)
        self._tail.extend(line[:MAX_LINE_BYTES] for line in lines[-TAIL_LINES:])
        if b"\n" in rest:
            flood, _, rest = rest.rpartition(b"\n")
            self._dropped += flood.count(b"\n") + 1
            self._tail.extend(line[:MAX_LINE_BYTES] for line in flood.rsplit(b"\n", TAIL_LINES)[-TAIL_LINES:])
        # One byte more than is shown, so that the cut is marked.
        self._partial = rest[: MAX_LINE_BYTES + 1]

    def _refill(self) -> int:
        now = self._now()
        self._allowance = min(BURST_LINES, self._allowance + (now - self._counted_at) * LINES_PER_SECOND)
        self._counted_at = now
        return int(self._allowance)

    def _write(self, line: bytes) -> None:
        write_program_line(self._queue, self._job, _readable(line))

    def _log_dropped(self) -> None:
        log.warning("program wrote too much queue=%s job=%s lines_dropped=%s", self._queue, self._job, self._dropped)
        self._dropped = 0


def _readable(line: bytes) -> str:
    """One line of printable text."""
    cut = "…" if len(line) > MAX_LINE_BYTES else ""
    text = line[:MAX_LINE_BYTES].decode(errors="backslashreplace").removesuffix("\r")
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text) + cut


class PipeWatcher:
    """A thread that calls back when a descriptor is readable; starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], bool]] = {}
        self._epoll: select.epoll | None = None

    def add(self, fd: int, callback: Callable[[], bool]) -> None:
        """Watches until the callback returns False or `remove` is called."""
        with self._lock:
            if self._epoll is None:
                self._epoll = select.epoll()
                threading.Thread(target=self._run, args=(self._epoll,), name="programs", daemon=True).start()
            self._callbacks[fd] = callback
            self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int, callback: Callable[[], bool]) -> None:
        """Call before closing the descriptor. Does nothing if its number belongs to another callback by now."""
        with self._lock:
            if self._epoll is not None and self._callbacks.get(fd) == callback:
                del self._callbacks[fd]
                self._epoll.unregister(fd)

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for fd, _ in epoll.poll():
                callback = self._callbacks.get(fd)
                if callback is not None and not self._call(callback):
                    self.remove(fd, callback)

    def _call(self, callback: Callable[[], bool]) -> bool:
        try:
            return callback()
        except Exception:  # without this thread programs would block once their pipes are full
            log.exception("failed to read from a program")
            return False


PIPE_WATCHER = PipeWatcher()
