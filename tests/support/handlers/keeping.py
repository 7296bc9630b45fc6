"""Handlers that keep the interpreter to themselves: a call into C that does not let go of it."""

import ctypes
import threading
import time
from typing import Any

from traced import trace  # type: ignore[import-not-found]

from forq import Job

# Functions of a PyDLL are called with the interpreter's lock held.
_c = ctypes.PyDLL(None)


def hold(data: Any, job: Job) -> None:
    """Keeps the interpreter for data seconds; with 0 it only leaves its trace."""
    trace(job, "start")
    if data:
        _c.usleep(int(data * 1_000_000))
    trace(job, "end")


def leave_thread(data: Any, job: Job) -> None:
    """Ends at once; a thread that it leaves behind keeps the interpreter for data seconds, a moment later."""
    trace(job, "start")
    if data:
        leave_keeper(data)
    trace(job, "end")


def leave_keeper(seconds: float) -> None:
    threading.Thread(target=_keep, args=(seconds,), daemon=True).start()


def _keep(seconds: float) -> None:
    time.sleep(0.3)
    _c.usleep(int(seconds * 1_000_000))
