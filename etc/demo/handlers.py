"""The handlers of the tour: a good one, and three that behave as badly as handlers sometimes do.

Each records when it starts and ends, so that the tour can check its claims.
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
    """Takes data["seconds"], reports its progress, and then waits until the door is opened, if it has one."""
    note(job, "began")
    steps = 10
    for step in range(1, steps + 1):
        time.sleep(data["seconds"] / steps)
        job.progress(step / steps, f"stop {step} of {steps}")
    while "door" in data and not os.path.exists(data["door"]):
        time.sleep(0.05)
    note(job, "ended")


def leave_daemons(data: Any, job: "Job") -> None:
    """Starts data daemons in sessions of their own, and returns as if nothing was."""
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
