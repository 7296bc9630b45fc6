"""Kills a process and its descendants, including daemons and chains of processes that fork and exit.

Processes cannot leave the tree: orphans become children of their nearest ancestor that called `become_subreaper`. So it
is enough to scan the tree until it stays empty. Each scan is a pass of a `TreeKiller`:

1. Pins a process with a pidfd, checks that it is still where it was found, then signals it: never a reused pid.
2. Scans the descendants of a process before killing it, since its children move up when it dies.
3. Kills a process group at once if it belongs to the tree alone, which also ends fork bombs.
4. Stops after two passes that found nothing alive and nothing new.
5. /proc may hide a process (hidepid, for processes that are not dumpable). Its parent still lists it as a child, its
   pidfd shows whether it lives, and signals reach it. Its descendants show up when it is dead.
6. Does not wait for a process that it may not signal because it runs as another user: that is a survivor.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from forq.errors import ForqError

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

FIRST_PAUSE_SECONDS = 0.0002
LONGEST_PAUSE_SECONDS = 0.005
QUIET_PASSES = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_children_files = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def become_subreaper() -> None:
    """Makes the caller adopt orphans among its descendants. Not inherited by fork."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(sig: int) -> None:
    """The kernel sends `sig` to the caller when the thread that forked it ends. Check getppid afterwards."""
    _prctl(PR_SET_PDEATHSIG, sig)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A line of /proc/PID/stat."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    alive: bool


def read_stat(pid: int) -> ProcessStat | None:
    """None if there is no such process. A zombie exists, but is not alive."""
    raw = read_proc(f"/proc/{pid}/stat")
    if not raw:
        return None
    fields = raw[raw.rindex(b")") + 2 :].split()
    # If the first thread has ended before the others, the process shows as a zombie but still runs.
    dead = fields[0] in b"ZX" and int(fields[17]) <= 1
    return ProcessStat(pid, int(fields[1]), int(fields[2]), int(fields[3]), not dead)


def children_of(pid: int) -> list[int]:
    """Direct children, oldest first, including zombies."""
    if not _children_files:
        return [process.pid for process in _all_processes() if process.ppid == pid]
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for tid in threads for child in read_proc(f"/proc/{pid}/task/{tid}/children").split()]


def descendants_of(pid: int) -> list[int]:
    """All descendants of pid, parents before their children, including zombies."""
    found: list[int] = []
    seen = {pid}
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop(0)):
            if child not in seen:
                seen.add(child)
                found.append(child)
                waiting.append(child)
    return found


def self_and_ancestors(pid: int | None = None) -> set[int]:
    """Of this process; by default of the caller."""
    found: set[int] = set()
    process = read_stat(pid or os.getpid())
    while process and process.pid not in found:
        found.add(process.pid)
        process = read_stat(process.ppid)
    return found


def kill_descendants(pid: int, *, deadline_seconds: float = 5.0, spare: frozenset[int] = frozenset()) -> bool:
    """SIGKILLs all descendants of pid except `spare` and their descendants. True if nothing is left."""
    _refuse_init(pid)
    return TreeKiller(pid, spare).kill_all(time.monotonic() + deadline_seconds)


def kill_tree(pid: int, *, deadline_seconds: float = 5.0, spare: frozenset[int] = frozenset()) -> bool:
    """SIGKILLs pid and its descendants. True if only zombies are left; the caller reaps pid.

    pid is stopped first, with its process group, so that it forks no more. Its descendants are killed while it exists,
    since it adopts their orphans.
    """
    _refuse_init(pid)
    if pid == os.getpid():
        raise ForqError("a process cannot kill the tree it is the root of")
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    deadline = time.monotonic() + deadline_seconds
    try:
        killer = TreeKiller(pid, spare)
        killer.signal_root_group(signal.SIGSTOP)
        _send(pidfd, signal.SIGSTOP)
        below_is_empty = killer.kill_all(deadline)
        killer.signal_root_group(signal.SIGKILL)
        _send(pidfd, signal.SIGKILL)
        return _wait_for_end(pidfd, deadline) and (below_is_empty or killer.kill_leftovers(deadline))
    finally:
        os.close(pidfd)


