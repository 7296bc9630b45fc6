"""Notices services that no longer pass their loop, and has them replaced.

1. Every PING_SECONDS each service that was quiet gets a ping, a line that only wakes it. It answers in shared
   memory, so that the supervisor is woken by its own timer only.
2. While an answer is missing, the time is counted in slices of the supervisor's own awake time. Slices within a call
   that the service said may take longer do not count: a Redis that hangs is no fault of pulse.
3. A service that was stopped by a signal is known to be (SIGCHLD), and gets less time.
"""

import logging
from collections.abc import Callable, Iterable

from forq.procs.liveness import SLICE_SECONDS, AwakeTime
from forq.procs.loop import Loop, Timer
from forq.supervisor.service import Service

PING_SECONDS = 2.0
# One that has passed its loop within this time needs none.
QUIET_SECONDS = 0.5
# Unanswered for this long, it is shown as unresponsive; then it is replaced.
NOTICE_SECONDS = 0.5
REPLACE_SECONDS = 1.5
STOPPED_SECONDS = 1.0

log = logging.getLogger("forq")


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
