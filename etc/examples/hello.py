"""Sample handlers: what a queue calls for each job.

A return, whatever the value, means the job is done. An exception means it has failed.
"""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forq import Job


def handle(data: Any, job: "Job") -> None:
    """Prints what it was given."""
    print(f"job {job.id}: hello, {data!r}", flush=True)


def greet(data: Any, job: "Job") -> str:
    return f"hello, {data['name']}"


def slow(data: Any, job: "Job") -> None:
    """Takes data["seconds"], to have something to look at in `forqctl status`."""
    time.sleep(data["seconds"])
