"""Lets queues start a few at a time, so that the loop answers meanwhile and the cores are not overrun.

A process is starting from its fork until it says that it is ready, or has ended; but not for longer than
LONGEST_SECONDS, so that handlers that are slow to import, or hang there, hold nobody up for long. One queue starts per
pass of the loop. Successors of processes that died do not wait here: their jobs do.
"""

import os
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from forq.procs.loop import Loop, Timer

PER_CORE = 8
LONGEST_SECONDS = 0.5


class Admission:
    """`most`: how many processes may be starting when another queue begins to."""

    def __init__(self, loop: Loop, most: int = PER_CORE * (os.cpu_count() or 1)) -> None:
        self._loop = loop
        self._most = most
        self._line: deque[Callable[[], None]] = deque()
        self._starting: dict[Hashable, Timer] = {}
        self._next: Timer | None = None

    def ask(self, start: Callable[[], None]) -> None:
        """Calls back when there is room, first come, first served; never from within this call."""
        self._line.append(start)
        self._look()

    def begin(self, process: Hashable) -> None:
        """This process has been forked."""
        self._starting[process] = self._loop.call_later(LONGEST_SECONDS, partial(self.end, process))

    def end(self, process: Hashable) -> None:
        """It is ready, or has ended. Safe to repeat."""
        timer = self._starting.pop(process, None)
        if timer is not None:
            timer.cancel()
            self._look()

    def _look(self) -> None:
        if self._line and self._next is None and len(self._starting) < self._most:
            self._next = self._loop.call_later(0.0, self._admit)

    def _admit(self) -> None:
        self._next = None
        try:
            self._line.popleft()()
        finally:
            self._look()
