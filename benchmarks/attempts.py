"""The CPU time that a worker's own code takes per job, without a server.

    python benchmarks/attempts.py [--jobs 200000] [--rounds 5]

The loop of a worker runs jobs that do nothing, in batches of 128 from a list in memory. With a server, packing and
reading the turns is added, and waiting for them. Rounds are interleaved over the kinds of handlers; the table shows the
median and the least, since other processes disturb caches even where they take no CPU time from this one.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forq import App
from forq.broker.claim import Limits, Turn
from forq.procs.scoreboard import AttemptStats, Scoreboard
from forq.settings import defaults
from forq.workers.attempt import AttemptRunner
from forq.workers.grant import Grant
from forq.workers.handlers import Handlers
from forq.workers.loop import MAX_BATCH, WorkerLoop
from forq.workers.recycling import Recycling

LIMITS = Limits(timeout_ms=60_000, size=1, priority=0)
KEEPS = Limits(timeout_ms=60_000, size=1, priority=0, max_result_bytes=65_536, keeps_results=True)
DATA, ARGUMENTS = b'[null,null,{"n":123}]', b'[null,"add",{"a":5,"b":"xyz"}]'

app = App("bench")


@app.task
def add(a: int, b: str) -> None:
    pass


def plain(data: Any, job: Any) -> None:
    pass


def reader(data: Any, job: Any) -> tuple[str, str, float, int]:
    return job.id, job.identifier, job.enqueued_at, job.attempt


async def coroutine(data: Any, job: Any) -> None:
    pass


# Handler, body of the records, limits.
KINDS: dict[str, tuple[Callable[..., Any], bytes, Limits]] = {
    "handler": (plain, DATA, LIMITS),
    "handler that reads its job": (reader, DATA, LIMITS),
    "handler, results are kept": (plain, DATA, KEEPS),
    "task": (app, ARGUMENTS, LIMITS),
    "coroutine": (coroutine, DATA, LIMITS),
}


class Backlog:
    """Answers turns like a queue with that many jobs. What a worker has not run of a batch comes again."""

    queue = "bench"

    def __init__(self, jobs: int, body: bytes, limits: Limits) -> None:
        self.done = 0
        self._jobs = jobs
        now_us = time.time_ns() // 1000
        ids = [b"%032x" % number for number in range(MAX_BATCH)]
        records = [b"p5 %d\n%b" % (now_us + 3 * number, body) for number in range(MAX_BATCH)]
        flat = [part for pair in zip(ids, records, strict=True) for part in pair]
        self._batch = Turn(False, True, [], str(now_us + 10**6), limits, flat)
        self._nothing = Turn(False, True, [], "", limits, [])

    def turn(self, number: int, done: list[Any], failed: list[Any], keep: int, want: int, results: list[Any]) -> Turn:
        self.done += len(done) // 3
        return self._batch if self.done < self._jobs else self._nothing

    def read_inputs(self, job_id: str, count: int) -> list[bytes] | None:
        return None


def measure(kind: str, jobs: int) -> float:
    """µs of CPU time per job."""
    handler, body, limits = KINDS[kind]
    board, stats = Scoreboard.create(1), AttemptStats(1)
    slot = board.slot(board.take())
    stats.take(slot.number, "bench")
    backlog = Backlog(jobs, body, limits)
    attempts = AttemptRunner("bench", Handlers({None: handler}), slot)
    grant = Grant(lambda message: None, slot.number)
    loop = WorkerLoop(
        backlog,  # type: ignore[arg-type]
        attempts,
        slot,
        expiry_ms=15_000,
        limits=limits,
        grant=grant,
        recycling=Recycling(defaults(), [slot], lambda reason: None),
        on_batch=lambda count: None,
        on_unguarded=lambda: None,
        stats=stats.of_slot(slot.number),
    )
    grant.acquire = lambda units, priority: True  # type: ignore[method-assign]
    began = time.process_time()
    while loop.serve_batch():
        pass
    took = time.process_time() - began
    attempts.close()
    return took / backlog.done * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind in KINDS:
            found[kind].append(measure(kind, given.jobs))
    print(f"{'':28} {'median':>7} {'least':>7}  µs per job")
    for kind, each in found.items():
        print(f"{kind:28} {statistics.median(each):7.2f} {min(each):7.2f}")


if __name__ == "__main__":
    main()
