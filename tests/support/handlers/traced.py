"""Handlers that write a trace to a file outside Redis: one line per event, appended in one write.

Rarely used modules are imported inside functions: benchmarks measure the memory of processes with this module.

A line is: queue, job id, fence, pid, event ("start" or "end"), time (monotonic seconds).
"""

import os
import sys
import time
from typing import Any

from forq import Job, Permanent, RetryAt

_fd = -1


def trace(job: Job, event: str) -> None:
    os.write(trace_file(), trace_line(job, event))


def trace_file() -> int:
    global _fd
    if _fd < 0:
        _fd = os.open(os.environ["FORQ_TEST_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return _fd


def trace_line(job: Job, event: str) -> bytes:
    line = f"{job.queue} {job.id} {job.fence} {os.getpid()} {event} {time.monotonic():.6f} {job.stall_count}\n"
    return line.encode()


def noop(data: Any, job: Job) -> None:
    return


def record(data: Any, job: Job) -> None:
    trace(job, "end")


def sleep(data: Any, job: Job) -> None:
    """Takes data seconds (only the first time if data is a list of one number)."""
    trace(job, "start")
    seconds = data if isinstance(data, int | float) else data[0] if job.stall_count == 0 else 0.0
    time.sleep(seconds)
    trace(job, "end")


def wait_for(data: Any, job: Job) -> None:
    """Waits for a file of that name; returns at once without a name."""
    trace(job, "start")
    while data and not os.path.exists(data):
        time.sleep(0.01)
    trace(job, "end")


def share(data: Any, job: Job) -> None:
    """Takes data seconds; records its thread unless it was quick."""
    time.sleep(data)
    if data > 0.001:
        import threading

        trace(job, f"thread={threading.get_ident()}")


def tell(data: Any, job: Job) -> None:
    """Reports each [fraction, text] of data, then waits until the file named last exists, or is killed."""
    *steps, gate = data
    for fraction, text in steps:
        job.progress(fraction, text)
        time.sleep(0.15)
    trace(job, "told")
    while not os.path.exists(gate):
        time.sleep(0.01)
    if os.path.getsize(gate):
        raise Permanent("told to")


async def sleep_async(data: Any, job: Job) -> None:
    import asyncio

    trace(job, "start")
    await asyncio.sleep(data)
    trace(job, "end")


def fail(data: Any, job: Job) -> None:
    raise ValueError(f"no good: {data}")


def leave(data: Any, job: Job) -> None:
    sys.exit(data)


def run_program(data: Any, job: Job) -> None:
    """Runs a subprocess, which must keep its exit status."""
    import subprocess

    status = subprocess.run(["sh", "-c", f"exit {data}"], check=False).returncode
    trace(job, f"status={status}")


def chain(data: Any, job: Job) -> None:
    """Double-forks a daemon in its own session that keeps forking and exiting; then takes its time."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            while True:
                if os.fork() > 0:
                    os._exit(0)
                os.setsid()
                time.sleep(0.001)
        os._exit(0)
    if os.fork() == 0:
        os.setsid()
        time.sleep(3600)
        os._exit(0)
    trace(job, "start")
    time.sleep(3600)


def leave_program(data: Any, job: Job) -> None:
    """Starts a program in its own session and waits for it. The event ends with its pid."""
    import subprocess

    code = "import time; time.sleep(3600)"
    program = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    trace(job, f"program={program.pid}")
    program.wait()


def leave_copy(data: Any, job: Job) -> None:
    """Forks a daemon that closes all its files and takes its time. The event ends with its pid."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.closerange(0, 1024)
        time.sleep(3600)
        os._exit(0)
    trace(job, f"program={pid}")
    time.sleep(3600)


def leave_hidden(data: Any, job: Job) -> None:
    """Forks a daemon that is not dumpable, so that /proc with hidepid hides it, and a process below it."""
    import ctypes

    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        below = os.fork()
        if below:
            trace(job, f"program={below}")
            trace(job, f"program={os.getpid()}")
            os.write(told, b"x")
        time.sleep(3600)
        os._exit(0)
    os.read(ready, 1)
    trace(job, "start")
    time.sleep(3600)


def leave_program_of_root(data: Any, job: Job) -> None:
    """Starts a program that becomes root, through a copy of setpriv with that capability; data is its path."""
    import subprocess

    code = "import time; time.sleep(3600)"
    become = [data, "--reuid=0", "--regid=0", "--clear-groups"]
    program = subprocess.Popen([*become, sys.executable, "-c", code], start_new_session=True)
    trace(job, f"program={program.pid}")
    time.sleep(3600)


def spin_in_c(data: Any, job: Job) -> None:
    """Holds the GIL in one very long C call."""
    trace(job, "start")
    sum(range(10**12))


def handle(data: Any, job: Job) -> None:
    trace(job, "end")


def fork_and_return(data: Any, job: Job) -> None:
    """The forked copy returns from the handler as if it were the worker."""
    os.fork()
    trace(job, "end")


def fork_and_exit(data: Any, job: Job) -> None:
    if os.fork() == 0:
        sys.exit(0)
    trace(job, "end")


def use_pool(data: Any, job: Job) -> None:
    """Leaving a pool terminates its processes with SIGTERM."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        trace(job, f"sum={sum(pool.map(abs, range(-3, 4)))}")


class Strange(Exception):
    @property
    def kind(self) -> str:
        raise RuntimeError("no kind")

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_strange(data: Any, job: Job) -> None:
    raise Strange


def raise_data(data: Any, job: Job) -> None:
    """Raises an error that quotes its data."""
    raise ValueError(f"cannot use {data}")


def raise_surrogate(data: Any, job: Job) -> None:
    error = ValueError("\ud800")
    error.kind = "\ud800"  # type: ignore[attr-defined]
    raise error


def die(data: Any, job: Job) -> None:
    trace(job, "start")
    os._exit(3)


def daemonise(data: Any, job: Job) -> None:
    """Leaves a short-lived daemon."""
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.wait()
    trace(job, "end")


def fail_until(data: Any, job: Job) -> None:
    """Fails data times."""
    trace(job, "start")
    if job.retry_count < data:
        raise ValueError(f"attempt {job.retry_count + 1}")
    trace(job, "end")


def ask(data: Any, job: Job) -> None:
    """Requests its one retry in data seconds, or none."""
    trace(job, "start")
    if data == "permanent":
        raise Permanent("never again")
    if job.retry_count == 0:
        raise RetryAt(time.time() + data)
    trace(job, "end")


def on_fail(data: Any, job: Job) -> None:
    """A fail handler: records the id of the failed job."""
    original_data, original, error = data
    trace(job, f"failed={original['id']}/{original_data}/{original['retry_count']}/{error['name']}/{error['kind']}")


def on_fail_id(data: Any, job: Job) -> None:
    trace(job, f"failed={data[1]['id']}")


def on_fail_flaky(data: Any, job: Job) -> None:
    if job.retry_count < 2:
        raise RuntimeError("not yet")
    on_fail(data, job)


def fail_in_main(data: Any, job: Job) -> None:
    """Fails until it has been tried data times; records every start."""
    trace(job, "start")
    if job.retry_count < data:
        raise ValueError("once more")
    trace(job, "end")


def brief_run(data: Any, job: Job) -> None:
    """Takes 0 to 2 ms; records its start, and its data at its end; fails now and then."""
    trace(job, "start")
    time.sleep(int(job.fence) % 5 * 0.0005)
    if int(job.fence) % 7 == 0:
        raise ValueError("by chance")
    trace(job, f"ran={data}")


def act(data: Any, job: Job) -> None:
    """Follows data: {"do": "sleep" | "hang" | "spin" | "die", "seconds": ..., "times": how often}; or fails: "refuse"
    permanently, "retry" at the first attempt."""
    trace(job, "start")
    if data["do"] == "refuse":
        raise Permanent("told to")
    if data["do"] == "retry" and job.retry_count == 0:
        raise ValueError("told to")
    done_before = job.stall_count + job.timeout_count
    if done_before < data.get("times", 10**6):
        do(data["do"], data.get("seconds", 0.0))
    trace(job, "end")


def do(what: str, seconds: float) -> None:
    if what == "hang":
        hang()
    elif what == "spin":
        sum(range(10**12))
    elif what == "die":
        time.sleep(seconds)
        os._exit(3)
    else:
        time.sleep(seconds)


def hang() -> None:
    """Ignores every signal that a process can ignore."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        time.sleep(3600)


async def refuse_to_end(data: Any, job: Job) -> None:
    """A coroutine that refuses to be cancelled."""
    import asyncio

    trace(job, "start")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            trace(job, "cancelled")


def hang_in_fail(data: Any, job: Job) -> None:
    trace(job, "fail_start")
    hang()


def slices(data: Any, job: Job) -> None:
    """Works for data slices of 20 ms, so that a frozen process still has the rest to do when it wakes."""
    trace(job, "start")
    for _ in range(data):
        time.sleep(0.02)
    trace(job, "end")


def enqueue_another(data: Any, job: Job) -> None:
    """Enqueues data more jobs, through a client that finds Redis by itself."""
    from forq import Client

    if data:
        Client().queue(job.queue).enqueue(data - 1)
    trace(job, "end")


def forest(data: Any, job: Job) -> None:
    """Leaves data daemons, and runs until it is killed."""
    import subprocess

    subprocess.run(["sh", "-c", "for i in $(seq $0); do setsid sleep 600 & done", str(data)], check=True)
    trace(job, "planted")
    time.sleep(600)
