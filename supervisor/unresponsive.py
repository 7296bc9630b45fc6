"""Detects unresponsive children: processes of queues (ProcessWatch) and services (ServiceWatch).

All waits are measured in slices of the supervisor's own awake time: a suspended supervisor must not blame its children.
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
# An idle process is killed after this time if it is stopped, frozen, or its minder waits for the interpreter. A thread
# that waits for the interpreter wakes about 200 times a second; one that has not received the ping never does.
KILL_SECONDS = 1.0
WAITING_SWITCHES = 50
LONGEST_SECONDS = 10.0
# Check interval for an unresponsive process that cannot be killed yet because a job runs.
RUNNING_JOB_SECONDS = 1.0


class ProcessWatch:
    """Detects that a process of a queue is unresponsive, and reports it as stuck when killing it would lose no job.

    1. Probes the process when a signal stops it, or when pulse finds that one of its workers has unread jobs: a ping
       on the leash wakes the minder, which writes its beat into the scoreboard.
    2. Without a beat the process is unresponsive (`on_unresponsive`). Pulse then rescues its unstarted jobs.
    3. `on_stuck` is called only while no job runs in it, and only if it will not recover soon: it is stopped, its
       control group is frozen, or its minder waits for an interpreter that other code blocks.
    4. While a job runs, the job's timeout decides. `replace` starts a successor for the rescued jobs.
    """

    def __init__(
        self,
        loop: Loop,
        child: Child,
        slots: Sequence[Slot],
        *,
        ping: Callable[[], None],
        on_unresponsive: Callable[[], None],
        on_stuck: Callable[[], None],
        replace: Callable[[], None],
    ) -> None:
        self.unresponsive = False
        self._loop = loop
        self._child = child
        self._slots = slots
        self._ping = ping
        self._on_unresponsive = on_unresponsive
        self._on_stuck = on_stuck
        self._replace = replace
        self._awake = AwakeTime(loop.now())
        self._timer: Timer | None = None
        self._probed_ns = 0
        self._waited = 0.0
        self._switches = 0
        self._unread = False

    def probe(self, *, unread: bool = False) -> None:
        """Checks whether the process still responds. `unread`: one of its workers has jobs that it does not read."""
        if self._child.ended:
            return
        self._unread |= unread
        if self._timer is not None:
            return
        self._probed_ns = time.monotonic_ns()
        self._waited, self._switches = 0.0, self._minder_switches()
        self._ping()
        self._schedule_tick()

    def stopped_or_continued(self) -> None:
        if not self._child.stopped:
            # A throttled process (cpulimit stops and continues it ten times a second) is slow, not stuck.
            self._waited = 0.0
        self.probe()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self.unresponsive = self._unread = False

    def _schedule_tick(self, seconds: float = SLICE_SECONDS) -> None:
        self._awake.restart(self._loop.now())
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._child.ended:
            return
        if not self._child.stopped and not self._slots[0].minder:
            # Still importing handlers, which may take long: no minder answers yet.
            self.stop()
            return
        if not self._child.stopped and all(slot.beat_ns > self._probed_ns for slot in self._slots):
            if self.unresponsive:
                log.info("process is responsive again child=%s pid=%s", self._child.name, self._child.pid)
            self.stop()
            return
        self._waited += self._awake.count(self._loop.now())
        if self._waited >= NOTICE_SECONDS and not self.unresponsive:
            self._notice()
        self._schedule_tick(RUNNING_JOB_SECONDS if self.unresponsive and self._runs_job() else SLICE_SECONDS)

    def _notice(self) -> None:
        self.unresponsive = True
        reason = "stopped by a signal" if self._child.stopped else "no answer to a ping"
        log.warning("process is unresponsive child=%s pid=%s reason=%s", self._child.name, self._child.pid, reason)
        self._on_unresponsive()

    def _runs_job(self) -> bool:
        """Whether a job runs in it, which has to end first. Without one, a stuck process is reported."""
        if any(slot.position & 1 for slot in self._slots):
            if self._unread:
                self._unread = False
                self._replace()
            return True
        if self._is_stuck():
            log.warning("killing unresponsive process child=%s pid=%s", self._child.name, self._child.pid)
            self._on_stuck()
        return False

    def _is_stuck(self) -> bool:
        if self._waited < KILL_SECONDS:
            return False
        return (
            self._child.stopped
            or self._child.frozen()
            or self._minder_switches() - self._switches >= WAITING_SWITCHES
            or self._waited >= LONGEST_SECONDS
        )

    def _minder_switches(self) -> int:
        """Context switches of the minder's thread so far; 0 if unknown."""
        with suppress(OSError, ValueError):
            status = Path(f"/proc/{self._child.pid}/task/{self._slots[0].minder}/status").read_text()
            lines = (line for line in status.splitlines() if "ctxt_switches" in line)
            return sum(int(line.split()[1]) for line in lines)
        return 0


