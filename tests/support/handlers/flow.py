"""An app whose tasks use results of each other: fetch, parse, process, merge."""

import os
import time
from pathlib import Path

import forq

app = forq.App("flow")

# Of one long result.
LONG = 300_000


@app.task
def fetch(count: int) -> list[int]:
    return list(range(count))


@app.task
def parse() -> dict[str, list[int]]:
    (numbers,) = forq.current_job().results()
    return {"numbers": numbers}


@app.task
def process(number: int, stop_at: str = "") -> int:
    """With `stop_at`, the first attempt writes its pid to this file and waits for its end."""
    job = forq.current_job()
    if stop_at and not job.stall_count:
        Path(f"{stop_at}.new").write_text(str(os.getpid()))
        os.rename(f"{stop_at}.new", stop_at)
        time.sleep(600)
    (parsed,) = job.results()
    return int(parsed["numbers"][number]) ** 2


@app.task
def merge() -> list[int]:
    return forq.current_job().results()


@app.task
async def merge_later() -> list[int]:
    return forq.current_job().results()


@app.task
def repeat(letter: str) -> str:
    return letter * LONG


@app.task
def longer() -> str:
    """The results that it gets in one."""
    return "".join(forq.current_job().results())


@app.task
def outline() -> list[list[int | str]]:
    return [[result[0], len(result)] for result in forq.current_job().results()]
