"""Paces the start of processes: the delay before a dead child is respawned, and how many queues start at once."""

import os
import random
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from forq.procs.backoff import Backoff
from forq.procs.loop import Loop, Timer

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 30.0
SPREAD = 0.2
# After this many deaths in a row during the first job, the job itself may be the killer: respawns are delayed.
FREE_DEATHS = 3
# A child that lived this long counts as healthy: earlier deaths are forgotten.
SETTLED_SECONDS = 30.0
FLAPPING_DEATHS = 5


class Respawn:
    """Delay before a child is respawned. Never gives up: even a flapping child is respawned."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._fruitless = 0
        self._backoff = Backoff(FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, spread=SPREAD, rng=rng)

    def delay_after_death(self, lived_seconds: float, *, progressed: bool = False, began: bool = False) -> float:
        """No delay if the child had settled a job (`progressed`); nor for the first deaths if it had begun one."""
        if progressed or lived_seconds >= SETTLED_SECONDS:
            self._fruitless = 0
            return 0.0
        self._fruitless += 1
        return self._backoff.pause_after(self._fruitless - (FREE_DEATHS if began else 0))

    @property
    def flapping(self) -> bool:
        return self._fruitless >= FLAPPING_DEATHS

    def forget(self) -> None:
        self._fruitless = 0


STARTING_PER_CORE = 8
# A handler that is slow to import, or hangs, delays other queues by no more than this.
LONGEST_START_SECONDS = 0.5


class Admission:
    """Starts queues a few at a time, so that the loop stays responsive and the cores are not overloaded.

    A process counts as starting from its fork until it is ready or has ended, at most LONGEST_START_SECONDS. One queue
    starts per pass of the loop, while fewer than `most` processes are starting. Respawns of dead processes do not wait
    here: jobs wait for them.
    """

    def __init__(self, loop: Loop, most: int = STARTING_PER_CORE * (os.cpu_count() or 1)) -> None:
        self._loop = loop
        self._most = most
        self._waiting: deque[Callable[[], None]] = deque()
        self._starting: dict[Hashable, Timer] = {}
        self._next: Timer | None = None

    def submit(self, start: Callable[[], None]) -> None:
        """Calls `start` when there is room, first come, first served; never from within this call."""
        self._waiting.append(start)
        self._admit_next_soon()

    def started(self, process: Hashable) -> None:
        """The process was forked."""
        self._starting[process] = self._loop.call_later(LONGEST_START_SECONDS, partial(self.finished, process))

    def finished(self, process: Hashable) -> None:
        """The process is ready, or has ended. Idempotent."""
        timer = self._starting.pop(process, None)
        if timer is not None:
            timer.cancel()
            self._admit_next_soon()

    def _admit_next_soon(self) -> None:
        if self._waiting and self._next is None and len(self._starting) < self._most:
            self._next = self._loop.call_later(0.0, self._admit)

    def _admit(self) -> None:
        self._next = None
        try:
            self._waiting.popleft()()
        finally:
            self._admit_next_soon()
