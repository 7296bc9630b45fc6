"""Handlers that hold the GIL in a C call."""

import ctypes
import os
import sys
import threading
import time
from typing import Any

from traced import trace, trace_file, trace_line  # type: ignore[import-not-found]

from forq import Job

# PyDLL calls functions with the GIL held.
_c = ctypes.PyDLL(None)


def hold(data: Any, job: Job) -> None:
    """Holds the GIL for data seconds; with 0 it only writes its trace."""
    if data:
        line = trace_line(job, "start")
        # Opening releases the GIL; the calls below do not.
        fd = trace_file()
        # Keeps the GIL between the two calls, even if this thread is not scheduled for a while.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(3600)
        # Lets in the threads that requested the GIL before the new interval.
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
    """Returns at once, leaving a thread behind. When the file data["gate"] exists, the thread writes the event "holds"
    and holds the GIL for data["seconds"]. Without data there is no thread."""
    trace(job, "start")
    if data:
        threading.Thread(target=_hold_after_gate, args=(job, data["gate"], data["seconds"]), daemon=True).start()
    trace(job, "end")


def hold_in_thread(seconds: float, delay_seconds: float = 0.3) -> None:
    """Starts a thread that holds the GIL, a moment later."""

    def hold_later() -> None:
        time.sleep(delay_seconds)
        _c.usleep(int(seconds * 1_000_000))

    threading.Thread(target=hold_later, daemon=True).start()


def _hold_after_gate(job: Job, gate: str, seconds: float) -> None:
    while not os.path.exists(gate):
        time.sleep(0.01)
    line, fd = trace_line(job, "holds"), trace_file()
    # Unlike `hold`, keeps the switch interval: a minder that waits for the GIL is recognized by its wake-ups.
    _c.write(fd, line, len(line))
    _c.usleep(int(seconds * 1_000_000))
