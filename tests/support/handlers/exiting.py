"""Handlers that end their process with an exit code or a signal, or that forge messages on its leash."""

import ctypes
import json
import os
import socket
import stat
import threading
import time
from typing import Any

from forq import Job


def leave(data: Any, job: Job) -> None:
    """Ends with the exit code or signal in data; returns if there is neither."""
    if "exit" in data:
        os._exit(data["exit"])
    if "signal" in data:
        os.kill(os.getpid(), data["signal"])
        # For a signal that stops the process, or that another thread is about to receive.
        time.sleep(0.2)


class Unspeakable(Exception):
    """Ends the program whenever it is formatted or inspected."""

    def __str__(self) -> str:
        raise SystemExit(78)

    __repr__ = __str__

    @property
    def kind(self) -> str:
        raise SystemExit(78)

    @property
    def retry_at(self) -> float:
        raise KeyboardInterrupt

    def __del__(self) -> None:
        raise SystemExit(72)


def raise_unspeakable(data: Any, job: Job) -> None:
    raise Unspeakable("no text")


class Slow(Exception):
    """Its retry_at never returns."""

    @property
    def retry_at(self) -> float:
        time.sleep(3600)
        return 0.0


def raise_slow(data: Any, job: Job) -> None:
    raise Slow


def leash() -> int:
    """The descriptor of the leash, the only unnamed socket of this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as found:
                    if found.family == socket.AF_UNIX and not found.getpeername() and not found.getsockname():
                        return fd
        except OSError:
            continue
    raise LookupError("no leash")


def say(data: Any, job: Job) -> None:
    """Writes data["lines"] to the leash, the first time; then exits with data["exit"], after the job if data["later"].
    "SLOT" in a line becomes the number of this worker's slot."""
    if job.stall_count:
        return
    fd = leash()

    def write_lines() -> None:
        for line in data["lines"]:
            os.write(fd, json.dumps(line).replace('"SLOT"', str(_slot())).encode() + b"\n")
        if "exit" in data:
            os._exit(data["exit"])

    if data.get("later"):
        threading.Timer(0.5, write_lines).start()
    else:
        write_lines()
        time.sleep(data.get("seconds", 0))


def flood(data: Any, job: Job) -> None:
    """Writes data["text"] to the leash without end, the first time."""
    if job.stall_count:
        return
    fd, piece = leash(), data["text"].replace("SLOT", str(_slot())).encode() * (65536 // len(data["text"]))
    os.set_blocking(fd, True)
    while True:
        os.write(fd, piece)


def _slot() -> int:
    import gc

    from forq.procs.scoreboard import Slot

    return next(found.number for found in gc.get_objects() if isinstance(found, Slot) and found.pid == os.getpid())


def haunt(data: Any, job: Job) -> None:
    """Leaves a thread that raises SystemExit in this worker's thread after the job has ended."""
    if data == "haunt":
        worker = ctypes.c_ulong(threading.get_ident())
        send = ctypes.pythonapi.PyThreadState_SetAsyncExc
        threading.Timer(0.3, send, (worker, ctypes.py_object(SystemExit))).start()


def fall_silent(data: Any, job: Job) -> None:
    """Shuts down one direction of the leash; any other job never ends."""
    if data == "fall silent":
        with socket.socket(fileno=os.dup(leash())) as found:
            found.shutdown(socket.SHUT_WR)
    elif job.stall_count + job.timeout_count == 0:
        time.sleep(3600)
