"""An app whose tasks have timeouts of their own."""

import asyncio
import time

import forq

app = forq.App("timed")


@app.task(timeout="500ms")
def hang() -> None:
    time.sleep(3600)


@app.task(timeout="500ms")
async def hang_async() -> None:
    await asyncio.sleep(3600)


@app.task
def rest(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@app.task(timeout=0)
async def unlimited(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds
