"""Control groups: the fast way to kill a whole tree, where the kernel and the permissions allow it.

A child joins a cgroup of its own before it does anything else; everything it ever starts is in there, daemonised or
not, and one write to `cgroup.kill` ends it all. No controller is enabled, so the "no internal processes" rule does not
apply.
"""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.001


class Cgroup:
    """One child's control group: a directory."""

    def __init__(self, path: Path | str) -> None:
        # Plain texts: one is made for each child, between two forks.
        self._directory = str(path)
        self.procs = f"{path}/cgroup.procs"

    @property
    def path(self) -> Path:
        return Path(self._directory)

    def join(self, pid: int = 0) -> None:
        """Move a process into this group; 0 is the caller itself."""
        write_file(self.procs, str(pid))

    def populated(self) -> bool:
        """Whether a process that is not a zombie is left in the group or below it."""
        return self._has_event("populated 1")

    def frozen(self) -> bool:
        """Whether everything in it is frozen, by itself or with a group above it."""
        return self._has_event("frozen 1")

    def _has_event(self, event: str) -> bool:
        try:
            return event in (self.path / "cgroup.events").read_text().splitlines()
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENODEV):
                return False
            raise

    def pids(self) -> set[int]:
        """Who is in the group or below it."""
        found: set[int] = set()
        for directory, _, _ in os.walk(self._directory):
            with suppress(OSError):
                found.update(map(int, Path(directory, "cgroup.procs").read_text().split()))
        return found

    def kill(self, deadline_seconds: float = 5.0) -> bool:
        """SIGKILL everything in the group; True when it is empty."""
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
        """Remove the directory, with those a job may have made inside it; False while processes are left in it.

        The kernel refuses with EBUSY for a moment after the last exit, until the dead are taken off its list.
        """
        return _remove_tree(self.path, time.monotonic() + deadline_seconds)


class Cgroups:
    """The directory that holds the children's groups."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory = str(path)

    @classmethod
    def find(cls, name: str, *, mounts: str = "/proc/mounts", own: str = "/proc/self/cgroup") -> "Cgroups | None":
        """The directory `name` below our own cgroup; None where that is not permitted or cgroup.kill is missing."""
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


def _cgroup2_mount(mounts: str) -> Path | None:
    """Where cgroup2 is mounted: /sys/fs/cgroup, or /sys/fs/cgroup/unified on hybrid systems."""
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
    """Moving a process needs write access to cgroup.procs of the common ancestor, which is our own group."""
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
    """Never makes the file: the kernel has it, or what it stands for is not there."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
