"""Zombies that this process adopted as a subreaper: daemons that a handler left behind and that have ended.

They must be reaped, but never one that a handler may still wait for (its `subprocess.run` would lose the exit status).
The kernel does not tell adopted children from own ones, so only a zombie that was already there when no job was running
one look ago, and still is, is reaped: nobody waits for it. The programs of exec handlers are waited for by their own.
"""

import os
from contextlib import suppress

from forq.procs.treekill import children_of, look_at
from forq.workers.program import running_programs


class AdoptedZombies:
    def __init__(self) -> None:
        self._seen: set[int] = set()

    def look(self, *, idle: bool) -> None:
        """Call now and then; `idle` says that no handler is running."""
        if not idle:
            self._seen.clear()
            return
        zombies = _zombies() - running_programs()
        for pid in zombies & self._seen:
            with suppress(ChildProcessError):  # a thread of the handler's was quicker
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies - self._seen


def _zombies() -> set[int]:
    """Ended children, left as they are; waitid shows only one of them, so the others are found in /proc."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    children = (look_at(pid) for pid in children_of(os.getpid()))
    return {child.pid for child in children if child is not None and not child.alive}