def signal_descendants(pid: int, signum: int) -> None:
    """Signals all current descendants of pid, but not processes started in the meantime."""
    parents, pidfds = {pid}, []
    try:
        for below in descendants_of(pid):
            with suppress(OSError):
                pidfds.append(os.pidfd_open(below))
                process = read_stat(below)
                if process and process.ppid in parents:
                    parents.add(below)
                else:
                    os.close(pidfds.pop())
        # Pin all before the first signal: the children of a process that ends move up.
        for pidfd in pidfds:
            _send(pidfd, signum)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


class TreeKiller:
    """Kills all descendants of `root` except `spare` and their descendants."""

    def __init__(
        self,
        root: int,
        spare: frozenset[int] = frozenset(),
        *,
        only: Callable[[ProcessStat], bool] | None = None,
    ) -> None:
        self.root = root
        self.spare = spare
        self.killed: set[int] = set()
        # Processes that may not be signalled, or were still alive at the deadline.
        self.survivors: set[int] = set()
        self.sessions: set[int] = set()
        self._own_pid = os.getpid()
        self._only = only
        self._ended: set[int] = set()
        self._ended_before: set[int] = set()
        self._found_new = False
        self._refused: set[int] = set()
        self._alive: set[int] = set()

    def kill_all(self, deadline: float) -> bool:
        """Makes passes until nothing is left. False if a process may not be killed, or the deadline (monotonic) comes
        first."""
        quiet, pause_seconds = 0, 0.0
        while True:
            self._found_new = False
            if quiet:
                # The last pass ignores remembered zombies: their pids may have been reaped and reused.
                self._ended_before, self._ended = self._ended, set()
            self._alive = set()
            alive = self._kill_pass()
            quiet = 0 if alive or self._found_new else quiet + 1
            if quiet >= QUIET_PASSES or time.monotonic() >= deadline:
                self.survivors = {pid for pid in self._alive if _is_alive(pid)}
                return not self.survivors
            if alive:
                time.sleep(pause_seconds)
                pause_seconds = min(LONGEST_PAUSE_SECONDS, pause_seconds * 2 or FIRST_PAUSE_SECONDS)

    def signal_root_group(self, signum: int) -> None:
        """Signals the process group of the root, if the root leads it and no process in it is spared."""
        with suppress(ProcessLookupError):
            leads = os.getpgid(self.root) == self.root
            if leads and os.getsid(self.root) not in self._sessions_of(self.spare):
                _killpg(self.root, signum)

    @property
    def zombies(self) -> set[int]:
        """Dead children of the root that it has not reaped."""
        return self._ended | self._ended_before

    def kill_leftovers(self, deadline: float) -> bool:
        """After the root's death: kills descendants that the caller has adopted."""

        def ours(process: ProcessStat) -> bool:
            return process.pid in self.killed or process.sid in self.sessions

        return TreeKiller(self._own_pid, self.spare, only=ours).kill_all(deadline)

    def _kill_pass(self) -> bool:
        """Scans the whole tree once. True if anything was alive. Newest first: those are about to fork."""
        alive = False
        for child in reversed(self._children()):
            if child in self._ended or child in self.spare or child in (self._own_pid, 0, 1):
                continue
            alive = self._kill_subtree(child) or alive
        return alive

    def _children(self) -> list[int]:
        return children_of(self.root)

    def _kill_subtree(self, top: int) -> bool:
        """Pins a child of the root and its descendants, then kills them from the top. True if any was alive and can be
        killed."""
        pinned: list[tuple[int, ProcessStat]] = []
        parents = {self.root}
        waiting = [(top, self.root)]
        try:
            while waiting:
                pid, parent = waiting.pop(0)
                pin = self._pin(pid, parent, parents)
                if pin is None:
                    continue
                pinned.append(pin)
                parents.add(pid)
                below = (p for p in children_of(pid) if p not in parents and p not in self.spare and p != self._own_pid)
                waiting += [(child, pid) for child in below]
            for pidfd, process in pinned:
                self._kill(pidfd, process)
        finally:
            for pidfd, _ in pinned:
                os.close(pidfd)
        return any(process.pid not in self._refused for _, process in pinned)

    def _pin(self, pid: int, parent: int, parents: set[int]) -> tuple[int, ProcessStat] | None:
        """A pidfd for a live process that is still a child of one of `parents`, else None. `parent` has listed it."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # It is gone, or no descriptor is free. Then those pinned so far are killed, and the next pass continues.
            self._found_new = True
            return None
        process = read_stat(pid) or _read_hidden_stat(pid, pidfd, parent)
        if process and process.alive and process.ppid in parents and self._is_wanted(process):
            return pidfd, process
        os.close(pidfd)
        if process is None or process.ppid not in parents:
            self._found_new = True
        elif not process.alive:
            self._note_zombie(process)
        return None

    def _is_wanted(self, process: ProcessStat) -> bool:
        return self._only is None or process.ppid != self.root or self._only(process)

    def _note_zombie(self, zombie: ProcessStat) -> None:
        """Remembers a zombie, since a chain of forks leaves thousands. The root reaps it."""
        if zombie.ppid != self.root:
            return
        if zombie.pid not in self._ended_before:
            self._found_new = True
        self._ended.add(zombie.pid)

    def _kill(self, pidfd: int, process: ProcessStat) -> None:
        self.killed.add(process.pid)
        self._alive.add(process.pid)
        if process.sid not in self._foreign_sessions:
            self.sessions.add(process.sid)
            _killpg(process.pgid, signal.SIGKILL)
        if not _send(pidfd, signal.SIGKILL):
            self._refused.add(process.pid)

    @cached_property
    def _foreign_sessions(self) -> set[int]:
        """Sessions of processes that must live. A process group never spans two sessions."""
        return self._sessions_of({self.root, *self.spare})

    def _sessions_of(self, pids: Collection[int]) -> set[int]:
        sessions = {0, 1, os.getsid(0)}
        for pid in pids:
            with suppress(ProcessLookupError):
                sessions.add(os.getsid(pid))
        return sessions


def _read_hidden_stat(pid: int, pidfd: int, parent: int) -> ProcessStat | None:
    """A child of `parent` that /proc hides, described by system calls; None if there is none.

    The list of children is read again after the process was pinned: if the pid is in it and the process still lives
    afterwards, the entry means this process.
    """
    if pid not in children_of(parent):
        return None
    if has_ended(pidfd):
        return ProcessStat(pid, parent, 0, 0, alive=False)
    try:
        found = ProcessStat(pid, parent, os.getpgid(pid), os.getsid(pid), alive=True)
    except ProcessLookupError:
        return None
    return None if has_ended(pidfd) else found


def _is_alive(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not has_ended(pidfd)
    finally:
        os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    """True also for a zombie."""
    return _wait_for_end(pidfd, time.monotonic())


def _refuse_init(pid: int) -> None:
    if pid <= 1:
        raise ForqError(f"refusing to kill the descendants of pid {pid}")


def _all_processes() -> list[ProcessStat]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [process for process in map(read_stat, pids) if process]


def read_proc(path: str) -> bytes:
    """A file of /proc; empty if it is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _send(pidfd: int, signum: int) -> bool:
    """False if the process may not be signalled: it runs as another user."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def _killpg(pgid: int, signum: int) -> None:
    if pgid > 1 and pgid != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pgid, signum)


def _wait_for_end(pidfd: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
