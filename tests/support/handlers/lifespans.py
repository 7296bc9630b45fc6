"""An app with lifespans, and plain handlers that use it."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import forq

app = forq.App("lively")
state: dict[str, Any] = {}


def note(text: str) -> None:
    with Path(os.environ["FORQ_TEST_TRACE"]).with_name("lifespans").open("a") as file:
        file.write(f"{os.getpid()} {text}\n")


@app.lifespan
def files() -> Iterator[None]:
    if Path(os.environ["FORQ_TEST_TRACE"]).with_name("broken").exists():
        raise ConnectionError("no database")
    state["thread"] = threading.current_thread()
    note("files entered")
    yield
    assert state["thread"] is threading.current_thread()
    note("files left")


@app.lifespan
async def pool() -> AsyncIterator[None]:
    state["loop"] = asyncio.get_running_loop()
    state["lock"] = asyncio.Lock()
    async with asyncio.TaskGroup() as group:
        background = group.create_task(asyncio.sleep(3600))
        note("pool entered")
        yield
        background.cancel()
    note("pool left")


@app.around
def around(job: forq.Job) -> Iterator[None]:
    state["around"] = job.id
    yield


@app.task
async def locked() -> bool:
    async with state["lock"]:
        return state["loop"] is asyncio.get_running_loop()


def plain(data: Any, job: forq.Job) -> list[Any]:
    return [state["around"], sorted(state), forq.current_job().id]


async def plain_async(data: Any, job: forq.Job) -> list[Any]:
    async with state["lock"]:
        return [state["around"], state["loop"] is asyncio.get_running_loop(), forq.current_job().id]
