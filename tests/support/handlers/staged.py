"""A handler for the stage of the dashboard's tests: each job does what its data says.

A job without `do` succeeds at once.
"""

import logging
import os
import signal
import time
from typing import Any

from forq import Job


def handle(data: Any, job: Job) -> Any:
    wish = data if isinstance(data, dict) else {}
    for line in wish.get("lines", ()):
        print(line)
    do = wish.get("do")
    if do == "hang":
        return hang(wish, job)
    if do == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "fail":
        fail(wish["error"], wish["message"])
    return wish.get("result")


def hang(wish: dict[str, Any], job: Job) -> str:
    """Waits for the file `gate`. Each line that is appended to the file `gate`.lines is logged."""
    job.progress(wish.get("fraction", 0.0), wish.get("text", ""))
    said = 0
    while not os.path.exists(wish["gate"]):
        said += say_new_lines(f"{wish['gate']}.lines", said)
        time.sleep(0.02)
    return "let go"


def say_new_lines(path: str, said: int) -> int:
    if not os.path.exists(path):
        return 0
    with open(path) as file:
        lines = file.read().splitlines()[said:]
    for line in lines:
        logging.getLogger("staged").warning("%s", line)
    return len(lines)


def fail(name: str, message: str) -> None:
    """Raises an exception whose class has that name."""
    raise type(name, (Exception,), {})(message)
