"""Handlers that damage their process, or state that it shares with others."""

import ctypes
import os
import signal
import threading
import time
from typing import Any

import traced  # type: ignore[import-not-found]

from forq import Job


def close_descriptors(data: Any, job: Job) -> None:
    """Closes all descriptors, the first time; then takes data seconds."""
    traced.trace(job, "start")
    if job.stall_count + job.retry_count == 0:
        os.closerange(3, 4096)
        traced._fd = -1
        time.sleep(data)
    traced.trace(job, "end")


def ignore_term(data: Any, job: Job) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    traced.trace(job, "start")
    time.sleep(data if job.fence and not os.path.exists(f"{os.environ['FORQ_TEST_TRACE']}.{job.id}") else 0)
    traced.trace(job, "end")


def block_signals(data: Any, job: Job) -> None:
    traced.trace(job, "start")
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(data)


def leave_at_once(data: Any, job: Job) -> None:
    traced.trace(job, "start")
    if job.stall_count == 0:
        os._exit(data)
    traced.trace(job, "end")


def read_nowhere(data: Any, job: Job) -> None:
    traced.trace(job, "start")
    if job.stall_count == 0:
        ctypes.string_at(0)
    traced.trace(job, "end")


def change_surroundings(data: Any, job: Job) -> None:
    """Changes directory (to one that is gone), umask, signals, environment and limits of its process."""
    import resource

    traced.trace(job, "start")
    os.makedirs(data, exist_ok=True)
    # The previous job's umask would keep everybody but root out.
    os.chmod(data, 0o700)
    os.chdir(data)
    os.rmdir(data)
    os.umask(0o777)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    traced.trace(job, "end")


def start_threads(data: Any, job: Job) -> None:
    """Starts data non-daemon threads that never end, which the interpreter would join at exit."""
    for _ in range(data):
        threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()
    traced.trace(job, "end")


def raise_what_ends_programs(data: Any, job: Job) -> None:
    traced.trace(job, "start")
    raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "generator": GeneratorExit()}[data]


def recurse(data: Any, job: Job) -> None:
    traced.trace(job, "start")
    recurse_for_ever(0)


def recurse_for_ever(depth: int) -> int:
    return recurse_for_ever(depth + 1) + 1
