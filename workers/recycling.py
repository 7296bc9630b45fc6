"""Decides when a queue's process is replaced: after a number of jobs, at an age, or above a memory limit.

Checked between jobs only: recycling never cuts a job short.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from forq.procs.cgroups import pss_bytes
from forq.procs.scoreboard import Slot
from forq.procs.treekill import descendants_of
from forq.settings import Value
from forq.workers.exec_handlers import running_programs


class Recycling:
    """Shared by the workers of one process. Calls `request_replacement` once, with the reason; that stops them all."""

    def __init__(
        self,
        options: Mapping[str, Value],
        slots: Sequence[Slot],
        request_replacement: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_jobs = int(options.get("max_jobs", 0))
        self._max_age_seconds = float(options.get("max_age", 0))
        self._max_memory = int(options.get("max_memory", 0))
        self._slots = slots
        self._request_replacement = request_replacement
        self._now = now
        self._started = now()
        self._requested = False

    def claimable(self, want: int, unsettled: int) -> int:
        """How many of `want` jobs a worker may claim. `unsettled`: jobs it ran that its slot does not count yet."""
        if not self._max_jobs:
            return want
        left = self._max_jobs - unsettled - sum(slot.done for slot in self._slots)
        if left <= 0:
            self._request(f"max_jobs = {self._max_jobs}")
            return 0
        # Several workers claim at the same time: each takes only its share.
        return min(want, max(1, left // len(self._slots)))

    def check(self) -> None:
        """Called by the minder about once a second while jobs run."""
        if self._max_age_seconds and self._now() - self._started > self._max_age_seconds:
            self._request(f"max_age = {self._max_age_seconds:g}s")
        if self._max_memory and (memory := pss_bytes() + programs_memory_bytes()) > self._max_memory:
            self._request(f"max_memory = {self._max_memory}, used {memory}")

    def _request(self, reason: str) -> None:
        if not self._requested:
            self._requested = True
            self._request_replacement(reason)


def programs_memory_bytes() -> int:
    """Memory of the programs of exec handlers and their descendants."""
    programs = running_programs()
    return sum(pss_bytes(pid) for program in programs for pid in (program, *descendants_of(program)))
