"""The measures for every peer: each returns the figures and samples of one Trial.

A worker always starts after its jobs are stored, and only the time from its first line to its last counts, so startup
time is excluded.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.figures import poisson_ns
from benchmarks.processes import cpu_seconds, tree_pss_mb
from benchmarks.roster import Peer
from benchmarks.servers import BenchServer
from benchmarks.worker import Bench, Failed, Record


@dataclass(frozen=True)
class Effort:
    """How much a run measures."""

    enqueue_seconds: float
    drain_seconds: float
    pickup_jobs: int
    trickle_seconds: float
    idle_seconds: float
    steady_seconds: float
    load_seconds: float
    backlogs: tuple[int, ...]
    backlog_jobs: int
    # Limit after which a step counts as hung.
    patience_seconds: float = 90.0


FULL = Effort(3.0, 4.0, 400, 10.0, 5.0, 5.0, 40.0, (10, 10_000, 1_000_000), 5_000)
QUICK = Effort(0.5, 0.7, 100, 3.0, 1.0, 1.0, 5.0, (10, 10_000), 1_000, patience_seconds=40.0)

Figures = dict[str, float]
PICKUP_PER_SECOND = 40.0
TRICKLE_PER_SECOND = 200.0
# Jobs of a trickle that come before the measurement.
_TRICKLE_WARM_UP = 200
# One line per this many parts of a drain.
_LINES = 1000


def enqueue_one(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
    """Calls per second of one producer that waits for each answer."""
    with Bench(peer, server) as bench:
        before = server.cpu_seconds()
        count, seconds = bench.enqueue("one", effort.enqueue_seconds, 200_000, timeout_seconds=effort.patience_seconds)
        if not count:
            raise Failed("nothing was enqueued")
        used = server.cpu_seconds() - before
        return {"per_second": count / seconds, "redis_us": used / count * 1e6}, []


def enqueue_bulk(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
    """Jobs per second of one producer with the peer's bulk call, 1,000 at a time."""
    jobs = int(min(5 * peer.nominal_rate, 40_000) * effort.enqueue_seconds)
    with Bench(peer, server) as bench:
        before = server.used_memory()
        count, seconds = bench.fill(jobs, effort.patience_seconds)
        return {"per_second": count / seconds, "bytes_per_job": (server.used_memory() - before) / count}, []


