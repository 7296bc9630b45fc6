"""Sample handlers. A queue calls its handler for each job.

If it returns, the job is done; if it raises, the attempt has failed.
"""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forq import Job


def handle(data: Any, job: "Job") -> None:
    """Prints the job's data."""
    print(f"job {job.id}: hello, {data!r}", flush=True)


def greet(data: Any, job: "Job") -> str:
    return f"hello, {data['name']}"


def slow(data: Any, job: "Job") -> None:
    """Runs for data["seconds"], so that `forqctl status` shows a running job."""
    time.sleep(data["seconds"])
