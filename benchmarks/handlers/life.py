"""A handler for queues with a life: most jobs succeed, some fail once, some for good, a few kill their process."""

import os
import zlib
from typing import Any

from forq import Job, Permanent


def handle(data: Any, job: Job) -> None:
    chance = zlib.crc32(job.id.encode()) % 100_000
    if chance < 10 and job.stall_count == 0:
        os._exit(9)
    if chance < 200:
        raise Permanent("never")
    if chance < 1500 and job.retry_count == 0:
        raise ValueError("not yet")


def on_fail(data: Any, job: Job) -> None:
    """Every hundredth is tried twice."""
    if job.retry_count == 0 and zlib.crc32(job.id.encode()) % 100 == 0:
        raise ValueError("once more")
