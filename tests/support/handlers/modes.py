"""An app whose tasks note what they do in a file, whichever process runs them."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import forq
from forq import Job, Permanent, RetryAt, Snooze, current_job

# Names the file.
NOTES = "TEST_MODES_NOTES"
# Long enough that a test sees a job before its retry.
BACKOFF_SECONDS = 0.2

app = forq.App("modes")
MODULE_APPS = ("tests.support.handlers.modes:app", "tests.support.handlers.modes:hooked")


def note(*words: object) -> None:
    with open(os.environ[NOTES], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def notes() -> list[str]:
    """What jobs and their hooks have noted."""
    return [line for line in _lines() if not line.startswith("enter")]


def entered() -> list[str]:
    """The lifespans that were entered. A process of a supervisor may do that at any time."""
    return [line for line in _lines() if line.startswith("enter")]


def _lines() -> list[str]:
    return Path(os.environ[NOTES]).read_text().splitlines()


@dataclass
class Order:
    number: int
    due: datetime
    tags: list[str]


@app.task
def add(left: int, right: int = 1) -> int:
    return left + right


@app.task
async def add_later(left: int, right: int) -> int:
    await asyncio.sleep(0.001)
    return left + right


@app.task
def deliver(order: Order) -> Order:
    return Order(order.number + 1, order.due, [*order.tags, type(order).__name__])


@app.task
def total() -> int:
    """The sum of the results of other jobs."""
    return sum(number or 0 for number in current_job().results())


@app.task
async def total_later() -> list[Any]:
    await asyncio.sleep(0.001)
    return current_job().results()


@app.task
def silent(word: str) -> None:
    note(word)


@app.task(max_retries=2, backoff=[BACKOFF_SECONDS])
def flaky(word: str, good_from: int) -> str:
    job = current_job()
    note(word, job.attempt, job.is_last)
    if job.attempt < good_from:
        raise ConnectionError(f"attempt {job.attempt}")
    return f"{word} in attempt {job.attempt}"


@app.task(max_retries=0)
def fail(message: str) -> int:
    raise ValueError(message)


@app.task(max_retries=5)
def refuse(message: str) -> int:
    note("refuse")
    raise Permanent(message)


@app.task(max_retries=5, dead_on=(KeyError,))
def look_up(key: str) -> int:
    note("look up")
    raise KeyError(key)


@app.task
def snooze_once(seconds: float) -> str:
    """Snoozes again and again if `seconds` is negative."""
    job = current_job()
    note("attempt", job.attempt, "snoozes", job.snoozes)
    if not job.snoozes or seconds < 0:
        raise Snooze(max(0.0, seconds))
    return f"attempt {job.attempt}"


@app.task(max_retries=1)
def retry_at(when: float) -> int:
    attempt = current_job().attempt
    note("attempt", attempt)
    if attempt == 1:
        raise RetryAt(datetime.fromtimestamp(when, UTC))
    return attempt


@app.task
def enqueue_same_id(left: int) -> str:
    if left:
        note("runs", left)
        behind = enqueue_same_id.using(id=current_job().id).enqueue(left - 1)
        note("enqueued", behind.state())
    return f"left {left}"


@app.task
def count_down(number: int) -> None:
    note("count", number)
    if number:
        count_down.enqueue(number - 1)


@app.task
def about() -> dict[str, Any]:
    job = current_job()
    return {"id": job.id, "queue": job.queue, "attempt": job.attempt, "priority": job.priority, "type": job.type}


@app.task
def unstorable() -> int:
    return "text"  # type: ignore[return-value]


@app.task(timeout=0.2, max_retries=0)
async def hang() -> int:
    note("hang")
    await asyncio.sleep(60)
    return 1


@app.task(queue="lane", max_retries=0)
def last_try(good_from: int) -> str:
    attempt = current_job().attempt
    note("lane", attempt)
    if attempt < good_from:
        raise OSError("not yet")
    return f"attempt {attempt}"


@app.task
def ticked() -> None:
    tick = current_job().tick
    note("tick", "none" if tick is None else tick.year)


def buried(data: Any, job: Job) -> None:
    original, about, error = data
    note("dead", original, about["id"], about["type"], error["name"])


app.queue("modes", on_dead=buried, retry_lane_retries=0, jitter=0, max_timeouts=0)
app.queue("lane", retry_lane_retries=1, min_backoff=0.05, max_backoff=0.05)
app.queue("other")


hooked = forq.App("hooked")


@hooked.lifespan
def resources() -> Iterator[None]:
    note("enter")
    yield


@hooked.lifespan
async def async_resources() -> AsyncIterator[None]:
    await asyncio.sleep(0)
    note("enter async")
    yield


@hooked.around
def outer(job: Job) -> Iterator[None]:
    note("outer", job.type)
    try:
        yield
    except ValueError as exc:
        note("saw", exc)
    note("outer end")


@hooked.around
def inner(job: Job) -> Iterator[None]:
    note("inner")
    try:
        yield
    finally:
        note("inner end")


@hooked.task(max_retries=0)
def greet(name: str) -> str:
    if not name:
        raise ValueError("nobody")
    note("greet", name)
    return f"hello {name}"


@hooked.task
async def agreet(name: str) -> str:
    note("agreet", name)
    return f"hello {name}"


def handle(data: Any, job: Job) -> Any:
    """A plain handler."""
    note("plain", job.id, job.type)
    if data == "bad":
        raise Permanent("bad data")
    return {"got": data}


def handle_typed(data: Any, job: Job) -> Any:
    return f"{job.type}: {data}"


def plain_failed(data: Any, job: Job) -> None:
    note("plain dead", data[0], data[1]["id"])
