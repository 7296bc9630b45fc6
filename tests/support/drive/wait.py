"""Waits for a condition, and reads a file that is being written."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[str]:
    """The complete lines of a file that is being appended to; none if it does not exist.

    A reader can see half of a write that crosses a page: text after the last newline is left for the next call.
    """
    return path.read_bytes().rpartition(b"\n")[0].decode().splitlines() if path.exists() else []


def wait_until(condition: Callable[[], Any], seconds: float = 20.0, what: str = "condition") -> Any:
    """Polls `condition` until it returns a true value, and returns it. Fails with the last value after `seconds`."""
    began = now = time.monotonic()
    while True:
        asked, value = now, condition()
        if value:
            return value
        now = time.monotonic()
        if now > began + seconds:
            raise AssertionError(f"{what} was not met within {seconds} s; last: {value!r}")
        # Poll less often in a long wait or when a poll is expensive, to leave the CPU to the code under test.
        time.sleep(max(0.005, min(0.03, (now - began) / 20), now - asked))
        now = time.monotonic()
