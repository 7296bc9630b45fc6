"""Measures for forq and the fastest peers only: waiting under load, and the cost of a long backlog."""

from benchmarks.figures import least_waits_ms, percentiles, poisson_ns
from benchmarks.measures import Effort, Figures
from benchmarks.processes import cpu_seconds
from benchmarks.roster import Peer
from benchmarks.worker import Bench
from tests.support.server import Server

SERVICE_MS = 5.0
LOADS = (50, 90)


def load(peer: Peer, server: Server, effort: Effort, number: int, percent: int) -> tuple[Figures, list[float]]:
    """Jobs of 5 ms, one at a time, that arrive at random at so many percent of 200 per second: how long each waits.

    The same arrivals for every peer of a round, so that `least_waits` is the same floor for all.
    """
    times = load_arrivals(percent, effort.load_seconds, number)
    with Bench(peer, server, concurrency=1) as bench:
        bench.work()
        bench.warm(effort.patience_seconds)
        known = len(bench.records())
        bench.arrive(times, SERVICE_MS)
        allowed_seconds = effort.patience_seconds + effort.load_seconds
        records = bench.wait_for_records(known + len(times), allowed_seconds)[known:]
        return {}, [(record.started_ns - record.sent_ns) / 1e6 for record in records]


def load_arrivals(percent: int, seconds: float, seed: int) -> list[int]:
    rate = 1000 / SERVICE_MS * percent / 100
    return poisson_ns(rate, int(rate * seconds), seed)


def load_floor(percent: int, seconds: float, rounds: int) -> dict[str, float]:
    """What jobs would wait where a queue costs nothing."""
    waits = [
        wait for number in range(rounds) for wait in least_waits_ms(load_arrivals(percent, seconds, number), SERVICE_MS)
    ]
    return percentiles(waits)


def backlog(peer: Peer, server: Server, effort: Effort, number: int, waiting: int) -> tuple[Figures, list[float]]:
    """The server's time per enqueue, and per job that is run, while so many wait."""
    jobs = effort.backlog_jobs
    with Bench(peer, server, block=max(1, jobs // 100)) as bench:
        bench.fill(waiting, effort.patience_seconds + waiting / 5_000)
        before = cpu_seconds(server.pid)
        count, seconds = bench.enqueue("one", 3600.0, jobs, timeout_seconds=effort.patience_seconds)
        enqueue_us = (cpu_seconds(server.pid) - before) / count * 1e6
        # The worker's connecting is in it, a small part of so many jobs: a fast worker has run many of them before
        # anybody could see that it has begun.
        before = cpu_seconds(server.pid)
        bench.work()
        ran = len(bench.wait_for_records(jobs // bench.block, effort.patience_seconds)) * bench.block
        run_us = (cpu_seconds(server.pid) - before) / ran * 1e6
        return {"enqueue_per_second": count / seconds, "enqueue_redis_us": enqueue_us, "run_redis_us": run_us}, []
