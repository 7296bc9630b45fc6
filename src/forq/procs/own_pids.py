"""Which processes the supervisor has started itself, for whoever kills the others among its children on its behalf.

A child that was just forked must never be taken for an orphan: it exists before its pid can be written down. So a fork
is announced before and confirmed after, and a list of children counts only if nothing was forked while it was read.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Mapped, and touched only as far as it is used.
MOST = 65536
PAUSE_SECONDS = 0.0005

_FORKS, _COUNT, _FIRST = 0, 1, 2


class OwnPids:
    """Made by the supervisor before its first fork. It alone adds and discards; its children read."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Shared with all that is forked. An odd number of forks: one is under way.
        self._words = memoryview(mmap.mmap(-1, 4 * (MOST + _FIRST))).cast("I")
        self._places: dict[int, int] = {}

    def __contains__(self, pid: int) -> bool:
        return pid in self._places

    def owner_lives(self) -> bool:
        """For itself and its children."""
        return self.owner in (os.getppid(), os.getpid())

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Around a fork and the `add` of its pid."""
        self._words[_FORKS] += 1
        try:
            yield
        finally:
            self._words[_FORKS] += 1

    def add(self, pid: int) -> None:
        if pid in self._places:
            return
        place = len(self._places)
        if place >= MOST:
            raise OSError(f"more than {MOST} child processes")
        self._words[_FIRST + place] = pid
        self._words[_COUNT] = place + 1
        self._places[pid] = place

    def discard(self, pid: int) -> None:
        """The last one takes its place."""
        place = self._places.pop(pid, None)
        if place is None:
            return
        last = len(self._places)
        if place != last:
            moved = self._words[_FIRST + last]
            self._words[_FIRST + place] = moved
            self._places[moved] = place
        self._words[_COUNT] = last

    def look(self, children: Callable[[], list[int]], deadline: float) -> tuple[list[int], frozenset[int]]:
        """The children that this function finds, and which pids are the supervisor's own: both of one moment. Nothing
        if the supervisor is gone, or forks all the time until the deadline (monotonic)."""
        while self.owner_lives() and time.monotonic() < deadline:
            forks = self._words[_FORKS]
            if forks % 2 == 0:
                found = children()
                own = frozenset(self._words[_FIRST : _FIRST + self._words[_COUNT]])
                if self._words[_FORKS] == forks:
                    return found, own
            time.sleep(PAUSE_SECONDS)
        return [], frozenset()
