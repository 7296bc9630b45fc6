"""Notices that a process of a queue no longer answers, and ends it when that costs no job anything.

1. It is challenged when a signal has stopped it, or when pulse finds that one of its workers was given jobs that it
   does not read: a line on its leash wakes its minder, which writes its beat into the scoreboard.
2. Without an answer it is unresponsive. Its jobs that have not begun are given back by pulse, not here.
3. It is killed only while none of its workers runs a job, and only if it cannot come back by itself soon: a signal has
   stopped it or its control group is frozen, or its minder waits for an interpreter that something else keeps.
4. While a job runs in it, that job's timeout decides. A successor is started for the jobs that others gave back.

All waits count slices of the supervisor's own awake time.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from forq.procs.liveness import SLICE_SECONDS, AwakeTime
from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import Slot
from forq.supervisor.child import Child

NOTICE_SECONDS = 0.5
# Stopped or frozen, it does not come back by itself; otherwise its minder shows whether it waits for the interpreter: a
# thread that does wakes up some 200 times a second, one that has not been told yet not at all.
KILL_SECONDS = 1.0
WAITING_SWITCHES = 50
LONGEST_SECONDS = 10.0
# How often a process is looked at that may not be killed yet: its job runs.
PATIENT_SECONDS = 1.0

log = logging.getLogger("forq")


class ProcessWatch:
    """`on_unresponsive` is called when it begins to be that, `on_hopeless` when the process may be killed, `replace`
    when jobs were given to a process that runs another job and does not answer."""

    def __init__(
        self,
        loop: Loop,
        child: Child,
        slots: Sequence[Slot],
        *,
        ping: Callable[[], None],
        on_unresponsive: Callable[[], None],
        on_hopeless: Callable[[], None],
        replace: Callable[[], None],
    ) -> None:
        self.unresponsive = False
        self._loop = loop
        self._child = child
        self._slots = slots
        self._ping = ping
        self._on_unresponsive = on_unresponsive
        self._on_hopeless = on_hopeless
        self._replace = replace
        self._awake = AwakeTime(loop.now())
        self._timer: Timer | None = None
        self._challenged_ns = 0
        self._waited = 0.0
        self._switches = 0
        self._unread = False

    def challenge(self, *, unread: bool = False) -> None:
        """Asks whether it still answers. `unread`: one of its workers does not read what it was given."""
        if self._child.ended:
            return
        self._unread |= unread
        if self._timer is not None:
            return
        self._challenged_ns = time.monotonic_ns()
        self._waited, self._switches = 0.0, self._minder_switches()
        self._ping()
        self._plan()

    def stopped_or_continued(self) -> None:
        """A signal has stopped the process, or it goes on."""
        if not self._child.stopped:
            # One that is throttled (cpulimit stops and continues it ten times a second) is slow, and not stuck.
            self._waited = 0.0
        self.challenge()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self.unresponsive = self._unread = False

    def _plan(self, seconds: float = SLICE_SECONDS) -> None:
        self._awake.restart(self._loop.now())
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._child.ended:
            return
        if not self._child.stopped and not self._slots[0].minder:
            # It is still importing its handlers, which may take as long as it likes: nobody is there to answer.
            self.stop()
            return
        if not self._child.stopped and all(slot.beat_ns > self._challenged_ns for slot in self._slots):
            if self.unresponsive:
                log.info("process is responsive again child=%s pid=%s", self._child.name, self._child.pid)
            self.stop()
            return
        self._waited += self._awake.count(self._loop.now())
        if self._waited >= NOTICE_SECONDS and not self.unresponsive:
            self._notice()
        self._plan(PATIENT_SECONDS if self.unresponsive and self._decide() else SLICE_SECONDS)

    def _notice(self) -> None:
        self.unresponsive = True
        how = "stopped by a signal" if self._child.stopped else "no answer to a ping"
        log.warning("process is unresponsive child=%s pid=%s reason=%s", self._child.name, self._child.pid, how)
        self._on_unresponsive()

    def _decide(self) -> bool:
        """Whether a job runs in it, which has to end first."""
        if any(slot.word & 1 for slot in self._slots):
            if self._unread:
                self._unread = False
                self._replace()
            return True
        if self._is_hopeless():
            log.warning("ending an unresponsive process child=%s pid=%s", self._child.name, self._child.pid)
            self._on_hopeless()
        return False

    def _is_hopeless(self) -> bool:
        if self._waited < KILL_SECONDS:
            return False
        return (
            self._child.stopped
            or self._child.frozen()
            or self._minder_switches() - self._switches >= WAITING_SWITCHES
            or self._waited >= LONGEST_SECONDS
        )

    def _minder_switches(self) -> int:
        """How often the minder's thread has waited so far; 0 if nobody can tell."""
        with suppress(OSError, ValueError):
            status = Path(f"/proc/{self._child.pid}/task/{self._slots[0].minder}/status").read_text()
            lines = (line for line in status.splitlines() if "ctxt_switches" in line)
            return sum(int(line.split()[1]) for line in lines)
        return 0
