"""When a child that died is started again. Pure: time and chance are arguments."""

import random

from forq.procs.backoff import Backoff

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 30.0
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
        self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS, spread=SPREAD, chance=chance)

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
