"""Runs a supervisor and records the longest pass of its loop: `python -m tests.end_to_end.timed_supervisor OUT run …`.

A pass is the time between two waits for events. Time in which the process was runnable but had no CPU is counted
apart, since other processes cause it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from forq import cli
from forq.procs.loop import Loop


def measure(out: Path) -> None:
    """Writes to OUT/0 until OUT/1 exists, and so on."""
    pid = os.getpid()
    wait = Loop._wait
    longest: tuple[int, float, float] = (-1, 0.0, 0.0)
    began = time.monotonic(), waited_for_a_cpu()

    def timed_wait(loop: Loop, patience_seconds: float | None) -> Any:
        nonlocal longest, began
        if os.getpid() != pid:
            return wait(loop, patience_seconds)
        window = len(os.listdir(out)) - 1
        if window >= 0:
            wall = time.monotonic() - began[0]
            own = wall - (waited_for_a_cpu() - began[1])
            before = longest if longest[0] == window else (window, 0.0, 0.0)
            longest = (window, max(wall, before[1]), max(own, before[2]))
            if longest != before:
                new = out.with_suffix(".new")
                new.write_text(f"{longest[1] * 1000:.3f} {longest[2] * 1000:.3f}\n")
                os.replace(new, out / str(window))
        found = wait(loop, patience_seconds)
        began = time.monotonic(), waited_for_a_cpu()
        return found

    Loop._wait = timed_wait  # type: ignore[method-assign, assignment]


def waited_for_a_cpu() -> float:
    """Seconds since the start of this process."""
    with open("/proc/self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9


if __name__ == "__main__":
    measure(Path(sys.argv.pop(1)))
    sys.argv[0] = "forq"
    sys.exit(cli.main())
