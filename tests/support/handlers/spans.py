"""Handlers that open spans."""

import asyncio
from typing import Any

from opentelemetry import trace

from forq import Job


def inside(data: Any, job: Job) -> None:
    with trace.get_tracer("app").start_as_current_span("inside"):
        if data == "fail once" and job.retry_count == 0:
            raise ValueError("no")


async def inside_async(data: Any, job: Job) -> None:
    with trace.get_tracer("app").start_as_current_span("inside"):
        await asyncio.sleep(0)
