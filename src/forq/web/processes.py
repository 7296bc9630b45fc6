"""The processes of this supervisor, read from /proc: the tree as ps shows it, and the memory of each process."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil

# Measuring PSS takes the kernel about a millisecond per process.
PSS_SECONDS = 5.0
MAX_TITLE = 200
_PADDED = re.compile(r" {8,}.*")


@dataclass(frozen=True)
class ProcessRow:
    """One process. `depth` is 0 for the supervisor. `name`: its program, without arguments."""

    pid: int
    depth: int
    title: str
    name: str
    status: str
    rss_bytes: int
    cpu_seconds: float
    started_at: float


def process_tree(root: int) -> list[ProcessRow]:
    """The process `root` and all below it, each behind its parent. One pass over /proc."""
    attributes = ["pid", "ppid", "name", "cmdline", "status", "memory_info", "cpu_times", "create_time"]
    known: dict[int, dict[str, Any]] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(attributes):
        known[process.pid] = process.info
        children[process.info["ppid"]].append(process.pid)
    rows: list[ProcessRow] = []
    left = [(root, 0)]
    while left:
        pid, depth = left.pop()
        if pid not in known:
            continue
        rows.append(_row(known[pid], depth))
        left += [(child, depth + 1) for child in sorted(children[pid], reverse=True) if child != pid]
    return rows


def _row(info: dict[str, Any], depth: int) -> ProcessRow:
    # Fields are None for processes that have ended meanwhile.
    # A title that is shorter than the arguments may leave a piece of them behind its padding.
    title = _PADDED.sub("", " ".join(info["cmdline"] or ())).strip() or info["name"] or ""
    times = info["cpu_times"]
    return ProcessRow(
        pid=info["pid"],
        depth=depth,
        title=title[:MAX_TITLE],
        name=info["name"] or "",
        status=info["status"] or "",
        rss_bytes=0 if info["memory_info"] is None else info["memory_info"].rss,
        cpu_seconds=0.0 if times is None else times.user + times.system,
        started_at=info["create_time"] or 0.0,
    )


class Memory:
    """The PSS of processes: their share of the memory, which forked processes have in common. Each is measured at most
    once per PSS_SECONDS. For one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._measured: dict[int, tuple[float, int | None]] = {}

    def pss(self, pids: Iterable[int]) -> dict[int, int | None]:
        """In bytes; None for processes that have ended or cannot be read."""
        now = self._now()
        fresh = {pid: known for pid, known in self._measured.items() if now - known[0] < PSS_SECONDS}
        found = {pid: fresh[pid] if pid in fresh else (now, _measure(pid)) for pid in pids}
        self._measured = fresh | found
        return {pid: size for pid, (_, size) in found.items()}


def _measure(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return None
