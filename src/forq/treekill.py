"""Kill a process and everything below it: daemonised grandchildren and chains that fork on and exit included.

It rests on subreapers: what a dead process leaves behind becomes a child of its nearest ancestor that called
`become_subreaper`, so nothing leaves the tree, and looking at the tree until it stays empty is enough. Each look goes
through a `Hunt`:

1. A process is pinned with a pidfd, then checked to be where it was seen, then signalled: never a pid used again.
2. Below a process is looked before it is killed, since its children move up when it dies.
3. A process group is killed at once when it belongs to the tree alone, which also ends fork bombs.
4. It is over after two looks that found nothing alive and nothing new.
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
QUIET_LOOKS = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_children_files = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def become_subreaper() -> None:
    """From now on the caller adopts the orphans among its descendants. Not inherited by fork."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(sig: int) -> None:
    """Have `sig` sent to the caller when the thread that forked it ends; the caller must check getppid afterwards."""
    _prctl(PR_SET_PDEATHSIG, sig)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc/PID/stat."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    alive: bool


def look_at(pid: int) -> Process | None:
    """None when there is no such process. A zombie is there, but not alive."""
    raw = _read(f"/proc/{pid}/stat")
    if not raw:
        return None
    fields = raw[raw.rindex(b")") + 2 :].split()
    # The first thread shows as a zombie when it has ended before the others: such a process still runs.
    dead = fields[0] in b"ZX" and int(fields[17]) <= 1
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), not dead)


def children_of(pid: int) -> list[int]:
    """Direct children, oldest first, zombies included."""
    if not _children_files:
        return [process.pid for process in _all_processes() if process.ppid == pid]
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for tid in threads for child in _read(f"/proc/{pid}/task/{tid}/children").split()]


def descendants_of(pid: int) -> list[int]:
    """Everything below pid, parents before their children, zombies included."""
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


def kill_descendants(pid: int, *, deadline_seconds: float = 5.0, spare: frozenset[int] = frozenset()) -> bool:
    """SIGKILL everything below pid, not pid itself, nor what is spared or below that. True when nothing is left."""
    _refuse_to_hunt(pid)
    return Hunt(pid, spare).kill_all(time.monotonic() + deadline_seconds)


def kill_tree(pid: int, *, deadline_seconds: float = 5.0, spare: frozenset[int] = frozenset()) -> bool:
    """SIGKILL pid and everything below it. True when nothing is left but zombies; the caller reaps pid itself.

    pid is stopped first, with its process group, so that a loop or bomb of forks in there comes to rest; its
    descendants die while it lives, since it adopts them.
    """
    _refuse_to_hunt(pid)
    if pid == os.getpid():
        raise ForqError("a process cannot kill the tree it is the root of")
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    deadline = time.monotonic() + deadline_seconds
    try:
        hunt = Hunt(pid, spare)
        hunt.signal_root_group(signal.SIGSTOP)
        _send(pidfd, signal.SIGSTOP)
        below_is_empty = hunt.kill_all(deadline)
        hunt.signal_root_group(signal.SIGKILL)
        _send(pidfd, signal.SIGKILL)
        return _wait_for_end(pidfd, deadline) and (below_is_empty or hunt.kill_leftovers(deadline))
    finally:
        os.close(pidfd)


def signal_descendants(pid: int, signum: int) -> None:
    """Each process that is below pid now gets the signal; what is started meanwhile does not."""
    parents, pidfds = {pid}, []
    try:
        for below in descendants_of(pid):
            with suppress(OSError):
                pidfds.append(os.pidfd_open(below))
                process = look_at(below)
                if process and process.ppid in parents:
                    parents.add(below)
                else:
                    os.close(pidfds.pop())
        # Only now: the first that end would leave what is below them to others.
        for pidfd in pidfds:
            _send(pidfd, signum)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def kill_orphans(registered: set[int], *, deadline_seconds: float = 5.0) -> list[int]:
    """For a subreaper: kill and reap each child of the caller that is not registered, with all below it.

    Such a child was left behind by a dead one. The caller must have registered whatever it started itself.
    """
    hunt = Hunt(os.getpid(), frozenset(registered), reap=True)
    hunt.kill_all(time.monotonic() + deadline_seconds)
    return sorted(hunt.killed)


