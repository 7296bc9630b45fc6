"""Handlers that take too much of the machine; each stops before it harms a test machine."""

import os
import resource
import subprocess
import sys
import threading
import time
from typing import Any

from traced import trace  # type: ignore[import-not-found]

from forq import Job

MOST_BYTES = 600 * 1024 * 1024
MOST_FORKS = 300
_MB = 1024 * 1024


def leak(data: Any, job: Job) -> None:
    """Allocates data megabytes (at most 600), then waits to be killed; if data is a list, only the first time.
    A small one waits only for a moment."""
    trace(job, "start")
    megabytes = data if isinstance(data, int) else data[0] if job.stall_count == 0 else 0
    held = [os.urandom(_MB) for _ in range(min(megabytes, MOST_BYTES // _MB))]
    if megabytes:
        time.sleep(30 if megabytes > 10 else 3)
    trace(job, f"end{len(held)}")


def leak_below(data: Any, job: Job) -> None:
    """Leaves a daemon that allocates data megabytes; the job itself waits."""
    trace(job, "start")
    code = f"import os, time; held = [os.urandom({_MB}) for _ in range({min(int(data), 600)})]; time.sleep(30)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    time.sleep(30)


def bomb(data: Any, job: Job) -> None:
    """Forks data processes (at most 300) that fork once each; the first time only."""
    trace(job, "start")
    if job.stall_count:
        trace(job, "end")
        return
    for _ in range(min(int(data), MOST_FORKS) // 2):
        if os.fork() == 0:
            os.fork()
            time.sleep(30)
            os._exit(0)
    time.sleep(30)


def threads(data: Any, job: Job) -> None:
    trace(job, "start")
    for _ in range(min(int(data), MOST_FORKS)):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    time.sleep(30)


def restraints(data: Any, job: Job) -> None:
    """Records the limits of this process and of a program that it starts."""
    code = "import os, resource as r; print(os.nice(0), *r.getrlimit(r.RLIMIT_NOFILE), *r.getrlimit(r.RLIMIT_AS))"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = [os.nice(0), *resource.getrlimit(resource.RLIMIT_NOFILE), *resource.getrlimit(resource.RLIMIT_AS)]
    trace(job, ",".join(map(str, ours)) + "|" + ",".join(theirs))


def ask_for_much(data: Any, job: Job) -> None:
    """Allocates more address space than address_limit allows."""
    bytearray(int(data) * _MB)
    trace(job, "end")


def wild(data: Any, job: Job) -> None:
    """Disturbs its neighbors: {"do": "bomb" | "leak" | "flood", "size": …}."""
    trace(job, "start")
    what, size = data["do"], int(data["size"])
    if what == "bomb":
        _fork_on(size)
        time.sleep(30)
    elif what == "leak":
        held = [os.urandom(_MB) for _ in range(min(size, MOST_BYTES // _MB))]
        time.sleep(30 if held else 0)
    else:
        chunk = b"x" * 99 + b"\n"
        for _ in range(size):
            os.write(1, chunk * (_MB // 100))
    trace(job, "end")


def _fork_on(depth: int) -> None:
    """Doubles the processes per generation, 2^depth in all, 256 at most. Each keeps a CPU busy for some seconds."""
    ours = os.getpid()
    for _ in range(min(depth, 8)):
        os.fork()
    if os.getpid() == ours:
        return
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        pass
    os._exit(0)


def brief(data: Any, job: Job) -> None:
    """Takes 5 ms, mostly waiting; records its end."""
    time.sleep(0.005)
    trace(job, "end")
