"""A supervisor that writes down the longest pass of its loop: `python -m tests.support.timed_supervisor OUT run ...`.

A pass is what happens between two waits for something to happen. Time in which it could have run and the machine had
no CPU for it is counted apart: that tells of whatever else the machine does.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from forq import cli
from forq.procs.loop import Loop


def measure(out: Path) -> None:
    pid = os.getpid()
    wait = Loop._wait
    longest = (0.0, 0.0)
    began = time.monotonic(), waited_for_a_cpu()

    def timed_wait(loop: Loop, patience_seconds: float | None) -> Any:
        nonlocal longest, began
        if os.getpid() != pid:
            return wait(loop, patience_seconds)
        if not out.exists():
            longest = (0.0, 0.0)
        else:
            wall = time.monotonic() - began[0]
            own = wall - (waited_for_a_cpu() - began[1])
            if wall > longest[0] or own > longest[1]:
                longest = max(wall, longest[0]), max(own, longest[1])
                out.write_text(f"{longest[0] * 1000:.3f} {longest[1] * 1000:.3f}\n")
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
