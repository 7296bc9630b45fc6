"""Tasks that query the databases, and write a line about each attempt to the file DJANGO_TEST_NOTES."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from forq import Job
from forq.contrib.django import app


def on_dead(data: Any, job: Job) -> None:
    with noted("on_dead"):
        query("default")


app.queue("threads", concurrency=3, on_dead=on_dead)
app.queue("coroutines", concurrency=3)


@contextmanager
def noted(kind: str) -> Iterator[None]:
    """Notes when the block began, and whether it failed."""
    began = time.time()
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        line = f"{kind} {outcome} {began}\n".encode()
        with open(os.environ["DJANGO_TEST_NOTES"], "ab", buffering=0) as notes:
            notes.write(line)


def query(*aliases: str) -> None:
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_sleep(0.005)")


@app.around
def query_before(job: Job) -> Iterator[None]:
    if job.type == "queries.in_thread":
        with noted("hook"):
            query("default")
    yield


@app.task(queue="threads", max_retries=20, backoff=0.3)
def in_thread() -> None:
    with noted("thread"):
        query("default", "other")


@app.task(queue="threads", max_retries=0)
def dies() -> None:
    raise ValueError("no")


@app.task(queue="coroutines", max_retries=20, backoff=0.3)
async def in_coroutine() -> None:
    with noted("coroutine"):
        await sync_to_async(query)("default", "other")
        if not os.environ.get("DJANGO_TEST_POOL"):
            # In a thread that nobody closes connections in. From a pool, it would never be given back.
            await asyncio.to_thread(query, "default")


def plain(data: Any, job: Job) -> None:
    with noted("plain"):
        query("default")
