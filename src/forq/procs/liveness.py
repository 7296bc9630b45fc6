"""Whether a service still passes its loop: two words of shared memory that it writes and the supervisor reads.

A service that answers on its leash would wake the supervisor each time; these words cost nobody anything. They belong
to the process: every connection to Redis in it can say how long a call may take. In any other process they are private
and nobody reads them.

Waiting for somebody to answer, in the judge's own time.

A judge that was itself stopped, suspended or starved must not count that time against others: they had no chance to
answer either. So the wait is cut into slices, and a slice that ends much too late counts nothing.
"""

import mmap
import time

# What one pass of a service's loop may take unless it says otherwise.
PASS_SECONDS = 3.0
# A disk that is slow is waited for: another process would wait for it, too.
DISK_SECONDS = 30.0
# A host name has to be looked up first, and that has time limits of its own.
LOOKUP_SECONDS = 30.0

_PASSED, _BUSY_UNTIL = 0, 1


class Liveness:
    """The words of one service, made by the supervisor before it forks."""

    def __init__(self) -> None:
        # Mapped by the supervisor, so that all its children share it.
        self.words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    @property
    def passed_ns(self) -> int:
        """When it last came round its loop; 0: not yet."""
        return self.words[_PASSED]

    @property
    def busy_until_ns(self) -> int:
        """Until when the present pass may last, as far as the service has said; 0: it waits for something to do."""
        return self.words[_BUSY_UNTIL]

    def begin(self, seconds: float) -> None:
        """From the supervisor, before a start: what the first pass may take."""
        self.words[_PASSED] = 0
        self.words[_BUSY_UNTIL] = time.monotonic_ns() + int(seconds * 1e9)


_words: "list[int] | memoryview[int]" = [0, 0]
# Whether anybody reads the words of this process.
watched = False


def publish(liveness: Liveness) -> None:
    """In the service's process: from now on it writes these words."""
    global _words, watched
    _words, watched = liveness.words, True


def mark_pass() -> None:
    """Right before the loop waits: what was due is done."""
    _words[_BUSY_UNTIL] = 0
    _words[_PASSED] = time.monotonic_ns()


def expect_busy(seconds: float = PASS_SECONDS) -> None:
    """What comes next may block, or keep this process busy, for this long."""
    until = time.monotonic_ns() + int(seconds * 1e9)
    if until > _words[_BUSY_UNTIL]:
        _words[_BUSY_UNTIL] = until


SLICE_SECONDS = 0.1
# A slice that ends this late was not a slice: the machine slept, or all of us were stopped.
LATE_SECONDS = 1.0


class AwakeTime:
    """Counts the slices in which the judge was awake."""

    def __init__(self, now: float) -> None:
        self._since = now

    def restart(self, now: float) -> None:
        """A slice begins now; whatever came before it does not count."""
        self._since = now

    def count(self, now: float) -> float:
        """Seconds that count for the slice that ends now. The next one begins."""
        elapsed, self._since = now - self._since, now
        return SLICE_SECONDS if 0 <= elapsed - SLICE_SECONDS / 2 < LATE_SECONDS else 0.0
