"""Processes that a queue has for a while: each runs one job at a time and ends when it finds no more.

1. For suspects: each runs alone in its process, but several of them at the same time. Up to as many processes as the
   queue has workers, and as the capacity has room for.
2. One for fail jobs, while the retry process is busy with a suspect or a job of the retry lane.

Pulse says how many jobs wait, after a recovery and with each heartbeat; nobody is remembered in between. A process that
has run something is followed by another look, since it may have ended for another reason than that nothing waits.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from forq import exits
from forq.errors import ForqError
from forq.procs.scoreboard import Role
from forq.supervisor.queue_process import Owner, QueueProcess, Surroundings
from forq.supervisor.respawn import Respawn
from forq.supervisor.spawn import Exit

log = logging.getLogger("forq")


class Helpers:
    """Those of one queue. `make` starts a process, or raises OSError or ForqError; `wanted` says whether the queue is
    served now; `gone` is called after the end of each."""

    def __init__(
        self,
        queue: str,
        around: Surroundings,
        *,
        make: Callable[[Role, Owner], QueueProcess],
        wanted: Callable[[], bool],
        gone: Callable[[], None],
    ) -> None:
        self.processes: list[QueueProcess] = []
        # What its processes had started and nobody could kill.
        self.survivors: set[int] = set()
        self._queue = queue
        self._around = around
        self._make = make
        self._wanted = wanted
        self._gone = gone
        # Starts that have been asked for and have not happened yet.
        self._asked: Counter[Role] = Counter()
        # Only deaths before a job was begun make the next start wait: a job that kills its process is counted itself.
        self._respawn = Respawn()
        self._not_before = 0.0

    def want(self, role: Role, jobs: int, *, most: int, room: int) -> None:
        """So many jobs wait for such a process. `most`: how many there may be, `room`: how many may be added."""
        if self._around.nursery.loop.now() < self._not_before:
            return
        there = [process for process in self.processes if process.role == role]
        number = min(jobs - self.about_to_claim(role), most - len(there) - self._asked[role], room)
        for _ in range(number):
            self._asked[role] += 1
            self._around.admission.ask(partial(self._start, role))

    def about_to_claim(self, role: Role) -> int:
        """How many have been asked for, are starting, or wait for capacity."""
        ready = sum(process.role == role and process.state() in ("starting", "parked") for process in self.processes)
        return self._asked[role] + ready

    def replace(self, process: QueueProcess, reason: str) -> None:
        """It takes no more jobs. What is left is found by the look that follows its end."""
        log.info("replacing process queue=%s pid=%s reason=%s", self._queue, process.pid, reason)
        process.retire()

    def may_replace(self, process: QueueProcess) -> bool:
        """Its one job keeps nobody waiting: others get processes of their own."""
        return False

    def imported(self, process: QueueProcess) -> None:
        """None of them is held."""

    def ended(self, process: QueueProcess, how: Exit) -> None:
        self.processes.remove(process)
        self.survivors |= process.child.survivors
        self._around.changed()
        done, began, code = process.done(), process.began(), process.meant(how)
        process.recover(how)
        if self._wanted():
            self._decide(process, how, code, progressed=done > 0, began=began)
        self._gone()

    def _decide(self, process: QueueProcess, how: Exit, code: int | None, *, progressed: bool, began: bool) -> None:
        if progressed:
            self._respawn.forget()
        if code == exits.QUEUE_GONE:
            self._around.queue_gone(self._queue)
        elif code == exits.FENCED:
            self._around.perhaps_evicted(self._queue)
        elif code == exits.STOPPED:
            if progressed:
                self._around.look(self._queue)
        else:
            role, delay = process.role.name.lower(), 0.0
            if not progressed and not began:
                delay = self._respawn.delay_after_death(0.0)
                self._not_before = self._around.nursery.loop.now() + delay
            log.warning("child died queue=%s child=%s end=%s again_in=%.2fs", *(self._queue, role, how.text, delay))

    def _start(self, role: Role) -> None:
        self._asked[role] -= 1
        if not self._wanted():
            return
        try:
            self.processes.append(self._make(role, self))
        except (OSError, ForqError) as exc:
            # No process, descriptor or slot to be had now; the retry process goes on, and heartbeats tell again.
            log.error("cannot start child queue=%s child=%s error=%s", self._queue, role.name.lower(), exc)
        self._around.changed()
