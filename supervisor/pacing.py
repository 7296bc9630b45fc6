"""When a child that died is started again. Pure: time and chance are arguments.

Lets queues start a few at a time, so that the loop answers meanwhile and the cores are not overrun.

A process is starting from its fork until it says that it is ready, or has ended; but not for longer than
LONGEST_SECONDS, so that handlers that are slow to import, or hang there, hold nobody up for long. One queue starts per
pass of the loop. Successors of processes that died do not wait here: their jobs do.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from forq.procs.backoff import Backoff
from forq.procs.loop import Loop, Timer

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0
SPREAD = 0.2
# So many deaths in a row at the first job cost no time; after that it may be the job that kills.
FREE_DEATHS = 3
# A child that lived this long has left its earlier deaths behind.
SETTLED_SECONDS = 30.0
FLAPPING_DEATHS = 5


class Respawn:
    """The deaths of one child. It is never given up: a flapping one is shown as such and tried again for ever."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._fruitless = 0
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, spread=SPREAD, chance=chance)

    def delay_after_death(self, lived_seconds: float, *, progressed: bool = False, began: bool = False) -> float:
        """How long to wait: at once if it had settled a job; a few times also if it had only begun one."""
        if progressed or lived_seconds >= SETTLED_SECONDS:
            self._fruitless = 0
            return 0.0
        self._fruitless += 1
        return self._backoff.pause_after(self._fruitless - (FREE_DEATHS if began else 0))

    @property
    def flapping(self) -> bool:
        """So many deaths in a row without a job settled in between."""
        return self._fruitless >= FLAPPING_DEATHS

    def forget(self) -> None:
        """After a restart that somebody asked for."""
        self._fruitless = 0


PER_CORE = 8
LONGEST_START_SECONDS = 0.5


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
        self._starting[process] = self._loop.call_later(LONGEST_START_SECONDS, partial(self.end, process))

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
