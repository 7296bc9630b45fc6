"""The clock of a memory: the time that forq's scripts see. Tests move it; the time of user code does not move."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from forq.errors import UsageError
from forq.values import shown

_SECOND_US = 1_000_000


class Clock:
    """Runs with the system's clock, plus what tests have added."""

    def __init__(self) -> None:
        self._ahead_us = 0
        self._last_us = 0
        self._lock = threading.Lock()
        # May refuse that; returns a function that is called afterwards.
        self.before_going_back: Callable[[], Callable[[], None]] | None = None

    def now(self) -> datetime:
        """The time, in UTC."""
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=self._now_us())

    def tick(self, seconds: float | timedelta) -> datetime:
        """Moves the clock ahead; returns the new time. Jobs that become due run with the next `run_all`."""
        ahead = seconds if isinstance(seconds, timedelta) else timedelta(seconds=_number(seconds))
        if ahead < timedelta(0):
            raise UsageError(f"tick({shown(seconds)}) is not allowed: seconds from 0; to go back: clock.set(WHEN)")
        self._ahead_us += ahead // timedelta(microseconds=1)
        return self.now()

    def set(self, when: datetime | float) -> datetime:
        """Sets the clock to a time (a datetime with a time zone, or epoch seconds); returns it. It may go back while
        there are no jobs; schedules then start anew."""
        if isinstance(when, datetime):
            if when.tzinfo is None:
                raise UsageError(f"set({when!r}) is not allowed: a datetime needs a time zone, such as tzinfo=UTC")
            wanted_us = (when - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
        else:
            wanted_us = round(_number(when) * _SECOND_US)
        ahead_us, back = wanted_us - self._now_us(), None
        if ahead_us < 0 and self.before_going_back is not None:
            back = self.before_going_back()
        self._ahead_us += ahead_us
        if back is not None:
            back()
        return self.now()

    def _next_us(self) -> int:
        """For one command of the fake server. Grows with each call, because forq distinguishes jobs with the same id by
        their times, also if a test has frozen the system's clock."""
        with self._lock:
            now_us = self._now_us()
            if now_us <= self._last_us < now_us + _SECOND_US:
                now_us = self._last_us + 1
            self._last_us = now_us
            return now_us

    def _now_us(self) -> int:
        # Not time_ns, which libraries that freeze the time may leave alone.
        return round(time.time() * _SECOND_US) + self._ahead_us

    def __repr__(self) -> str:
        return f"<clock {self.now().isoformat(timespec='milliseconds')}>"


def _number(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise UsageError(f"{shown(given)} is not allowed: a number of seconds")
    return float(given)
