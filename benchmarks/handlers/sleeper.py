"""Takes as long as it is told, and leaves when it ended in a file: the benchmark compares that with a simulation."""

import os
import time
from typing import Any

from forq import Job

_fd = -1


def handle(data: Any, job: Job) -> None:
    global _fd
    if _fd < 0:
        _fd = os.open(os.environ["WORKLOAD_ENDS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    time.sleep(data)
    os.write(_fd, f"{job.id} {time.monotonic_ns()}\n".encode())
