"""Detects whether a process still makes progress.

A service writes two words of shared memory in each pass of its loop, and the supervisor reads them. A reply on the
leash would wake the supervisor each time; these words cost nothing. They are global to the process, so that every
Redis connection in it can announce how long a call may take. In other processes they are private and unused.

AwakeTime measures how long a process has not responded, without the time in which the observer itself did not run.
"""

import mmap
import time

# Longest pass of a service's loop, unless announced.
PASS_SECONDS = 3.0
# Long, because replacing the process would not make a slow disk faster.
DISK_SECONDS = 30.0
# The resolver has timeouts of its own.
LOOKUP_SECONDS = 30.0

_PASSED, _BUSY_UNTIL = 0, 1


class Liveness:
    """The words of one service, mapped by the supervisor before the fork."""

    def __init__(self) -> None:
        self.words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    @property
    def passed_ns(self) -> int:
        """Time of the last pass of the loop; 0: none yet."""
        return self.words[_PASSED]

    @property
    def busy_until_ns(self) -> int:
        """Announced end of the current pass; 0: the loop waits for events."""
        return self.words[_BUSY_UNTIL]

    def begin(self, seconds: float) -> None:
        """Called by the supervisor before a start, with the longest first pass."""
        self.words[_PASSED] = 0
        self.words[_BUSY_UNTIL] = time.monotonic_ns() + int(seconds * 1e9)


_words: "list[int] | memoryview[int]" = [0, 0]
# Whether the supervisor reads the words of this process.
watched = False


def publish(liveness: Liveness) -> None:
    """In the service's process: writes these words from now on."""
    global _words, watched
    _words, watched = liveness.words, True


def mark_pass() -> None:
    """Called right before the loop waits."""
    _words[_BUSY_UNTIL] = 0
    _words[_PASSED] = time.monotonic_ns()


def expect_busy(seconds: float = PASS_SECONDS) -> None:
    """Announces that this process may block or be busy for this long."""
    until = time.monotonic_ns() + int(seconds * 1e9)
    if until > _words[_BUSY_UNTIL]:
        _words[_BUSY_UNTIL] = until


SLICE_SECONDS = 0.1
# A slice that ends later does not count: the machine was suspended, or this process stopped.
LATE_SECONDS = 1.0


class AwakeTime:
    """Counts time in slices. A slice that ends much too late counts nothing: the observer was stopped, suspended or
    starved, and the observed process may have been, too."""

    def __init__(self, now: float) -> None:
        self._since = now

    def restart(self, now: float) -> None:
        """Starts a slice; earlier time does not count."""
        self._since = now

    def count(self, now: float) -> float:
        """Ends the slice and starts the next. Returns the seconds that count."""
        elapsed, self._since = now - self._since, now
        return SLICE_SECONDS if 0 <= elapsed - SLICE_SECONDS / 2 < LATE_SECONDS else 0.0
