"""The handlers of the tour: two good ones, one that leaves daemons, and one that hangs.

Each records when it starts and ends, so that the tour can check its results.
"""

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forq import Job


def note(job: "Job", event: str) -> None:
    """One line: queue, job, event, pid, time."""
    with open(os.environ["DEMO_NOTES"], "a") as notes:
        notes.write(f"{job.queue} {job.id} {event} {os.getpid()} {time.time()}\n")


def greet(data: Any, job: "Job") -> None:
    note(job, "began")
    print(f"Hello, {data['name']}!")


def deliver(data: Any, job: "Job") -> None:
    """Runs for data["seconds"] and reports its progress, then waits until the file data["door"] exists, if given."""
    note(job, "began")
    steps = 10
    for step in range(1, steps + 1):
        time.sleep(data["seconds"] / steps)
        job.progress(step / steps, f"stop {step} of {steps}")
    while "door" in data and not os.path.exists(data["door"]):
        time.sleep(0.05)
    note(job, "ended")


def leave_daemons(data: Any, job: "Job") -> None:
    """Starts `data` daemons, each in its own session, and returns."""
    for _ in range(data):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                note(job, "daemon")
                time.sleep(3600)
            os._exit(0)
        os.wait()


def hang(data: Any, job: "Job") -> None:
    note(job, "began")
    wait_for_a_reply_that_never_comes()


def wait_for_a_reply_that_never_comes() -> None:
    while True:
        time.sleep(3600)
