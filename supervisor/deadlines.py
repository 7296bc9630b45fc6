"""Finds jobs that run past their timeout (Deadlines)."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import Slot, State

NS_PER_MS = 1_000_000
# Delay of the next check if a job has just started and its start time is not written yet.
BEGINNING_NS = NS_PER_MS
# In `guarded`: there is no timer yet that a worker could rely on.
NOT_CHECKED = 2**63
# Attempts to read a slot whose worker starts one job after the other.
READS = 10


class Deadlines:
    """Calls `overdue` once for each job that runs past its timeout, with its slot and position.

    Reads the scoreboard, so that deadlines also hold for code that blocks the interpreter and ignores every signal.
    Costs nothing while no job runs: a worker that starts to run jobs and finds its slot unguarded sends a message, and
    from then on there is a timer for the earliest moment at which one of its jobs may be overdue. The slot shows that
    time. A worker that starts a job with an earlier deadline sends a message, too.
    """

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
        self._reported: dict[int, int] = {}
        self._timer: Timer | None = None

    def guard(self, number: int) -> None:
        """The worker in this slot has started a job that the next check may find too late."""
        for slot in self._slots:
            if slot.number == number:
                slot.guarded = NOT_CHECKED
        self._check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _check(self) -> None:
        self.stop()
        now = self._now_ns()
        guarded = [slot for slot in self._slots if slot.guarded]
        for slot in guarded:
            # A worker that starts a job from here on sends a message, unless it finds the time of a check in time.
            slot.guarded = NOT_CHECKED
        due = [at for slot in guarded if (at := self._next(slot, now)) is not None]
        if not due:
            return
        next_ns = max(min(due), now)
        for slot in guarded:
            if slot.guarded:
                slot.guarded = next_ns
        # A worker may have started a job after its slot was read, and found the time of this check in its slot before.
        for slot in guarded:
            read = self._read(slot)
            if read is not None and read.running is not None:
                next_ns = min(next_ns, max(now, read.running[1] + read.allowed_ns))
        self._timer = self._loop.call_later((next_ns - now) / 1e9, self._check)

    def _read(self, slot: Slot) -> "_DeadlineOf | None":
        """The running job, if any, and the time that it may take; None if the worker changes jobs all the time."""
        for _ in range(READS):
            position, running = slot.position, slot.running_since_ns()
            allowed_ns = (slot.timeout_ms + slot.lenience_ms) * NS_PER_MS
            # The timeout may belong to the next job: it is written between two positions.
            if slot.position == position and (running is None or running[0] == position):
                return _DeadlineOf(running, bool(position & 1), allowed_ns)
        return None

    def _next(self, slot: Slot, now: int) -> int | None:
        """When to check this slot again; None: when its worker sends the next message."""
        if not self._still_busy(slot):
            return None
        read = self._read(slot)
        if read is None:
            return now + BEGINNING_NS
        if read.running is None:
            return now + (BEGINNING_NS if read.starting else read.allowed_ns)
        position, started = read.running
        due = started + read.allowed_ns
        if due > now:
            return due
        if self._reported.get(slot.number) != position:
            self._reported[slot.number] = position
            self._overdue(slot, position)
        # The job may still end on its own; the next one is not overdue before this.
        return now + read.allowed_ns

    def _still_busy(self, slot: Slot) -> bool:
        if slot.state == State.BUSY and slot.timeout_ms:
            return True
        slot.guarded = 0
        # The worker may have started a job before it could see that it is unguarded.
        if slot.state == State.BUSY and slot.timeout_ms:
            slot.guarded = NOT_CHECKED
            return True
        return False


class _DeadlineOf(NamedTuple):
    """Position and start of the running job; whether one is just starting; how long a job may take."""

    running: tuple[int, int] | None
    starting: bool
    allowed_ns: int
