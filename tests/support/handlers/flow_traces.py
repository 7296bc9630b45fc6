"""An app whose attempts write traces: flows over two queues, and batches whose members may die or add others."""

import time
from collections.abc import Iterator

import forq
from tests.support.handlers.traced import trace

HOME, PARTS = "home", "parts"
CHILDREN = 3

app = forq.App(HOME)


@app.around
def traced(job: forq.Job) -> Iterator[None]:
    trace(job, "start")
    yield
    trace(job, "end")


@app.task
def fetch(count: int) -> list[int]:
    return list(range(count))


@app.task
def parse(numbers: list[int], factor: int) -> dict[str, list[int]]:
    return {"numbers": [number * factor for number in numbers]}


@app.task(queue=PARTS)
def process(parsed: dict[str, list[int]], number: int, seconds: float) -> int:
    time.sleep(seconds)
    return parsed["numbers"][number]


@app.task
def merge(parts: list[int]) -> list[int]:
    return parts


@app.task
def item(seconds: float) -> None:
    time.sleep(seconds)


@app.task(dead_on=(ValueError,))
def fail(seconds: float) -> None:
    time.sleep(seconds)
    raise ValueError("as asked")


@app.task(queue=PARTS)
def spawn(seconds: float) -> None:
    """A member that adds others to its batch, in both queues."""
    with app.batch_of(forq.current_job()) as batch:
        for number in range(CHILDREN):
            batch.add(item.using(queue=(HOME, PARTS)[number % 2]).prepare(seconds))
            batch.flush()
            time.sleep(seconds)


@app.task
def tell(what: str) -> str:
    """A callback."""
    return what
