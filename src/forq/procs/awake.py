"""Waiting for somebody to answer, in the judge's own time.

A judge that was itself stopped, suspended or starved must not count that time against others: they had no chance to
answer either. So the wait is cut into slices, and a slice that ends much too late counts nothing.
"""

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
