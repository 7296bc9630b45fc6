"""The warden: inspects and kills processes for the supervisor, which must not block on /proc."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from forq.errors import ExitCode
from forq.procs import orphans
from forq.procs.cgroups import OUT_OF_MEMORY, TOO_MANY_TASKS, Exceeded, Resources, pss_bytes
from forq.procs.context import Context
from forq.procs.liveness import expect_busy
from forq.procs.loop import service_loop
from forq.procs.treekill import descendants_of, kill_tree, signal_descendants
from forq.services.rpc import RpcServer

CHECK_SECONDS = 0.05
IDLE_CHECK_SECONDS = 1.0
# Checks take at most 1/10 of one CPU.
CPU_SHARE = 10
# Checks must run even while a queue uses every CPU. Only root may lower it.
NICENESS = -5
# Longest time to kill a stubborn tree.
KILL_SECONDS = 7.0

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

log = logging.getLogger("forq")


@dataclass(frozen=True)
class WatchedProcess:
    """`key`: the supervisor's id of this process, since a pid may be reused."""

    key: int
    pid: int
    slots: tuple[int, ...]
    resources: Resources


def run_warden(context: Context, leash: socket.socket) -> int:
    with suppress(PermissionError):
        os.nice(NICENESS)
    return Warden(context, leash).run()


class Warden:
    """
    1. Checks the memory and tasks of queues' processes where the kernel does not enforce the limits: every
       CHECK_SECONDS while jobs run, and once a second while none run, since a job may have left processes behind.
    2. Adds up RSS first, which is cheap and counts shared pages repeatedly; then PSS, if that exceeds the limit.
    3. Reports a process over its limit. The supervisor kills it, since it knows the jobs of that process.
    4. On request, kills a process with its descendants, and the orphans of dead children. The supervisor reaps them.
       A request may be repeated after a timeout, without harm.
    """

    def __init__(self, context: Context, leash: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._scoreboard = context.scoreboard
        self._loop = service_loop()
        verbs = {"watch": self._watch, "kill": self._kill, "term": self._term, "clean_up": self._clean_up}
        self._rpc = RpcServer(self._loop, leash, verbs)
        self._own = context.child_pids
        self._tree_mark = context.tree_mark
        self._clock = clock
        self._watched: dict[int, WatchedProcess] = {}
        self._idle_check_at = 0.0
        self._pause_seconds = CHECK_SECONDS

    def run(self) -> int:
        self._loop.run(self._after_pass)
        return ExitCode.STOPPED

    def _after_pass(self) -> float | None:
        self.tick()
        return self._pause_seconds if self._watched else None

    def tick(self) -> None:
        began = self._clock()
        idle_too = began >= self._idle_check_at
        if idle_too:
            self._idle_check_at = began + IDLE_CHECK_SECONDS
        for watched in list(self._watched.values()):
            expect_busy()
            if (idle_too or self._is_busy(watched)) and (found := check_tree(watched.pid, watched.resources)):
                # Reported once: the supervisor kills it.
                del self._watched[watched.key]
                self._rpc.notify("exceeded", key=watched.key, cause=found.cause, peak=found.peak_bytes)
        self._pause_seconds = max(CHECK_SECONDS, (self._clock() - began) * (CPU_SHARE - 1))

    def _watch(self, params: dict[str, Any]) -> object:
        """Replaces the set of watched processes."""
        self._watched = {
            each["key"]: WatchedProcess(
                each["key"], each["pid"], tuple(each["slots"]), Resources(each["memory_bytes"], each["tasks"])
            )
            for each in params["processes"]
        }
        return {}

    def _kill(self, params: dict[str, Any]) -> object:
        expect_busy(KILL_SECONDS)
        # If the supervisor is dead, the pid may have been reused. A living one reaps it after this reply.
        return {"gone": self._own.owner_lives() and kill_tree(params["pid"])}

    def _term(self, params: dict[str, Any]) -> object:
        if self._own.owner_lives():
            signal_descendants(params["pid"], signal.SIGTERM)
        return {}

    def _clean_up(self, params: dict[str, Any]) -> object:
        expect_busy(orphans.LONGEST_SECONDS)
        return asdict(orphans.clean_up(self._own, params["survivors"], params["groups"], self._tree_mark))

    def _is_busy(self, watched: WatchedProcess) -> bool:
        return any(self._scoreboard.slot(number).position & 1 for number in watched.slots)


def check_tree(pid: int, resources: Resources) -> Exceeded | None:
    """The limit that this process and its descendants exceed, if any."""
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
    """(0, 0) if it is gone. A zombie counts as a task, as in the kernel."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            raw = stat.read()
    except OSError:
        return 0, 0
    fields = raw[raw.rindex(b")") + 2 :].split()
    return max(1, int(fields[17])), int(fields[21]) * _PAGE_BYTES
