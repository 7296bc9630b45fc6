"""Handlers that keep the interpreter to themselves: a call into C that does not let go of it."""

import ctypes
import sys
import threading
import time
from typing import Any

from traced import trace, trace_file, trace_line  # type: ignore[import-not-found]

from forq import Job

# Functions of a PyDLL are called with the interpreter's lock held.
_c = ctypes.PyDLL(None)


def hold(data: Any, job: Job) -> None:
    """Keeps the interpreter for data seconds, from before its trace can be seen; with 0 it only leaves its trace."""
    if data:
        line = trace_line(job, "start")
        # Opened by a call that lets go of the interpreter; what follows does not.
        fd = trace_file()
        # Nor does it between these two calls, however long this thread does not run there.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(3600)
        # Whoever waited before that has asked to be let in, and is.
        time.sleep(0.01)
        _c.write(fd, line, len(line))
        until = time.monotonic() + data
        # A signal ends a sleep early.
        while (left := until - time.monotonic()) > 0:
            _c.usleep(int(left * 1_000_000))
        sys.setswitchinterval(interval)
    else:
        trace(job, "start")
    trace(job, "end")


def leave_thread(data: Any, job: Job) -> None:
    """Ends at once; a thread that it leaves behind keeps the interpreter for data seconds, a moment later. Data may
    also be that moment and the seconds."""
    trace(job, "start")
    if data:
        leave_keeper(*reversed(data)) if isinstance(data, list) else leave_keeper(data)
    trace(job, "end")


def leave_keeper(seconds: float, after_seconds: float = 0.3) -> None:
    threading.Thread(target=_keep, args=(after_seconds, seconds), daemon=True).start()


def _keep(after_seconds: float, seconds: float) -> None:
    time.sleep(after_seconds)
    _c.usleep(int(seconds * 1_000_000))
