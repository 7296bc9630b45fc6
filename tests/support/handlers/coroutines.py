"""Async handlers that share one event loop, some of which block it."""

import asyncio
import time
from typing import Any

from traced import trace  # type: ignore[import-not-found]

from forq import Job

# Made at import, as applications do.
lock = asyncio.Lock()
connections: asyncio.Queue[int] = asyncio.Queue()
for connection in range(2):
    connections.put_nowait(connection)
total = 0


async def add(data: Any, job: Job) -> int:
    """Adds 1 to a total that only the lock protects."""
    global total
    connection = await connections.get()
    try:
        async with lock:
            before = total
            await asyncio.sleep(0.005)
            total = before + 1
            return total
    finally:
        connections.put_nowait(connection)


async def act(data: Any, job: Job) -> None:
    """Does what data says, in its first attempt."""
    trace(job, f"timeouts={job.timeout_count}")
    trace(job, "start")
    try:
        if job.attempt == 1:
            await ACTIONS[data["do"]](data)
    finally:
        trace(job, "cleanup")
    trace(job, "end")


async def wait(data: Any) -> None:
    await asyncio.sleep(data.get("seconds", 3600))


async def block(data: Any) -> None:
    """Blocks the loop; the interpreter is free."""
    await asyncio.sleep(0)
    time.sleep(3600)


async def block_in_task(data: Any) -> None:
    await asyncio.gather(block(data), asyncio.sleep(3600))


async def spin(data: Any) -> None:
    """Blocks the loop in C code that holds the interpreter."""
    await asyncio.sleep(0)
    sum(range(10**12))


ACTIONS = {"wait": wait, "block": block, "block_in_task": block_in_task, "spin": spin}
