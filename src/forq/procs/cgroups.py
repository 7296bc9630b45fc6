"""Control groups: kill a whole tree at once, and have the kernel enforce resource limits, where that is permitted.

A child joins a cgroup of its own before it does anything else. All its descendants are in there, daemons included, and
one write to `cgroup.kill` ends them.
"""

import errno
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forq.settings import Value
from forq.values import CPUS

log = logging.getLogger("forq")

POLL_SECONDS = 0.001


class Cgroup:
    """One child's control group: a directory."""

    def __init__(self, path: Path | str) -> None:
        # Plain strings: one is created for each child, between two forks.
        self._directory = str(path)
        self.procs = f"{path}/cgroup.procs"

    @property
    def path(self) -> Path:
        return Path(self._directory)

    def join(self, pid: int = 0) -> None:
        """Moves a process into this group; 0 is the caller."""
        write_file(self.procs, str(pid))

    def populated(self) -> bool:
        """Whether the group or its subgroups have processes that are not zombies."""
        return self._has_event("populated 1")

    def frozen(self) -> bool:
        """Whether the group is frozen, on its own or through a parent group."""
        return self._has_event("frozen 1")

    def _has_event(self, event: str) -> bool:
        try:
            return event in (self.path / "cgroup.events").read_text().splitlines()
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENODEV):
                return False
            raise

    def pids(self) -> set[int]:
        """Pids in the group and its subgroups."""
        found: set[int] = set()
        for directory, _, _ in os.walk(self._directory):
            with suppress(OSError):
                found.update(map(int, Path(directory, "cgroup.procs").read_text().split()))
        return found

    def kill(self, deadline_seconds: float = 5.0) -> bool:
        """SIGKILLs everything in the group. True when it is empty."""
        deadline = time.monotonic() + deadline_seconds
        try:
            write_file(str(self.path / "cgroup.kill"), "1")
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENODEV):
                raise
        while self.populated():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def remove(self, deadline_seconds: float = 1.0) -> bool:
        """Removes the directory, with those that a job may have created in it. False if processes are left in it.

        The kernel refuses with EBUSY for a moment after the last exit.
        """
        return _remove_tree(self.path, time.monotonic() + deadline_seconds)


class Cgroups:
    """The directory of the children's groups. Without limits no controller is enabled in it, so that the "no internal
    processes" rule does not apply."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory = str(path)

    @classmethod
    def find(cls, name: str, *, mounts: str = "/proc/mounts", own: str = "/proc/self/cgroup") -> "Cgroups | None":
        """The directory `name` in our own cgroup; None if that is not permitted or cgroup.kill is missing."""
        parent = _own_directory(mounts, own)
        if parent is None:
            return None
        path = parent / name
        try:
            path.mkdir(mode=0o755, exist_ok=True)
            usable = os.access(path / "cgroup.kill", os.W_OK) and os.access(path / "cgroup.procs", os.W_OK)
        except OSError:
            return None
        if not usable or not _may_move_from(parent):
            _remove_tree(path, time.monotonic())
            return None
        return cls(path)

    def add(self, child_name: str) -> Cgroup:
        path = f"{self._directory}/{child_name}"
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
        return Cgroup(path)

    def remove(self) -> bool:
        return _remove_tree(self.path, time.monotonic() + 1.0)


def _own_directory(mounts: str, own: str) -> Path | None:
    mount = _cgroup2_mount(mounts)
    if mount is None:
        return None
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::/"):
            return mount / line.removeprefix("0::/")
    return None


def process_count(options: Mapping[str, Value]) -> int:
    """How many main processes a queue with these options has on this machine."""
    wanted = options.get("processes", 1)
    return usable_cpus() if wanted == CPUS else int(wanted)


def usable_cpus(*, mounts: str = "/proc/mounts", own: str = "/proc/self/cgroup") -> int:
    """CPUs that this process may use: its affinity, and the quotas of its control group and of those above it."""
    cpus = len(os.sched_getaffinity(0))
    group = _own_directory(mounts, own)
    for directory in () if group is None else (group, *group.parents):
        # "max 100000", or a quota and a period in µs.
        quota, period, *_ = (*_words(directory / "cpu.max"), "max", "")
        if quota != "max":
            cpus = min(cpus, max(1, -(-int(quota) // int(period))))
    return cpus


def _cgroup2_mount(mounts: str) -> Path | None:
    """/sys/fs/cgroup, or /sys/fs/cgroup/unified on hybrid systems."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and fields[2] == "cgroup2":
            return Path(fields[1].replace("\\040", " "))
    return None


def _may_move_from(parent: Path) -> bool:
    """Moving a process requires write access to cgroup.procs of the common ancestor, which is our own group."""
    return os.access(parent / "cgroup.procs", os.W_OK)


