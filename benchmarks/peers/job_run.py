"""What the job of every Python peer does, and what it leaves behind: lines `STARTED_NS SENT_NS PID` in a file.

The argument says which job it is: {"n"} does nothing, and only every BENCH_BLOCK-th writes its line, so that writing
costs nothing; {"n", "at"} tells when it was sent (ns of the monotonic clock, the same for all processes), and
{"n", "at", "ms"} then takes so long.
"""

import asyncio
import itertools
import os
import time

BLOCK = int(os.environ.get("BENCH_BLOCK", "1"))
_numbers = itertools.count(1)  # counts without a lock in threads, too
_fd = -1


def typed(user: int, subject: str) -> None:
    """The no-op of tasks.py: two typed arguments."""
    if next(_numbers) % BLOCK == 0:
        _write(0)


async def typed_async(user: int, subject: str) -> None:
    typed(user, subject)


def run(argument):
    if seconds := _begin(argument):
        time.sleep(seconds)


async def run_async(argument):
    if seconds := _begin(argument):
        await asyncio.sleep(seconds)


def _begin(argument):
    """Writes down that the job runs (of no-ops each BLOCK-th); how long it is to take."""
    if len(argument) > 1:
        _write(argument["at"])
    elif next(_numbers) % BLOCK == 0:
        _write(0)
    return argument.get("ms", 0) / 1000


def _write(sent_ns):
    global _fd
    if _fd < 0:
        _fd = os.open(os.environ["BENCH_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(_fd, b"%d %d %d\n" % (time.monotonic_ns(), sent_ns, os.getpid()))
