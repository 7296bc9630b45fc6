"""The warden: looks at processes on the supervisor's behalf, which has no time to wait for /proc.

1. It watches what the processes of queues take of the machine, where the kernel does not keep the limits: every
   LOOK_SECONDS while jobs run, daemons below a process included; once a second while none run, for what a job has left.
2. A cheap sum comes first (RSS: shared pages count again and again); the exact one (PSS) only if that is too much.
3. One that takes too much it does not kill: it tells the supervisor, which knows what else hangs on that process.
4. When the supervisor says so, it kills a process with all below it, and what dead children have left behind. Whoever
   it kills the supervisor reaps. A request may come twice, from one that it did not answer in time: it does no harm.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from forq import exits
from forq.procs import orphans
from forq.procs.cgroups import OUT_OF_MEMORY, TOO_MANY_TASKS, Exceeded, Resources, pss_bytes
from forq.procs.context import Context
from forq.procs.liveness import expect_busy
from forq.procs.loop import service_loop
from forq.procs.treekill import descendants_of, kill_tree, signal_descendants
from forq.services.rpc import RpcServer

LOOK_SECONDS = 0.05
IDLE_LOOK_SECONDS = 1.0
# Of one CPU, for all looks together: 1 part in so many.
SHARE = 10
# It must get to look also while a queue takes every CPU. Granted to root only.
NICER = -5
# What it may take to kill a tree that does not want to end.
KILL_SECONDS = 7.0

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

log = logging.getLogger("forq")


@dataclass(frozen=True)
class Watched:
    """`key`: what the supervisor calls this process; a pid may be used again."""

    key: int
    pid: int
    slots: tuple[int, ...]
    resources: Resources


def run_warden(context: Context, leash: socket.socket) -> int:
    with suppress(PermissionError):
        os.nice(NICER)
    return Warden(context, leash).run()


class Warden:
    def __init__(self, context: Context, leash: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._scoreboard = context.scoreboard
        self._loop = service_loop()
        verbs = {"watch": self._watch, "kill": self._kill, "term": self._term, "clean_up": self._clean_up}
        self._rpc = RpcServer(self._loop, leash, verbs)
        self._own = context.child_pids
        self._tree_mark = context.tree_mark
        self._clock = clock
        self._watched: dict[int, Watched] = {}
        self._idle_look_at = 0.0
        self._pause_seconds = LOOK_SECONDS

    def run(self) -> int:
        self._loop.run(self._after_pass)
        return exits.STOPPED

    def _after_pass(self) -> float | None:
        self.tick()
        return self._pause_seconds if self._watched else None

    def tick(self) -> None:
        began = self._clock()
        idle_too = began >= self._idle_look_at
        if idle_too:
            self._idle_look_at = began + IDLE_LOOK_SECONDS
        for watched in list(self._watched.values()):
            expect_busy()
            if (idle_too or self._is_busy(watched)) and (found := look_at_tree(watched.pid, watched.resources)):
                # Once: the supervisor ends it.
                del self._watched[watched.key]
                self._rpc.notify("exceeded", key=watched.key, cause=found.cause, peak=found.peak_bytes)
        self._pause_seconds = max(LOOK_SECONDS, (self._clock() - began) * (SHARE - 1))

    def _watch(self, params: dict[str, Any]) -> object:
        """Which processes there are from now on."""
        self._watched = {
            each["key"]: Watched(
                each["key"], each["pid"], tuple(each["slots"]), Resources(each["memory_bytes"], each["tasks"])
            )
            for each in params["processes"]
        }
        return {}

    def _kill(self, params: dict[str, Any]) -> object:
        expect_busy(KILL_SECONDS)
        # Of a supervisor that is dead the pid may be another's by now. A living one reaps it after our answer.
        return {"gone": self._own.owner_lives() and kill_tree(params["pid"])}

    def _term(self, params: dict[str, Any]) -> object:
        if self._own.owner_lives():
            signal_descendants(params["pid"], signal.SIGTERM)
        return {}

    def _clean_up(self, params: dict[str, Any]) -> object:
        expect_busy(orphans.LONGEST_SECONDS)
        return asdict(orphans.clean_up(self._own, params["survivors"], params["groups"], self._tree_mark))

    def _is_busy(self, watched: Watched) -> bool:
        return any(self._scoreboard.slot(number).position & 1 for number in watched.slots)


def look_at_tree(pid: int, resources: Resources) -> Exceeded | None:
    """Whether this process and all below it take more than they may."""
    pids = [pid, *descendants_of(pid)]
    tasks = resident = 0
    for each in pids:
        threads, resident_bytes = _threads_and_resident(each)
        tasks += threads
        resident += resident_bytes
    if resources.tasks and tasks > resources.tasks:
        return Exceeded(TOO_MANY_TASKS, sum(map(pss_bytes, pids[: resources.tasks])))
    if resources.memory_bytes and resident > resources.memory_bytes:
        memory = sum(map(pss_bytes, pids))
        if memory > resources.memory_bytes:
            return Exceeded(OUT_OF_MEMORY, memory)
    return None


def _threads_and_resident(pid: int) -> tuple[int, int]:
    """(0, 0) of one that is gone. A zombie is a task, as the kernel counts them."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            raw = stat.read()
    except OSError:
        return 0, 0
    fields = raw[raw.rindex(b")") + 2 :].split()
    return max(1, int(fields[17])), int(fields[21]) * _PAGE_BYTES