class Hunt:
    """One attempt to kill all that is below `root`, except `spare` and what is below that."""

    def __init__(
        self,
        root: int,
        spare: frozenset[int] = frozenset(),
        *,
        reap: bool = False,
        only: Callable[[Process], bool] | None = None,
    ) -> None:
        self.root = root
        self.spare = spare
        self.killed: set[int] = set()
        self.sessions: set[int] = set()
        self._me = os.getpid()
        self._reap = reap
        self._only = only
        self._ended: set[int] = set()
        self._ended_before: set[int] = set()
        self._news = False

    def kill_all(self, deadline: float) -> bool:
        """Look and kill until it stays quiet; False when the deadline (monotonic) comes first."""
        quiet, pause_seconds = 0, 0.0
        while True:
            self._news = False
            if quiet:
                # The last look trusts nothing it remembers: a zombie's pid may have been reaped and used again.
                self._ended_before, self._ended = self._ended, set()
            alive = self._strike_children()
            quiet = 0 if alive or self._news else quiet + 1
            if quiet >= QUIET_LOOKS:
                return True
            if time.monotonic() >= deadline:
                return False
            if alive:
                time.sleep(pause_seconds)
                pause_seconds = min(LONGEST_PAUSE_SECONDS, pause_seconds * 2 or FIRST_PAUSE_SECONDS)

    def signal_root_group(self, signum: int) -> None:
        """Signal the root with its process group, in case it leads one in which nobody is spared."""
        process = look_at(self.root)
        if process and process.pgid == self.root and process.sid not in self._sessions_of(self.spare):
            _killpg(self.root, signum)

    def kill_leftovers(self, deadline: float) -> bool:
        """After the root's death: kill those of its descendants that the caller has adopted."""

        def ours(process: Process) -> bool:
            return process.pid in self.killed or process.sid in self.sessions

        return Hunt(self._me, self.spare, only=ours).kill_all(deadline)

    def _strike_children(self) -> bool:
        """One look at the whole tree; whether anything alive was in it. Newest first: those are about to fork."""
        alive = False
        for child in reversed(children_of(self.root)):
            if child in self._ended or child in self.spare or child in (self._me, 0, 1):
                continue
            alive = self._strike(child) or alive
        return alive

    def _strike(self, top: int) -> bool:
        """Pin a child of the root and all below it, then kill them from the top; whether it was alive."""
        pinned: list[tuple[int, Process]] = []
        parents = {self.root}
        waiting = [top]
        try:
            while waiting:
                pid = waiting.pop(0)
                pin = self._pin(pid, parents)
                if pin is None:
                    continue
                pinned.append(pin)
                parents.add(pid)
                waiting += [p for p in children_of(pid) if p not in parents and p not in self.spare and p != self._me]
            for pidfd, process in pinned:
                self._kill(pidfd, process)
        finally:
            for pidfd, _ in pinned:
                os.close(pidfd)
        return bool(pinned)

    def _pin(self, pid: int, parents: set[int]) -> tuple[int, Process] | None:
        """A pidfd for a live process that is still a child of one of `parents`; None for any other."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # Gone already, or no descriptor is free: then those pinned so far die now, and the next look goes on.
            self._news = True
            return None
        process = look_at(pid)
        if process and process.alive and process.ppid in parents and self._is_wanted(process):
            return pidfd, process
        os.close(pidfd)
        if process is None or process.ppid not in parents:
            self._news = True
        elif not process.alive:
            self._bury(process)
        return None

    def _is_wanted(self, process: Process) -> bool:
        return self._only is None or process.ppid != self.root or self._only(process)

    def _bury(self, zombie: Process) -> None:
        """Remember a zombie, since a long-lived chain leaves thousands; reap it when it is ours to reap."""
        if zombie.ppid != self.root:
            return
        if zombie.pid not in self._ended_before:
            self._news = True
        if self._reap:
            with suppress(ChildProcessError):
                os.waitpid(zombie.pid, os.WNOHANG)
        else:
            self._ended.add(zombie.pid)

    def _kill(self, pidfd: int, process: Process) -> None:
        self.killed.add(process.pid)
        if process.sid not in self._foreign_sessions:
            self.sessions.add(process.sid)
            _killpg(process.pgid, signal.SIGKILL)
        _send(pidfd, signal.SIGKILL)

    @cached_property
    def _foreign_sessions(self) -> set[int]:
        """Sessions with someone in them who must live. A process group never spans two sessions."""
        return self._sessions_of({self.root, *self.spare})

    def _sessions_of(self, pids: Collection[int]) -> set[int]:
        sessions = {0, 1, os.getsid(0)}
        for pid in pids:
            with suppress(ProcessLookupError):
                sessions.add(os.getsid(pid))
        return sessions


def _refuse_to_hunt(pid: int) -> None:
    if pid <= 1:
        raise ForqError(f"refusing to kill what is below pid {pid}")


def _all_processes() -> list[Process]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [process for process in map(look_at, pids) if process]


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except ProcessLookupError:
        return b""
    finally:
        os.close(fd)


def _send(pidfd: int, signum: int) -> None:
    """One that may not be signalled (it runs as another user) stays alive, and the hunt ends with False."""
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signum)


def _killpg(pgid: int, signum: int) -> None:
    if pgid > 1 and pgid != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pgid, signum)


def _wait_for_end(pidfd: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
