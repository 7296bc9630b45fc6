"""When a queue's process has served long enough and is to be replaced: after so many jobs, at some age or size.

It is looked at between jobs only, so no job is ever cut short by it.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from forq.procs.process import pss_bytes
from forq.procs.scoreboard import Slot
from forq.procs.treekill import descendants_of
from forq.settings import Value
from forq.workers.program import running_programs


class Recycling:
    """Shared by the workers of one process. `replace` is called once, with the reason: it stops them all."""

    def __init__(
        self,
        options: Mapping[str, Value],
        slots: Sequence[Slot],
        replace: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_jobs = int(options.get("max_jobs", 0))
        self._max_age_seconds = float(options.get("max_age", 0))
        self._max_memory = int(options.get("max_memory", 0))
        self._slots = slots
        self._replace = replace
        self._now = now
        self._born = now()
        self._over = False

    def room(self, want: int, unsettled: int) -> int:
        """How many of `want` jobs a worker may still claim; it has run `unsettled` ones that do not show yet."""
        if not self._max_jobs:
            return want
        left = self._max_jobs - unsettled - sum(slot.done for slot in self._slots)
        if left <= 0:
            self._end(f"max_jobs = {self._max_jobs}")
            return 0
        # Several workers claim at once: none takes what the others may take too.
        return min(want, max(1, left // len(self._slots)))

    def look(self) -> None:
        """From the minder, about once a second while jobs run."""
        if self._max_age_seconds and self._now() - self._born > self._max_age_seconds:
            self._end(f"max_age = {self._max_age_seconds:g}s")
        if self._max_memory and (memory := pss_bytes() + programs_bytes()) > self._max_memory:
            self._end(f"max_memory = {self._max_memory}, it has {memory}")

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._replace(reason)


def programs_bytes() -> int:
    """The memory of the programs of exec handlers, and of what they have started."""
    programs = running_programs()
    return sum(pss_bytes(pid) for program in programs for pid in (program, *descendants_of(program)))
