"""Limits that the kernel keeps: the memory and pids controllers of cgroup v2, where they are delegated to us.

A group that hands controllers on to those below it may hold no process itself. So a `Delegation` moves the supervisor,
and with it all that it forks later, into a group beside those of its children, and moves it back at its end.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

from forq.procs.cgroup import Cgroup, Cgroups, write_file
from forq.procs.resources import OUT_OF_MEMORY, Exceeded, Resources

CONTROLLERS = ("memory", "pids")

log = logging.getLogger("forq")


class Delegation:
    """Lets the groups of children have these controllers. It undoes only what it has done itself."""

    def __init__(self, groups: Cgroups, controllers: tuple[str, ...] = CONTROLLERS) -> None:
        self._groups = groups.path
        self._own = groups.path.parent
        self._seat = groups.path.with_name(f"{groups.path.name}-supervisor")
        self._controllers = controllers
        self._switched: list[tuple[Path, str]] = []

    def begin(self) -> bool:
        """False, and nothing has changed, where it is not allowed. Call it before the first fork."""
        if not set(self._controllers) <= set(_words(self._own / "cgroup.controllers")):
            return False
        try:
            self._seat.mkdir(mode=0o755, exist_ok=True)
            Cgroup(self._seat).join(os.getpid())
            # Refused while others than the supervisor are in our group: the shell that started it, say.
            for group in (self._own, self._groups):
                self._switch_on(group)
        except OSError as exc:
            log.info("the kernel cannot keep limits of queues, they are watched group=%s error=%s", self._own, exc)
            self.end()
            return False
        return True

    def end(self) -> None:
        """Best effort: what is left does no harm, and systemd clears it away."""
        while self._switched:
            group, controller = self._switched.pop()
            with suppress(OSError):
                write_file(str(group / "cgroup.subtree_control"), f"-{controller}")
        if self._seat.exists():
            with suppress(OSError):
                Cgroup(self._own).join(os.getpid())
                self._seat.rmdir()

    def _switch_on(self, group: Path) -> None:
        control = group / "cgroup.subtree_control"
        for controller in self._controllers:
            if controller not in _words(control):
                write_file(str(control), f"+{controller}")
                self._switched.append((group, controller))


def limit(group: Cgroup, resources: Resources) -> bool:
    """Whether the kernel keeps these limits from now on. Past the memory everything in the group is killed at once."""
    if not _has(group, resources):
        return False
    try:
        if resources.memory_bytes:
            write_file(str(group.path / "memory.max"), str(resources.memory_bytes))
            write_file(str(group.path / "memory.oom.group"), "1")
            # Else what does not fit is swapped, and slows down everybody. Not there where swap is not counted.
            with suppress(FileNotFoundError):
                write_file(str(group.path / "memory.swap.max"), "0")
        if resources.tasks:
            write_file(str(group.path / "pids.max"), str(resources.tasks))
    except OSError as exc:
        log.warning("the kernel does not take the limits, they are watched group=%s error=%s", group.path, exc)
        return False
    return True


def exceeded(group: Cgroup) -> Exceeded | None:
    """Whether the kernel has killed what was in the group because of its memory. Ask before the group is removed."""
    counters = _words(group.path / "memory.events")
    kills = dict(zip(counters[::2], counters[1::2], strict=False)).get("oom_kill", "0")
    if kills == "0":
        return None
    peak = _words(group.path / "memory.peak")
    return Exceeded(OUT_OF_MEMORY, int(peak[0]) if peak else None)


def _has(group: Cgroup, resources: Resources) -> bool:
    files = [("memory.max", resources.memory_bytes), ("pids.max", resources.tasks)]
    return bool(resources) and all((group.path / name).exists() for name, wanted in files if wanted)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
