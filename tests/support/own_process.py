"""A process of its own for what must not meet the other children of pytest."""

import os
from collections.abc import Callable

from forq.procs.treekill import become_subreaper
from forq.supervisor.child import spawn


def in_a_process_of_its_own(check: Callable[[], None]) -> None:
    """A burial kills every child of its process that it does not know: pytest has others."""

    def run() -> int:
        become_subreaper()
        check()
        return 0

    child = spawn(run, loop=None, keep_fds=(), title="forq: test")
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 0
    child.close()
