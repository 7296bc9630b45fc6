"""Measures only for forq and the fastest peers: jobs of 5 ms, waits under load, the cost of a long backlog."""

import threading
import time

from benchmarks.figures import least_waits_ms, percentiles, poisson_ns
from benchmarks.measures import Effort, Figures
from benchmarks.roster import Peer
from benchmarks.servers import BenchServer
from benchmarks.worker import Bench

SERVICE_MS = 5.0
LOADS = (50, 90)
STEADY_CONCURRENCY = (1, 20)


def load(peer: Peer, server: BenchServer, effort: Effort, number: int, percent: int) -> tuple[Figures, list[float]]:
    """Jobs of 5 ms, one at a time, that arrive at random at this percentage of 200 per second: the wait of each.

    All peers of a round get the same arrivals, so that `least_waits` is the same floor for all.
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


def steady(
    peer: Peer, server: BenchServer, effort: Effort, number: int, concurrency: int
) -> tuple[Figures, list[float]]:
    """Jobs of 5 ms that all wait already: jobs per second, and their share of threads that only sleep."""
    jobs = int(concurrency * 1000 / SERVICE_MS * effort.steady_seconds)
    with Bench(peer, server, concurrency=concurrency) as bench:
        bench.arrive([0] * jobs, SERVICE_MS)
        bench.work()
        records = bench.wait_for_records(jobs, effort.patience_seconds + effort.steady_seconds)
    started = sorted(record.started_ns for record in records)
    # From when all run to when the last ones begin: excludes startup and the tail.
    first, last = started[2 * concurrency], started[-2 * concurrency]
    rate = (len(started) - 4 * concurrency) / ((last - first) / 1e9)
    return {"per_second": rate, "percent": rate / sleeps_per_second(concurrency) * 100}, []


def sleeps_per_second(threads: int, seconds: float = 1.0) -> float:
    """The maximum for this many workers: how often threads of one process can sleep 5 ms."""
    ends_at = time.monotonic() + seconds
    counts = [0] * threads

    def sleep(number: int) -> None:
        while time.monotonic() < ends_at:
            time.sleep(SERVICE_MS / 1000)
            counts[number] += 1

    running = [threading.Thread(target=sleep, args=(number,)) for number in range(threads)]
    began = time.monotonic()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / (time.monotonic() - began)


def load_arrivals(percent: int, seconds: float, seed: int) -> list[int]:
    rate = 1000 / SERVICE_MS * percent / 100
    return poisson_ns(rate, int(rate * seconds), seed)


def load_floor(percent: int, seconds: float, rounds: int) -> dict[str, float]:
    """The waits of jobs in a queue without overhead."""
    waits = [
        wait for number in range(rounds) for wait in least_waits_ms(load_arrivals(percent, seconds, number), SERVICE_MS)
    ]
    return percentiles(waits)


def backlog(peer: Peer, server: BenchServer, effort: Effort, number: int, waiting: int) -> tuple[Figures, list[float]]:
    """The server's time per enqueue, and per run job, while this many wait."""
    jobs = effort.backlog_jobs
    with Bench(peer, server, block=max(1, jobs // 100)) as bench:
        bench.fill(waiting, effort.patience_seconds + waiting / 5_000)
        before = server.cpu_seconds()
        count, seconds = bench.enqueue("one", 3600.0, jobs, timeout_seconds=effort.patience_seconds)
        enqueue_us = (server.cpu_seconds() - before) / count * 1e6
        # Includes the worker's connection setup, which is small: a fast worker has run many jobs before its
        # start is detected.
        before = server.cpu_seconds()
        bench.work()
        ran = len(bench.wait_for_records(jobs // bench.block, effort.patience_seconds)) * bench.block
        run_us = (server.cpu_seconds() - before) / ran * 1e6
        return {"enqueue_per_second": count / seconds, "enqueue_redis_us": enqueue_us, "run_redis_us": run_us}, []
