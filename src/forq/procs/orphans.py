"""Finds and kills orphans: processes that dead children have left behind.

While the supervisor lives, it adopts them (treekill.py): each of its children that it did not fork is an orphan
(ChildPids). If it dies together with a child and there are no control groups, init adopts them. Then only a mark shows
that they belong to forq (TreeMark).
"""

import hashlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from forq.procs.cgroups import Cgroup
from forq.procs.treekill import (
    TreeKiller,
    children_of,
    descendants_of,
    has_ended,
    read_proc,
    read_stat,
    self_and_ancestors,
)

# Memory is used only for entries that are written.
MAX_CHILDREN = 65536
FORK_PAUSE_SECONDS = 0.0005

_FORKS, _COUNT, _FIRST = 0, 1, 2


class ChildPids:
    """Pids of the supervisor's children in shared memory. The supervisor writes them; its children read.

    A new child exists before its pid can be written, and must not be taken for an orphan. So a counter
    changes before and after each fork, and a list of children is valid only if there was no fork while it was read.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Inherited by all children. The counter of forks is odd during a fork.
        self._words = memoryview(mmap.mmap(-1, 4 * (MAX_CHILDREN + _FIRST))).cast("I")
        self._places: dict[int, int] = {}

    def __contains__(self, pid: int) -> bool:
        return pid in self._places

    def owner_lives(self) -> bool:
        """Valid in the supervisor and its children."""
        return self.owner in (os.getppid(), os.getpid())

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Encloses a fork and the `add` of its pid."""
        self._words[_FORKS] += 1
        try:
            yield
        finally:
            self._words[_FORKS] += 1

    def add(self, pid: int) -> None:
        if pid in self._places:
            return
        place = len(self._places)
        if place >= MAX_CHILDREN:
            raise OSError(f"more than {MAX_CHILDREN} child processes")
        self._words[_FIRST + place] = pid
        self._words[_COUNT] = place + 1
        self._places[pid] = place

    def discard(self, pid: int) -> None:
        """Moves the last entry to its place."""
        place = self._places.pop(pid, None)
        if place is None:
            return
        last = len(self._places)
        if place != last:
            moved = self._words[_FIRST + last]
            self._words[_FIRST + place] = moved
            self._places[moved] = place
        self._words[_COUNT] = last

    def read_with(self, children: Callable[[], list[int]], deadline: float) -> tuple[list[int], frozenset[int]]:
        """The result of `children` and the pids forked by the supervisor, both of the same moment. Empty if the
        supervisor is gone, or forks constantly until the deadline (monotonic)."""
        while self.owner_lives() and time.monotonic() < deadline:
            forks = self._words[_FORKS]
            if forks % 2 == 0:
                found = children()
                own = frozenset(self._words[_FIRST : _FIRST + self._words[_COUNT]])
                if self._words[_FORKS] == forks:
                    return found, own
            time.sleep(FORK_PAUSE_SECONDS)
        return [], frozenset()


VARIABLE = "FORQ_TREE"
SCAN_PAUSE_SECONDS = 0.005
QUIET_SCANS = 2

# Kept for the life of the process, and inherited by its children.
_mappings: list[mmap.mmap] = []


