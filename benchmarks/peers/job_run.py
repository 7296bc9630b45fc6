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


def run(argument):
    if len(argument) == 1:
        if next(_numbers) % BLOCK == 0:
            _write(0)
        return
    _write(argument["at"])
    if "ms" in argument:
        time.sleep(argument["ms"] / 1000)


async def run_async(argument):
    if len(argument) == 1:
        if next(_numbers) % BLOCK == 0:
            _write(0)
        return
    _write(argument["at"])
    if "ms" in argument:
        await asyncio.sleep(argument["ms"] / 1000)


def _write(sent_ns):
    global _fd
    if _fd < 0:
        _fd = os.open(os.environ["BENCH_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(_fd, b"%d %d %d\n" % (time.monotonic_ns(), sent_ns, os.getpid()))
