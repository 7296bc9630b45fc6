"""An app with a task of each kind, for tests with a real supervisor."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

import forq

app = forq.App("shop")


@dataclass(frozen=True)
class Receipt:
    to: str
    total: Decimal
    attempts: int


@app.task
def bill(to: str, prices: list[Decimal], delay: timedelta = timedelta()) -> Receipt:
    job = forq.current_job()
    if job.retry_count == 0 and to == "again":
        raise RuntimeError("try again")
    return Receipt(to, sum(prices, Decimal()), job.retry_count + 1)


@app.task
async def greet(name: str) -> str:
    await asyncio.sleep(0.01)
    return f"hello {name}, this is {forq.current_job().type}"


@app.task(dead_on=(LookupError,))
def find(key: str) -> str:
    return {"a": "b"}[key]