class TreeMark:
    """A mark on every process below a queue's process. Programs have it in their environment, forked processes as the
    name of a memory mapping; both are inherited. It is secret, and valid for one state directory at one place."""

    def __init__(self, secret: bytes, place: str) -> None:
        """`place` distinguishes the state directory from a copy of it."""
        self.value = hashlib.sha256(secret + b" " + place.encode()).hexdigest()[:32]
        self._unmarked: set[int] = set()
        self._in_environment = f"{VARIABLE}={self.value}".encode()
        self._in_maps = f"/memfd:forq-tree-{self.value} ".encode()

    def apply(self) -> None:
        """Marks the caller and all that it starts from now on. It costs no memory, since the page is never touched."""
        os.environ[VARIABLE] = self.value
        try:
            fd = os.memfd_create(f"forq-tree-{self.value}", os.MFD_CLOEXEC)
        except OSError:
            # Hardened systemd units filter this call. Then only programs are marked, not forked processes.
            return
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            _mappings.append(mmap.mmap(fd, mmap.PAGESIZE))
        finally:
            os.close(fd)

    def marks(self, pid: int) -> bool:
        """False also for zombies and for processes that may not be inspected."""
        if self._in_environment in read_proc(f"/proc/{pid}/environ").split(b"\0"):
            return True
        # Reading the mappings is slow, and only processes forked from ours can have the mark there.
        return _runs_our_program(pid) and self._in_maps in read_proc(f"/proc/{pid}/maps")

    def find(self) -> list[int]:
        """All marked processes of this machine except the caller and its ancestors."""
        ours = self_and_ancestors()
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in pids if pid not in ours and self.marks(pid)]

    def find_escaped(self, supervisor: int | None = None) -> list[int]:
        """Marked processes that init or an ancestor of the supervisor (None: the caller) has adopted: no other
        process adopts orphans. Processes of the last call are skipped, since a mark is never added later."""
        supervisor = supervisor or os.getpid()
        ours = self_and_ancestors(supervisor)
        adopted = {child for ancestor in ours | {1} if ancestor != supervisor for child in children_of(ancestor)}
        marked = [pid for pid in sorted(adopted - ours - self._unmarked) if self.marks(pid)]
        self._unmarked = adopted - set(marked)
        return marked

    def kill(self, find: Callable[[], list[int]], deadline_seconds: float) -> tuple[set[int], set[int]]:
        """SIGKILLs all processes that `find` returns, with their descendants, until it returns none. Returns the killed
        ones and the survivors."""
        deadline = time.monotonic() + deadline_seconds
        killed: set[int] = set()
        refused: set[int] = set()
        quiet = 0
        while True:
            found = set(find()) - refused
            quiet = 0 if found else quiet + 1
            if quiet >= QUIET_SCANS or not (found or killed or refused):
                return killed - refused, refused
            if time.monotonic() >= deadline:
                return killed - found - refused, refused | found
            for pid in found:
                self._kill_with_descendants(pid, killed, refused)
            if found:
                time.sleep(SCAN_PAUSE_SECONDS)

    def _kill_with_descendants(self, pid: int, killed: set[int], refused: set[int]) -> None:
        """Pins the process and its descendants with pidfds, then checks its mark: never kills a reused pid."""
        pins: list[tuple[int, int]] = []
        try:
            pins.append((pid, os.pidfd_open(pid)))
            if not self.marks(pid):
                return
            _pin_below(pid, pins)
            # If it has ended, its pid may have been reused, with descendants that are not ours.
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
            # It has ended, or no descriptor is free: the next scan finds the rest.
            continue
        process = read_stat(below)
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
    """True also if an upgrade has replaced the program on disk."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    return program.endswith(" (deleted)") or program == os.readlink("/proc/self/exe")


ORPHANS_SECONDS = 5.0
ESCAPED_SECONDS = 1.0
# Longest duration of clean_up, if nothing can be killed and one control group is not empty.
LONGEST_SECONDS = 15.0


@dataclass(frozen=True)
class OrphanReport:
    """`zombies`: ended orphans, which only the supervisor can reap. `groups`: pids left in control groups."""

    killed: list[int] = field(default_factory=list)
    survivors: list[int] = field(default_factory=list)
    zombies: list[int] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)


def clean_up(
    own: ChildPids, survivors: Collection[int], groups: Collection[str], mark: TreeMark | None
) -> OrphanReport:
    """Kills all orphans of the supervisor with their descendants, except known `survivors`, and empties the control
    groups of dead children. Called by the supervisor or one of its children."""
    left = {group: sorted(Cgroup(group).pids()) for group in groups if not Cgroup(group).kill()}
    deadline = time.monotonic() + ORPHANS_SECONDS
    killer = _OrphanKiller(own, frozenset(survivors), deadline)
    killer.kill_all(deadline)
    killed = killer.killed - killer.survivors
    if mark is not None:
        # Normally finds nothing. The cost depends on the number of children of our ancestors.
        killed |= mark.kill(partial(mark.find_escaped, own.owner), ESCAPED_SECONDS)[0]
    for group in groups:
        Cgroup(group).remove()
    return OrphanReport(sorted(killed), sorted(killer.survivors), sorted(killer.zombies), left)


class _OrphanKiller(TreeKiller):
    """Spares children that the supervisor forks in the meantime."""

    def __init__(self, own: ChildPids, survivors: frozenset[int], deadline: float) -> None:
        super().__init__(own.owner)
        self._own = own
        self._known_survivors = survivors
        self._deadline = deadline

    def _children(self) -> list[int]:
        found, own = self._own.read_with(partial(children_of, self.root), self._deadline)
        self.spare = own | self._known_survivors
        return found
