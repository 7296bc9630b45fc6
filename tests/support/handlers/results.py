"""Handlers that return something."""

import os
import time
from typing import Any

from traced import trace  # type: ignore[import-not-found]  # a handler's own folder is on its path

from forq import Job, Permanent


def echo(data: Any, job: Job) -> Any:
    return data


async def echo_async(data: Any, job: Job) -> Any:
    import asyncio

    await asyncio.sleep(0)
    return data


class Deadly(dict[str, Any]):
    def items(self) -> Any:
        raise SystemExit("never")


def odd(data: Any, job: Job) -> Any:
    """Returns values that cannot be stored, or are hard to store."""
    if data == "recursive":
        own: list[Any] = []
        own.append(own)
        return own
    if data == "fail":
        raise Permanent("no result")
    return {"object": object(), "deadly": Deadly(a=None), "huge": "x" * 5_000_000, "nan": float("nan")}[data]


def gated(data: Any, job: Job) -> Any:
    """Returns the rest of data once the file named first exists."""
    trace(job, "start")
    while not os.path.exists(data[0]):
        time.sleep(0.01)
    trace(job, "end")
    return data[1]


def slow_if_told(data: Any, job: Job) -> Any:
    """Returns at once, except for one job, which waits for a file."""
    return gated(data, job) if isinstance(data, list) else data
