"""Notices that a process of a queue no longer answers, and ends it when that costs no job anything.

1. It is challenged when a signal has stopped it, or when pulse finds that one of its workers was given jobs that it
   does not read: a line on its leash wakes its minder, which writes its beat into the scoreboard.
2. Without an answer it is unresponsive. Its jobs that have not begun are given back by pulse, not here.
3. It is killed only while none of its workers runs a job, and only if it cannot come back by itself soon: a signal has
   stopped it or its control group is frozen, or its minder waits for an interpreter that something else keeps.
4. While a job runs in it, that job's timeout decides. A successor is started for the jobs that others gave back.

All waits count slices of the supervisor's own awake time.

Notices services that no longer pass their loop, and has them replaced.

1. Every PING_SECONDS each service that was quiet gets a ping, a line that only wakes it. It answers in shared
   memory, so that the supervisor is woken by its own timer only.
2. While an answer is missing, the time is counted in slices of the supervisor's own awake time. Slices within a call
   that the service said may take longer do not count: a Redis that hangs is no fault of pulse.
3. A service that was stopped by a signal is known to be (SIGCHLD), and gets less time.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from forq.procs.liveness import SLICE_SECONDS, AwakeTime
from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import Slot
from forq.supervisor.child import Child
from forq.supervisor.service import Service

log = logging.getLogger("forq")

NOTICE_SECONDS = 0.5
# Stopped or frozen, it does not come back by itself; otherwise its minder shows whether it waits for the interpreter: a
# thread that does wakes up some 200 times a second, one that has not been told yet not at all.
KILL_SECONDS = 1.0
WAITING_SWITCHES = 50
LONGEST_SECONDS = 10.0
# How often a process is looked at that may not be killed yet: its job runs.
PATIENT_SECONDS = 1.0


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


PING_SECONDS = 2.0
# One that has passed its loop within this time needs none.
QUIET_SECONDS = 0.5
# Unanswered for this long, it is shown as unresponsive; then it is replaced.
REPLACE_SECONDS = 1.5
STOPPED_SECONDS = 1.0


class ServiceWatch:
    def __init__(self, loop: Loop, services: Callable[[], Iterable[Service]]) -> None:
        self._loop = loop
        self._services = services
        self._awake = AwakeTime(loop.now())
        self._timer: Timer | None = None

    def start(self) -> None:
        self._plan(PING_SECONDS)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def look_soon(self) -> None:
        """A service was stopped, or goes on. A look that is due by then is not put off: one that is stopped and
        continued again and again must not keep the others from being looked at."""
        if self._timer is not None and self._timer.due > self._loop.now() + SLICE_SECONDS:
            self._timer.cancel()
            self._plan(SLICE_SECONDS)

    def tick(self) -> None:
        counted = self._awake.count(self._loop.now())
        # Not any(): each of them is looked at.
        waiting = [service for service in self._services() if self._is_unanswered(service, counted)]
        self._plan(SLICE_SECONDS if waiting else PING_SECONDS)

    def _plan(self, seconds: float) -> None:
        self._awake.restart(self._loop.now())
        self._timer = self._loop.call_later(seconds, self.tick)

    def _is_unanswered(self, service: Service, counted: float) -> bool:
        """Whether it has yet to answer a ping, one that is sent now included."""
        child = service.child
        if child is None:
            return service.unresponsive
        if service.has_passed() and not child.stopped:
            if service.unresponsive:
                log.info("service is responsive again service=%s", service.name)
            service.unresponsive, service.unanswered_seconds = False, 0.0
            return service.ping_if_quiet(QUIET_SECONDS)
        if child.resumed != service.resumed:
            # One that is throttled (cpulimit stops and continues it ten times a second) is slow, and not stuck.
            service.resumed, service.unanswered_seconds = child.resumed, 0.0
        elif child.stopped or not service.is_busy():
            service.unanswered_seconds += counted
        if service.unanswered_seconds >= NOTICE_SECONDS:
            service.unresponsive = True
        if service.unanswered_seconds >= (STOPPED_SECONDS if child.stopped else REPLACE_SECONDS):
            how = "stopped by a signal" if child.stopped else "no answer to a ping"
            log.error("service is unresponsive, replacing it service=%s pid=%s reason=%s", service.name, child.pid, how)
            service.unanswered_seconds = 0.0
            child.kill()
        return True
