"""Handlers that misbehave."""

import asyncio
import os
import signal
import socket
import stat
import sys
import time
from typing import Any

from traced import trace  # type: ignore[import-not-found]

from forq import Job, Permanent


def kill_itself(data: Any, job: Job) -> None:
    """Sends itself the signal in data, the first time."""
    trace(job, "start")
    if job.stall_count == 0:
        signal.signal(data, signal.SIG_DFL)
        os.kill(os.getpid(), data)
    trace(job, "end")


def become_another_program(data: Any, job: Job) -> None:
    """Execs a program that opens its own files on forq's descriptors."""
    trace(job, "start")
    code = f"import os, time; fds = [os.open({data!r}, os.O_RDWR) for _ in range(40)]; time.sleep(60)"
    os.execv(sys.executable, [sys.executable, "-c", code])


def write_to_sockets(data: Any, job: Job) -> None:
    """Writes a line to every unnamed socket that it finds, the first time."""
    trace(job, "start")
    for fd in range(3, 64) if job.stall_count == 0 else ():
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as found:
                    if found.family == socket.AF_UNIX and not found.getpeername() and not found.getsockname():
                        os.write(fd, b"oops\n")
        except OSError:
            continue
    if job.stall_count == 0:
        time.sleep(60)
    trace(job, "end")


_background: list[asyncio.Task[None]] = []


async def leave_a_stubborn_task(data: Any, job: Job) -> None:
    async def stay() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    _background.append(asyncio.get_running_loop().create_task(stay()))
    await asyncio.sleep(0)
    trace(job, "end")


def fail_for_good(data: Any, job: Job) -> None:
    trace(job, "start")
    time.sleep(data)
    trace(job, "end")
    raise Permanent("never again")


def term_what_it_forks(data: Any, job: Job) -> None:
    """Forks and sends TERM at once, data times; records how many survived."""
    survived = 0
    for _ in range(data):
        pid = os.fork()
        if pid == 0:
            time.sleep(3600)
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 1.0
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                survived += 1
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.0002)
    trace(job, f"survived={survived}")
