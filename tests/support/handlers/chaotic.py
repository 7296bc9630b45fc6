"""Handlers that do what their data asks for, after writing it to the trace. Their result is the id of the job."""

import asyncio
import os
import signal
import time
from typing import Any

from gil_holding import hold_in_thread  # type: ignore[import-not-found]
from traced import hang, trace  # type: ignore[import-not-found]

from forq import Job, Permanent, Snooze
from forq.errors import NoResult

_SLICE_SECONDS = 0.02
_DAEMON_SECONDS = 600
_KEPT_SECONDS = 4.0


def handle(data: Any, job: Job) -> str:
    """{"do": action, "seconds": duration, "times": failures before success, "needs": jobs whose results it gets}."""
    trace(job, "start")
    _check_results(data, job)
    if data["do"] != "work" and _tries(job) < data["times"]:
        trace(job, data["do"])
        _MISDEEDS[data["do"]](job)
    _work(job, data["seconds"])
    trace(job, "end")
    return job.id


async def handle_async(data: Any, job: Job) -> str:
    """The same on the event loop. Misdeeds that block it hold up the other jobs."""
    trace(job, "start")
    _check_results(data, job)
    if data["do"] != "work" and _tries(job) < data["times"]:
        trace(job, data["do"])
        _MISDEEDS[data["do"]](job)
    deadline = time.monotonic() + data["seconds"]
    while (left := deadline - time.monotonic()) > 0:
        await asyncio.sleep(min(left, _SLICE_SECONDS))
        if left > _SLICE_SECONDS:
            trace(job, "slice")
    trace(job, "end")
    return job.id


def on_fail(data: Any, job: Job) -> None:
    """A fail handler: writes the id of the failed job to the trace."""
    trace(job, f"failed={data[1]['id']}")


def _check_results(data: Any, job: Job) -> None:
    """A job that has not succeeded has no result; of any other it is there, wherever its worker was killed."""
    if not data.get("needs"):
        return
    try:
        results = job.results()
    except NoResult:
        trace(job, "wrong=missing")
        raise
    for needed, result in zip(data["needs"], results, strict=True):
        if result not in (needed, None):
            trace(job, f"wrong={needed}:{result}")


def _tries(job: Job) -> int:
    return int(job.retry_count + job.stall_count + job.timeout_count + job.snoozes)


def _work(job: Job, seconds: float) -> None:
    """Writes a trace line per slice, so that overlapping runs of a job can be seen."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_SECONDS))
        if left > _SLICE_SECONDS:
            trace(job, "slice")


def _raise(job: Job) -> None:
    raise ValueError("as asked")


def _permanent(job: Job) -> None:
    raise Permanent("as asked")


def _snooze(job: Job) -> None:
    raise Snooze(0.05)


def _crash(job: Job) -> None:
    os._exit(3)


def _segfault(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(job: Job) -> None:
    hang()


def _daemonise(job: Job) -> None:
    """Leaves a daemon in its own session."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(_DAEMON_SECONDS)
        os._exit(0)
    os.waitpid(child, 0)


def _keep(job: Job) -> None:
    """Leaves a thread that soon holds the GIL; the job runs to its end."""
    hold_in_thread(_KEPT_SECONDS)


_MISDEEDS = {
    "raise": _raise,
    "permanent": _permanent,
    "snooze": _snooze,
    "crash": _crash,
    "segfault": _segfault,
    "hang": _hang,
    "daemonise": _daemonise,
    "keep": _keep,
}
