"""Tasks for the tests of forq.testing. They run in the process of the test."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import forq
from forq import Job, current_job
from forq.client import Queue

app = forq.App("shop", url="redis://shop.invalid")
captured = app.client
captured_queue: Queue = captured.queue("mails")
second = forq.App("second", prefix="second:")
seen: list[Any] = []
word: ContextVar[str] = ContextVar("word", default="")


@dataclass(frozen=True)
class Address:
    street: str
    number: int


@app.task(queue="mails", max_retries=2, backoff=[10, 60])
def send(to: str, subject: str = "hi", *, copies: int = 1) -> str:
    if to == "nobody":
        raise ValueError("no such person")
    return f"{subject} {to} x{copies}"


@app.task
def move(to: Address) -> Address:
    return Address(to.street, to.number + 1)


@app.task
async def fetch(number: int) -> int:
    seen.append(asyncio.get_running_loop())
    await asyncio.sleep(0.001)
    return number + 1


@app.task
def without_loop() -> int:
    """A sync task may use an event loop of its own."""
    return asyncio.run(_one())


async def _one() -> int:
    return 1


@app.task
def again() -> None:
    again.enqueue()


@app.task
def report() -> None:
    job = current_job()
    job.progress(0.25, "a quarter")
    seen.append(captured.queue(job.queue).job(job.id)["progress"])


@app.task
def wait_for_other() -> str:
    return send.enqueue("a").result()


@app.task
async def await_other() -> str:
    return await (await send.aenqueue("a")).aresult()


@app.task
def interrupt() -> None:
    raise KeyboardInterrupt


@app.task
async def read_word() -> str:
    return word.get()


@app.task(queue="nightly", cron="30 2 * * *")
def clean_up() -> None:
    seen.append(current_job().tick)


@app.task(queue="nightly", every="5m")
def poll() -> None:
    seen.append("poll")


@second.task
def greet(name: str) -> str:
    return f"hello {name}"


live = forq.App("live")


@live.lifespan
def resources() -> Iterator[None]:
    seen.append("enter")
    yield
    seen.append("leave")


@live.lifespan
async def pool() -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.001)
    yield
    seen.append(loop)


@live.task
async def use() -> None:
    seen.append("use")


broken = forq.App("broken")


@broken.lifespan
def no_database() -> Iterator[None]:
    raise ConnectionError("no database")
    yield


@broken.task
def query() -> None:
    seen.append("query")


ending = forq.App("ending")


@ending.lifespan
def cannot_end() -> Iterator[None]:
    yield
    raise seen.pop()


@ending.task
def end() -> None:
    pass


def handle(data: Any, job: Job) -> Any:
    return [job.type, data]
