"""Handlers that hold the GIL in a C call."""

import ctypes
import sys
import threading
import time
from typing import Any

from traced import trace, trace_file, trace_line  # type: ignore[import-not-found]

from forq import Job

# PyDLL calls functions with the GIL held.
_c = ctypes.PyDLL(None)


def hold(data: Any, job: Job) -> None:
    """Holds the GIL for data seconds, from before its trace can be seen; with 0 it only writes its trace."""
    if data:
        line = trace_line(job, "start")
        # Opening releases the GIL; the calls below do not.
        fd = trace_file()
        # The GIL is not released between these two calls, however long this thread is not scheduled there.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(3600)
        # Threads that waited before that have requested the GIL, and get it.
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
    """Returns at once; a thread that it leaves behind holds the GIL for data seconds, a moment later. Data may also be
    [moment, seconds]."""
    trace(job, "start")
    if data:
        leave_keeper(*reversed(data)) if isinstance(data, list) else leave_keeper(data)
    trace(job, "end")


def leave_keeper(seconds: float, after_seconds: float = 0.3) -> None:
    threading.Thread(target=_keep, args=(after_seconds, seconds), daemon=True).start()


def _keep(after_seconds: float, seconds: float) -> None:
    time.sleep(after_seconds)
    _c.usleep(int(seconds * 1_000_000))