PING_SECONDS = 2.0
# A service whose loop completed a pass within this time needs no ping.
QUIET_SECONDS = 0.5
# After NOTICE_SECONDS without an answer a service is reported as unresponsive; after this time it is replaced.
REPLACE_SECONDS = 1.5
STOPPED_SECONDS = 1.0


class ServiceWatch:
    """Replaces services whose loop hangs.

    1. Every PING_SECONDS sends a ping to each quiet service. It answers in shared memory, so that answers do not wake
       the supervisor.
    2. Does not count time within a call that the service announced as long: a Redis that hangs is not pulse's fault.
    3. Gives less time to a service that a signal has stopped (known from SIGCHLD).
    """

    def __init__(self, loop: Loop, services: Callable[[], Iterable[Service]]) -> None:
        self._loop = loop
        self._services = services
        self._awake = AwakeTime(loop.now())
        self._timer: Timer | None = None

    def start(self) -> None:
        self._schedule_tick(PING_SECONDS)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def check_soon(self) -> None:
        """A service was stopped or continued. A tick that is due sooner is not postponed: a service that is stopped
        and continued again and again must not delay the check of the others."""
        if self._timer is not None and self._timer.due > self._loop.now() + SLICE_SECONDS:
            self._timer.cancel()
            self._schedule_tick(SLICE_SECONDS)

    def tick(self) -> None:
        counted = self._awake.count(self._loop.now())
        # Not any(): it would skip the services behind the first that waits.
        waiting = [service for service in self._services() if self._is_unanswered(service, counted)]
        self._schedule_tick(SLICE_SECONDS if waiting else PING_SECONDS)

    def _schedule_tick(self, seconds: float) -> None:
        self._awake.restart(self._loop.now())
        self._timer = self._loop.call_later(seconds, self.tick)

    def _is_unanswered(self, service: Service, counted: float) -> bool:
        """Whether a ping to it is unanswered, including one that is sent by this call."""
        child = service.child
        if child is None:
            return service.unresponsive
        if service.has_passed() and not child.stopped:
            if service.unresponsive:
                log.info("service is responsive again service=%s", service.name)
            service.unresponsive, service.unanswered_seconds = False, 0.0
            return service.ping_if_quiet(QUIET_SECONDS)
        if child.resumed != service.resumed:
            # A throttled service (cpulimit stops and continues it ten times a second) is slow, not stuck.
            service.resumed, service.unanswered_seconds = child.resumed, 0.0
        elif child.stopped or not service.is_busy():
            service.unanswered_seconds += counted
        if service.unanswered_seconds >= NOTICE_SECONDS:
            service.unresponsive = True
        if service.unanswered_seconds >= (STOPPED_SECONDS if child.stopped else REPLACE_SECONDS):
            reason = "stopped by a signal" if child.stopped else "no answer to a ping"
            log.error("replacing unresponsive service service=%s pid=%s reason=%s", service.name, child.pid, reason)
            service.unanswered_seconds = 0.0
            child.kill()
        return True
