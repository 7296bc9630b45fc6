"""Processes of a test: which are alive, which belong to a supervisor, and checks run in a fork."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from forq.procs.treekill import become_subreaper
from forq.supervisor.child import spawn


def in_a_process_of_its_own(check: Callable[[], None]) -> None:
    """Runs `check` in a fork, because treekill kills every child of its process that it does not know, and pytest has
    other children."""

    def run() -> int:
        become_subreaper()
        check()
        return 0

    child = spawn(run, loop=None, keep_fds=(), title="forq: test")
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 0
    child.close()


def alive(pids: set[int]) -> set[int]:
    """Those of these processes that still run; a zombie does not."""
    found = set()
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def tree_of(state_dir: Path) -> set[int]:
    """Every live process that the supervisor of this state directory ever forked, re-parented or not: all inherit
    the descriptor of its tree.lock."""
    wanted = str(state_dir / "tree.lock")
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                if any(_link(entry, fd) == wanted for fd in os.listdir(f"/proc/{entry}/fd")):
                    found.add(int(entry))
    return alive(found)


def _link(pid: str, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        # Closed meanwhile. Its other descriptors count anyway.
        return ""
