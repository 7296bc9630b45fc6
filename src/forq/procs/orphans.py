"""Which processes the supervisor has started itself, for whoever kills the others among its children on its behalf.

A child that was just forked must never be taken for an orphan: it exists before its pid can be written down. So a fork
is announced before and confirmed after, and a list of children counts only if nothing was forked while it was read.

A mark on everything that runs below a queue's process, by which it is found when no living process leads to it.

As long as the supervisor lives, it adopts what its children leave behind (treekill.py). If it dies together with a
child and there are no control groups, the orphans go to init, and only their mark tells whose they are. Programs have
it in their environment; processes that were only forked have it as the name of a memory mapping. Both are inherited.

The mark is secret, and made for one state directory at one place: a copy of the directory has another.

Kills what dead children have left behind: by the warden on the supervisor's behalf, or by the supervisor itself.
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

# Mapped, and touched only as far as it is used.
MOST = 65536
FORK_PAUSE_SECONDS = 0.0005

_FORKS, _COUNT, _FIRST = 0, 1, 2


class ChildPids:
    """Made by the supervisor before its first fork. It alone adds and discards; its children read."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Shared with all that is forked. An odd number of forks: one is under way.
        self._words = memoryview(mmap.mmap(-1, 4 * (MOST + _FIRST))).cast("I")
        self._places: dict[int, int] = {}

    def __contains__(self, pid: int) -> bool:
        return pid in self._places

    def owner_lives(self) -> bool:
        """For itself and its children."""
        return self.owner in (os.getppid(), os.getpid())

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Around a fork and the `add` of its pid."""
        self._words[_FORKS] += 1
        try:
            yield
        finally:
            self._words[_FORKS] += 1

    def add(self, pid: int) -> None:
        if pid in self._places:
            return
        place = len(self._places)
        if place >= MOST:
            raise OSError(f"more than {MOST} child processes")
        self._words[_FIRST + place] = pid
        self._words[_COUNT] = place + 1
        self._places[pid] = place

    def discard(self, pid: int) -> None:
        """The last one takes its place."""
        place = self._places.pop(pid, None)
        if place is None:
            return
        last = len(self._places)
        if place != last:
            moved = self._words[_FIRST + last]
            self._words[_FIRST + place] = moved
            self._places[moved] = place
        self._words[_COUNT] = last

    def look(self, children: Callable[[], list[int]], deadline: float) -> tuple[list[int], frozenset[int]]:
        """The children that this function finds, and which pids are the supervisor's own: both of one moment. Nothing
        if the supervisor is gone, or forks all the time until the deadline (monotonic)."""
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

    def apply(self) -> None:
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

    def marks(self, pid: int) -> bool:
        """False also for one that may not be looked at, and for a zombie."""
        if self._in_environment in read_proc(f"/proc/{pid}/environ").split(b"\0"):
            return True
        # To read the mappings takes long, and only what was forked from a process of ours can have that one.
        return _runs_our_program(pid) and self._in_maps in read_proc(f"/proc/{pid}/maps")

    def find(self) -> list[int]:
        """Every marked process of this machine but the caller and its ancestors."""
        ours = self_and_ancestors()
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in pids if pid not in ours and self.marks(pid)]

    def find_escaped(self, supervisor: int | None = None) -> list[int]:
        """The marked ones among those that an ancestor of the supervisor (None: the caller), or init, has adopted:
        orphans go nowhere else. Only those are looked at that were not there the last time: a mark does not come
        later."""
        supervisor = supervisor or os.getpid()
        ours = self_and_ancestors(supervisor)
        adopted = {child for ancestor in ours | {1} if ancestor != supervisor for child in children_of(ancestor)}
        marked = [pid for pid in sorted(adopted - ours - self._unmarked) if self.marks(pid)]
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
                self._kill_with_descendants(pid, killed, refused)
            if found:
                time.sleep(SCAN_PAUSE_SECONDS)

    def _kill_with_descendants(self, pid: int, killed: set[int], refused: set[int]) -> None:
        """Pins it and all below it, then looks whether it still is what was found: never a pid used again."""
        pins: list[tuple[int, int]] = []
        try:
            pins.append((pid, os.pidfd_open(pid)))
            if not self.marks(pid):
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
    """Also if it was replaced on the disk since, by an upgrade."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    return program.endswith(" (deleted)") or program == os.readlink("/proc/self/exe")


ORPHANS_SECONDS = 5.0
ESCAPED_SECONDS = 1.0
# What all of it may take, if nothing of it can be killed and one control group was to be emptied.
LONGEST_SECONDS = 15.0


@dataclass(frozen=True)
class OrphanReport:
    """`zombies`: orphans that have ended and only the supervisor can reap. `groups`: who is left in a control group."""

    killed: list[int] = field(default_factory=list)
    survivors: list[int] = field(default_factory=list)
    zombies: list[int] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)


def clean_up(
    own: ChildPids, survivors: Collection[int], groups: Collection[str], mark: TreeMark | None
) -> OrphanReport:
    """Kills every child of the supervisor but its own and those survivors, with all below: it was left behind by a dead
    one. From the supervisor or another child of it."""
    left = {group: sorted(Cgroup(group).pids()) for group in groups if not Cgroup(group).kill()}
    deadline = time.monotonic() + ORPHANS_SECONDS
    killer = _OrphanKiller(own, frozenset(survivors), deadline)
    killer.kill_all(deadline)
    killed = killer.killed - killer.survivors
    if mark is not None:
        # None should have got out of our reach. To look costs as much as our ancestors have children.
        killed |= mark.kill(partial(mark.find_escaped, own.owner), ESCAPED_SECONDS)[0]
    for group in groups:
        Cgroup(group).remove()
    return OrphanReport(sorted(killed), sorted(killer.survivors), sorted(killer.zombies), left)


class _OrphanKiller(TreeKiller):
    """Spares processes that the supervisor forks in the meantime."""

    def __init__(self, own: ChildPids, survivors: frozenset[int], deadline: float) -> None:
        super().__init__(own.owner)
        self._own = own
        self._known_survivors = survivors
        self._deadline = deadline

    def _children(self) -> list[int]:
        found, own = self._own.look(partial(children_of, self.root), self._deadline)
        self.spare = own | self._known_survivors
        return found
