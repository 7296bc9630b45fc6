"""Processes of a test: which are alive, which belong to a supervisor, and checks run in a fork."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import psutil

from forq.procs.treekill import become_subreaper
from forq.supervisor.child import spawn
from tests.support.drive.wait import wait_until


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


def kill_all_at_once(processes: Collection[psutil.Process]) -> None:
    """Kills all at once, so that none can react to the death of another."""
    for process in processes:
        process.suspend()
    # On a busy machine, the other threads of a process run until the thread that got the signal is scheduled.
    wait_until(lambda: all(_has_stopped(process.pid) for process in processes), what="all threads have stopped")
    for process in processes:
        process.kill()


def _has_stopped(pid: int) -> bool:
    try:
        threads = [Path(f"/proc/{pid}/task/{thread}/stat").read_text() for thread in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return False  # one of its threads has ended
    return all(stat.rpartition(")")[2].split()[0] in "TZ" for stat in threads)


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