def drain(
    peer: Peer, server: BenchServer, effort: Effort, number: int, workers: int = 1
) -> tuple[Figures, list[float]]:
    """Jobs per second of `workers` workers, and the CPU time per job of the workers and the server."""
    # With two, the window opens when the second has begun, and enough jobs must be left for it.
    jobs = max(200, int(peer.nominal_rate * effort.drain_seconds * (1 if workers == 1 else 4)))
    block = max(1, jobs // _LINES)
    with Bench(peer, server, block=block) as bench:
        bench.fill(jobs, effort.patience_seconds)
        for _ in range(workers):
            bench.work()
        _wait_for_all(bench, workers, effort.patience_seconds)
        pids = bench.pids()
        opened = _sample(bench, pids)
        # Each worker may hold back less than a block.
        records = bench.wait_for_records(jobs // block - workers + 1, effort.patience_seconds)
        closed = _sample(bench, pids)
        return {"per_second": drain_rate(records, block, workers)} | costs(opened, closed, block), []


class Sample(NamedTuple):
    """CPU time at a moment, and the number of lines just before and just after it."""

    before: int
    worker_seconds: float
    redis_seconds: float
    after: int


def _sample(bench: Bench, pids: list[int]) -> Sample:
    before = len(bench.records())
    return Sample(before, cpu_seconds(*pids), bench.server.cpu_seconds(), len(bench.records()))


def costs(opened: Sample, closed: Sample, block: int) -> Figures:
    """CPU µs per job; empty if the samples took too long to be attributed to a number of jobs."""
    lines = (closed.before + closed.after - opened.before - opened.after) / 2
    unsure = (opened.after - opened.before + closed.after - closed.before) / 2
    if lines <= 0 or unsure > 0.05 * lines:
        return {}
    return {
        "worker_us": (closed.worker_seconds - opened.worker_seconds) / (lines * block) * 1e6,
        "redis_us": (closed.redis_seconds - opened.redis_seconds) / (lines * block) * 1e6,
    }


def drain_two(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
    return drain(peer, server, effort, number, workers=2)


def drain_rate(records: list[Record], block: int, workers: int) -> float:
    """Jobs per second from the moment when every worker had begun to the last job."""
    first: dict[int, int] = {}
    for record in records:
        first[record.pid] = min(record.started_ns, first.get(record.pid, record.started_ns))
    if len(first) < workers:
        raise Failed(f"only {len(first)} of {workers} workers got jobs")
    opened_ns, closed_ns = max(first.values()), max(record.started_ns for record in records)
    # The line that opens the window counts for the jobs before it.
    inside = sum(1 for record in records if record.started_ns > opened_ns)
    if inside < 10:
        raise Failed("too few jobs were left when the last worker had begun")
    return inside * block / ((closed_ns - opened_ns) / 1e9)


def pickup(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
    """How long a job waits for an idle worker: from its enqueue to the start of its handler."""
    with Bench(peer, server) as bench:
        bench.work()
        bench.warm(effort.patience_seconds)
        known = len(bench.records())
        bench.arrive(poisson_ns(PICKUP_PER_SECOND, effort.pickup_jobs, number))
        records = bench.wait_for_records(known + effort.pickup_jobs, effort.patience_seconds)[known:]
        return {}, [(record.started_ns - record.sent_ns) / 1e6 for record in records]


def trickle(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
    """The CPU time per job of the workers and the server while jobs come one by one, 200 a second at random times.

    Includes what the server needs to take in the job, and what both would need while idle.
    """
    jobs = _TRICKLE_WARM_UP + round(TRICKLE_PER_SECOND * effort.trickle_seconds)
    with Bench(peer, server) as bench:
        bench.work()
        bench.warm(effort.patience_seconds)
        known = len(bench.records())
        with bench.arriving(poisson_ns(TRICKLE_PER_SECOND, jobs, number)):
            bench.wait_for_records(known + _TRICKLE_WARM_UP, effort.patience_seconds, look_seconds=0.05)
            pids = bench.pids()
            opened = _sample(bench, pids)
            allowed_seconds = effort.patience_seconds + effort.trickle_seconds
            records = bench.wait_for_records(known + jobs, allowed_seconds, look_seconds=0.05)
            closed = _sample(bench, pids)
        waits = [(record.started_ns - record.sent_ns) / 1e6 for record in records[known + _TRICKLE_WARM_UP :]]
        return costs(opened, closed, block=1), waits


def idle(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
    """Memory, CPU and requests of an idle worker that has run a job."""
    with Bench(peer, server) as bench:
        worker = bench.work()
        bench.warm(effort.patience_seconds)
        time.sleep(1.0)  # work left over from the first job is not idle time
        pids = bench.pids()
        requests, cpu, began = server.requests(), cpu_seconds(*pids), time.monotonic()
        time.sleep(effort.idle_seconds)
        seconds = time.monotonic() - began
        return {
            "pss_mb": tree_pss_mb(worker.pid),
            "cpu_percent": (cpu_seconds(*pids) - cpu) / seconds * 100,
            "requests_per_second": requests.count() / seconds,
        }, []


def _wait_for_all(bench: Bench, workers: int, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    while len({record.pid for record in bench.records()}) < workers:
        bench.wait_for_records(min(1, workers), patience_seconds)
        if time.monotonic() > deadline:
            raise Failed(f"not all of {workers} workers got jobs")
        time.sleep(0.005)


MEASURES = {
    "enqueue": enqueue_one,
    "bulk": enqueue_bulk,
    "drain": drain,
    "drain2": drain_two,
    "pickup": pickup,
    "trickle": trickle,
    "idle": idle,
}
