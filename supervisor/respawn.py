"""When a child that died is started again. Pure: time is an argument."""

import random
from collections import deque

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 30.0
SPREAD = 0.2
# A child that lived this long has left its earlier deaths behind.
SETTLED_SECONDS = 30.0
FLAPPING_DEATHS = 10
FLAPPING_WINDOW_SECONDS = 60.0


class Respawn:
    """The deaths of one child. It is never given up: a flapping one is shown as such and tried again for ever."""

    def __init__(self, spread: random.Random | None = None) -> None:
        self._deaths: deque[float] = deque(maxlen=FLAPPING_DEATHS)
        self._fruitless = 0
        self._spread = spread or random.Random()

    def delay_after_death(self, now: float, lived_seconds: float, *, progressed: bool) -> float:
        """How long to wait. At once if it had begun a job: max_stalls bounds what a poison job can do."""
        self._deaths.append(now)
        if progressed or lived_seconds >= SETTLED_SECONDS:
            self._fruitless = 0
            return 0.0
        self._fruitless += 1
        delay = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** (self._fruitless - 1))
        return delay * self._spread.uniform(1 - SPREAD, 1 + SPREAD)

    def flapping(self, now: float) -> bool:
        """Many deaths in a short time, the last of them without a job begun."""
        full = len(self._deaths) == FLAPPING_DEATHS
        return self._fruitless > 0 and full and now - self._deaths[0] < FLAPPING_WINDOW_SECONDS

    def forget(self) -> None:
        """After a restart that somebody asked for."""
        self._deaths.clear()
        self._fruitless = 0
