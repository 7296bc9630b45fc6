"""Retry pauses that grow with each failure, up to a limit."""

import random


class Backoff:
    """Counts consecutive failures of one operation. `spread`: random part of each pause, so that clients that failed
    together do not retry together."""

    __slots__ = ("_factor", "_first_seconds", "_longest_seconds", "_rng", "_spread", "failures")

    def __init__(
        self,
        first_seconds: float,
        longest_seconds: float,
        *,
        factor: float = 2.0,
        spread: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self.failures = 0
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._factor = factor
        self._spread = spread
        self._rng = rng

    def fail(self) -> float:
        """Counts a failure and returns the pause after it in seconds."""
        self.failures += 1
        return self.pause_after(self.failures)

    def pause_after(self, failures: int) -> float:
        if failures <= 0:
            return 0.0
        # The limit is reached long before 64; without it the power would overflow.
        seconds = min(self._longest_seconds, self._first_seconds * self._factor ** min(failures - 1, 64))
        if not self._spread:
            return seconds
        return seconds * (self._rng or random).uniform(1 - self._spread, 1 + self._spread)

    def reset(self) -> None:
        self.failures = 0


def reconnecting() -> Backoff:
    """For callers that only wait for Redis."""
    return Backoff(0.02, 1.0, factor=3.0)
