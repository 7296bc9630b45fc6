"""The deadlines of the jobs that one process runs, read from the scoreboard: they hold also for code that keeps the
interpreter to itself and ignores every signal.

Nothing is looked at while no job runs. A worker that begins to run jobs sees in its slot whether it is guarded; if not,
it says so, and from then on there is a timer for the earliest moment at which one of its jobs may be overdue.
"""

import time
from collections.abc import Callable, Sequence

from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import Slot, State

NS_PER_MS = 1_000_000
# A job that is just beginning: its start is not written yet.
BEGINNING_NS = NS_PER_MS


class Deadlines:
    """Calls `overdue` once for each job that runs past its time, with its slot and its position word."""

    def __init__(
        self,
        loop: Loop,
        slots: Sequence[Slot],
        overdue: Callable[[Slot, int], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._loop = loop
        self._slots = slots
        self._overdue = overdue
        self._now_ns = now_ns
        self._told: dict[int, int] = {}
        self._timer: Timer | None = None

    def guard(self, number: int) -> None:
        """The worker in this slot has begun to run jobs."""
        for slot in self._slots:
            if slot.number == number:
                slot.guarded = 1
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look(self) -> None:
        self.stop()
        now = self._now_ns()
        due = [at for slot in self._slots if (at := self._next(slot, now)) is not None]
        if due:
            self._timer = self._loop.call_later(max(0, min(due) - now) / 1e9, self._look)

    def _next(self, slot: Slot, now: int) -> int | None:
        """When this slot is to be looked at again; None: when its worker says so."""
        if not slot.guarded or not self._still_busy(slot):
            return None
        allowed = slot.timeout_ms * NS_PER_MS
        running = slot.running_since_ns()
        if running is None:
            return now + (BEGINNING_NS if slot.word & 1 else allowed)
        word, started = running
        due = started + allowed + slot.lenience_ms * NS_PER_MS
        if due > now:
            return due
        if self._told.get(slot.number) != word:
            self._told[slot.number] = word
            self._overdue(slot, word)
        # It may still end by itself; the job after it is not overdue before this.
        return now + allowed

    def _still_busy(self, slot: Slot) -> bool:
        if slot.state == State.BUSY and slot.timeout_ms:
            return True
        slot.guarded = 0
        # It may have begun again before it could see that.
        if slot.state == State.BUSY and slot.timeout_ms:
            slot.guarded = 1
            return True
        return False
