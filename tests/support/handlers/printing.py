"""Handlers that write output in every possible way."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forq import Job

_pool = ThreadPoolExecutor(1)


def say(data: Any, job: Job) -> None:
    """Writes in the ways that data names, then a last line, so that a reader knows the output is complete."""
    for way in data:
        _WAYS[way](job)
    print("said all")


def repeat(data: Any, job: Job) -> None:
    print(data)


def _print(job: Job) -> None:
    print("printed", job.id)
    print("to stderr", job.id, file=sys.stderr)
    print("in", "parts", end="")
    print(" and one line")
    sys.stdout.buffer.write(b"bytes \xff\n")
    sys.stdout.write("two\nlines\n")


def _log(job: Job) -> None:
    logging.getLogger("my.lib").info("informed %s", job.id)
    logging.getLogger("my.lib").debug("not shown")
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("my.lib").exception("caught")


def _raw(job: Job) -> None:
    os.write(1, f"raw {job.id}\n".encode())
    os.write(2, b"junk \x00\x1b[31m\xff\xfe\x1e{}\n")


def _subprocess(job: Job) -> None:
    subprocess.run(["sh", "-c", "echo out of a program; echo err of a program >&2"], check=True)


def _threads(job: Job) -> None:
    thread = threading.Thread(target=lambda: print("of a thread"))
    thread.start()
    thread.join()
    _pool.submit(lambda: print("of a pool")).result()


def _fork(job: Job) -> None:
    pid = os.fork()
    if pid == 0:
        print("of a fork")
        os._exit(0)
    os.waitpid(pid, 0)


def _force(job: Job) -> None:
    before = logging.getLogger().handlers[:]
    logging.basicConfig(force=True, format="mine: %(message)s", level=logging.DEBUG)
    logging.debug("with a format of its own")
    logging.getLogger().handlers[:] = before


def _close(job: Job) -> None:
    """Closes descriptor 1 and the streams; the next file opened gets number 1."""
    os.close(1)
    sys.stdout.close()
    with open(os.environ["FORQ_TEST_TRACE"] + ".mine", "w") as mine:
        assert mine.fileno() == 1
        print("after it was closed")
        mine.write("only this")


def _replace(job: Job) -> None:
    class Mine:
        def write(self, text: str) -> int:
            return os.write(2, f"<{text.strip()}>\n".encode()) if text.strip() else 0

    before, sys.stdout = sys.stdout, Mine()
    print("replaced")
    sys.stdout = before


_WAYS = {
    "print": _print,
    "log": _log,
    "raw": _raw,
    "subprocess": _subprocess,
    "threads": _threads,
    "fork": _fork,
    "force": _force,
    "close": _close,
    "replace": _replace,
}


def wait_and_say(data: Any, job: Job) -> None:
    """Writes in step with other jobs, so that all write at once."""
    for number in range(data):
        print(f"{job.id} {number}")
        logging.warning("%s %s", job.id, number)
        time.sleep(0.001)


async def say_async(data: Any, job: Job) -> None:
    async def one() -> None:
        await asyncio.sleep(0.01)
        print("of a task", job.id)

    await asyncio.gather(one(), one())
    await asyncio.to_thread(print, "of to_thread", job.id)


def fail(data: Any, job: Job) -> None:
    raise ValueError(f"no good: {data}")


def flood(data: Any, job: Job) -> None:
    """Writes data MB, raw or printed."""
    how, megabytes = data
    line = "x" * 99
    if how == "raw":
        block = (line.encode() + b"\n") * 655
        for _ in range(megabytes * 1_000_000 // len(block)):
            os.write(1, block)
    else:
        for _ in range(megabytes * 10_000):
            print(line)
    logging.error("end of the flood")


def say_slowly(data: Any, job: Job) -> None:
    """Writes numbered lines until the file named in data exists."""
    number = 0
    while not os.path.exists(data):
        print(f"line {number} {'y' * 200}")
        number += 1
        time.sleep(0.002)
    print(f"total {number}")


def say_in_step(data: Any, job: Job) -> None:
    """The same, at most 200 lines ahead of a reader, which creates FILE.N after it has read N lines. A reader that is
    further behind loses lines, because the log is rotated twice."""
    number = 0
    while not os.path.exists(data):
        print(f"line {number} {'y' * 200}")
        number += 1
        time.sleep(0.002)
        while number % 100 == 0 and number > 200 and not os.path.exists(f"{data}.{number - 200}"):
            if os.path.exists(data):
                return
            time.sleep(0.002)


def long_line(data: Any, job: Job) -> None:
    print("L" * data)
    os.write(1, b"R" * data + b"\n")
    print("short")


def dots(data: Any, job: Job) -> None:
    """Writes a line without a newline, in small pieces; then waits for the file named in data."""
    for _ in range(5):
        print(".", end="", flush=True)
    while not os.path.exists(data):
        time.sleep(0.01)


def die(data: Any, job: Job) -> None:
    print("last words")
    os.kill(os.getpid(), 9)