def _remove_tree(path: Path, deadline: float) -> bool:
    while True:
        try:
            for below, _, _ in os.walk(path, topdown=False):
                os.rmdir(below)
            return not path.exists()
        except FileNotFoundError:
            continue
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)


def write_file(path: str, text: str) -> None:
    """Never creates the file: the kernel provides it if it has the feature."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


# Causes of an attempt that exceeded its limits.
OUT_OF_MEMORY, TOO_MANY_TASKS = "oom", "pids"


@dataclass(frozen=True)
class Resources:
    """Limits of a process with its descendants: bytes of memory, and processes plus threads. 0: no limit."""

    memory_bytes: int = 0
    tasks: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Value]) -> "Resources":
        return cls(int(options.get("memory_limit", 0)), int(options.get("pids_limit", 0)))

    def __bool__(self) -> bool:
        return bool(self.memory_bytes or self.tasks)


@dataclass(frozen=True)
class Exceeded:
    """How a process exceeded its limits: the cause, and its peak memory (None: unknown)."""

    cause: str
    peak_bytes: int | None


CONTROLLERS = ("memory", "pids")


class Delegation:
    """Enables these controllers for the groups of children, and undoes only its own changes.

    A group that enables controllers for its subgroups may hold no process itself. So the supervisor, with all that it
    forks later, moves into a group beside those of its children, and moves back at the end.
    """

    def __init__(self, groups: Cgroups, controllers: tuple[str, ...] = CONTROLLERS) -> None:
        self._groups = groups.path
        self._own = groups.path.parent
        self._supervisor_group = groups.path.with_name(f"{groups.path.name}-supervisor")
        self._controllers = controllers
        self._enabled: list[tuple[Path, str]] = []

    def begin(self) -> bool:
        """Call before the first fork. False, without any change, if it is not permitted."""
        if not set(self._controllers) <= set(_words(self._own / "cgroup.controllers")):
            return False
        try:
            self._supervisor_group.mkdir(mode=0o755, exist_ok=True)
            Cgroup(self._supervisor_group).join(os.getpid())
            # Refused while our group has other processes, such as the shell that started the supervisor.
            for group in (self._own, self._groups):
                self._enable(group)
        except OSError as exc:
            log.info("kernel cannot enforce limits; the warden checks them group=%s error=%s", self._own, exc)
            self.end()
            return False
        return True

    def end(self) -> None:
        """Best effort: leftovers do no harm, and systemd removes them."""
        while self._enabled:
            group, controller = self._enabled.pop()
            with suppress(OSError):
                write_file(str(group / "cgroup.subtree_control"), f"-{controller}")
        if self._supervisor_group.exists():
            with suppress(OSError):
                Cgroup(self._own).join(os.getpid())
                self._supervisor_group.rmdir()

    def _enable(self, group: Path) -> None:
        control = group / "cgroup.subtree_control"
        for controller in self._controllers:
            if controller not in _words(control):
                write_file(str(control), f"+{controller}")
                self._enabled.append((group, controller))


def limit(group: Cgroup, resources: Resources) -> bool:
    """True if the kernel enforces these limits from now on. Beyond the memory limit it kills the whole group."""
    if not _supports(group, resources):
        return False
    try:
        if resources.memory_bytes:
            write_file(str(group.path / "memory.max"), str(resources.memory_bytes))
            write_file(str(group.path / "memory.oom.group"), "1")
            # Otherwise the rest is swapped and slows down the machine. Missing where swap is not accounted.
            with suppress(FileNotFoundError):
                write_file(str(group.path / "memory.swap.max"), "0")
        if resources.tasks:
            write_file(str(group.path / "pids.max"), str(resources.tasks))
    except OSError as exc:
        log.warning("kernel refused limits; the warden checks them group=%s error=%s", group.path, exc)
        return False
    return True


def exceeded(group: Cgroup) -> Exceeded | None:
    """Whether the kernel has killed the group because of its memory. Call before the group is removed."""
    counters = _words(group.path / "memory.events")
    kills = dict(zip(counters[::2], counters[1::2], strict=False)).get("oom_kill", "0")
    if kills == "0":
        return None
    peak = _words(group.path / "memory.peak")
    return Exceeded(OUT_OF_MEMORY, int(peak[0]) if peak else None)


def _supports(group: Cgroup, resources: Resources) -> bool:
    files = [("memory.max", resources.memory_bytes), ("pids.max", resources.tasks)]
    return bool(resources) and all((group.path / name).exists() for name, wanted in files if wanted)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def pss_bytes(pid: int | str = "self") -> int:
    """Memory of a process in bytes; a page shared by n processes counts 1/n. 0 if unknown."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
