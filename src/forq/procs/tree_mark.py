"""A mark on everything that runs below a queue's process, by which it is found when no living process leads to it.

As long as the supervisor lives, it adopts what its children leave behind (treekill.py). If it dies together with a
child and there are no control groups, the orphans go to init, and only their mark tells whose they are. Programs have
it in their environment; processes that were only forked have it as the name of a memory mapping. Both are inherited.

The mark is secret, and made for one state directory at one place: a copy of the directory has another.
"""

import hashlib
import mmap
import os
import signal
import time
from collections.abc import Callable

from forq.procs.treekill import children_of, descendants_of, has_ended, look_at, read_proc, self_and_ancestors

VARIABLE = "FORQ_TREE"
PAUSE_SECONDS = 0.005
QUIET_LOOKS = 2

# Kept for the life of the process: what it forks has the mapping, too.
_mappings: list[mmap.mmap] = []


class TreeMark:
    def __init__(self, secret: bytes, place: str) -> None:
        """`place`: what tells this directory from a copy of it."""
        self.value = hashlib.sha256(secret + b" " + place.encode()).hexdigest()[:32]
        self._unmarked: set[int] = set()
        self._in_environment = f"{VARIABLE}={self.value}".encode()
        self._in_maps = f"/memfd:forq-tree-{self.value} ".encode()

    def put_on(self) -> None:
        """Marks the caller, and whatever it starts from now on. It costs no memory: nobody touches the page."""
        os.environ[VARIABLE] = self.value
        try:
            fd = os.memfd_create(f"forq-tree-{self.value}", os.MFD_CLOEXEC)
        except OSError:
            # Hardened units filter this call. Then programs are marked, and what is only forked is not.
            return
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            _mappings.append(mmap.mmap(fd, mmap.PAGESIZE))
        finally:
            os.close(fd)

    def is_on(self, pid: int) -> bool:
        """False also for one that may not be looked at, and for a zombie."""
        if self._in_environment in read_proc(f"/proc/{pid}/environ").split(b"\0"):
            return True
        # To read the mappings takes long, and only what was forked from a process of ours can have that one.
        return _runs_our_program(pid) and self._in_maps in read_proc(f"/proc/{pid}/maps")

    def find(self) -> list[int]:
        """Every marked process of this machine but the caller and its ancestors."""
        ours = self_and_ancestors()
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in pids if pid not in ours and self.is_on(pid)]

    def find_escaped(self, supervisor: int | None = None) -> list[int]:
        """The marked ones among those that an ancestor of the supervisor (None: the caller), or init, has adopted:
        orphans go nowhere else. Only those are looked at that were not there the last time: a mark does not come
        later."""
        supervisor = supervisor or os.getpid()
        ours = self_and_ancestors(supervisor)
        adopted = {child for ancestor in ours | {1} if ancestor != supervisor for child in children_of(ancestor)}
        marked = [pid for pid in sorted(adopted - ours - self._unmarked) if self.is_on(pid)]
        self._unmarked = adopted - set(marked)
        return marked

    def kill(self, find: Callable[[], list[int]], deadline_seconds: float) -> tuple[set[int], set[int]]:
        """SIGKILLs what `find` finds, with all below, until it finds nothing more: who was killed, and who is left."""
        deadline = time.monotonic() + deadline_seconds
        killed: set[int] = set()
        refused: set[int] = set()
        quiet = 0
        while True:
            found = set(find()) - refused
            quiet = 0 if found else quiet + 1
            if quiet >= QUIET_LOOKS or not (found or killed or refused):
                return killed - refused, refused
            if time.monotonic() >= deadline:
                return killed - found - refused, refused | found
            for pid in found:
                self._strike(pid, killed, refused)
            if found:
                time.sleep(PAUSE_SECONDS)

    def _strike(self, pid: int, killed: set[int], refused: set[int]) -> None:
        """Pins it and all below it, then looks whether it still is what was found: never a pid used again."""
        pins: list[tuple[int, int]] = []
        try:
            pins.append((pid, os.pidfd_open(pid)))
            if not self.is_on(pid):
                return
            _pin_below(pid, pins)
            # Had it ended by now, its number might be another's, and what is below that one is not ours.
            if not has_ended(pins[0][1]):
                for pinned, pidfd in pins:
                    _kill(pinned, pidfd, killed, refused)
        except ProcessLookupError:
            return
        finally:
            for _, pidfd in pins:
                os.close(pidfd)


def _pin_below(pid: int, pins: list[tuple[int, int]]) -> None:
    parents = {pid}
    for below in descendants_of(pid):
        try:
            pidfd = os.pidfd_open(below)
        except OSError:
            # It has ended, or no descriptor is free: what is left is found by the next look.
            continue
        process = look_at(below)
        if process is not None and process.ppid in parents:
            parents.add(below)
            pins.append((below, pidfd))
        else:
            os.close(pidfd)


def _kill(pid: int, pidfd: int, killed: set[int], refused: set[int]) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        killed.add(pid)
    except ProcessLookupError:
        return
    except PermissionError:
        refused.add(pid)


def _runs_our_program(pid: int) -> bool:
    """Also if it was replaced on the disk since, by an upgrade."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    return program.endswith(" (deleted)") or program == os.readlink("/proc/self/exe")
