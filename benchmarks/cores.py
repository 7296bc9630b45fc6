"""Jobs that compute for 20 ms in pure Python: one process of a queue, one per CPU, and a multiprocessing pool.

    python benchmarks/cores.py [--rounds 3] [--seconds 4]

All run the same number of the same computations, interleaved, round by round. The table shows medians.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.handlers.burner import burn
from benchmarks.tables import markdown
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

HANDLERS = Path(__file__).resolve().parent / "handlers"
JOB_SECONDS = 0.02


def rounds_for(seconds: float) -> int:
    """How many rounds of `burn` take this long. The fastest of several runs counts: other processes only add to it."""
    sample = 100_000
    fastest = min(_timed(lambda: burn(sample)) for _ in range(20))
    return round(sample * seconds / fastest)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def forq_rate(forq: Forq, processes: int, jobs: int, data: int) -> float:
    """Jobs per second of a queue with this many processes; the jobs are enqueued before it starts them."""
    name = f"burn{processes}"
    queue = forq.client().queue(name)
    before = queue.status()["done"]
    queue.pause()
    queue.enqueue_many([data] * jobs)
    wait_until(lambda: _rest(forq, name) == processes, what="no process runs a job")
    began = time.perf_counter()
    queue.resume()
    wait_until(lambda: queue.status()["done"] == before + jobs, 120.0, "all jobs are done")
    return jobs / (time.perf_counter() - began)


def _rest(forq: Forq, name: str) -> int:
    children = forq.queue_status(name)["children"]
    return sum(child["role"] == "main" and child["state"] in ("idle", "parked") for child in children)


def pool_rate(processes: int, jobs: int, data: int) -> float:
    """Jobs per second of multiprocessing.Pool, which has no queue, no retries and no supervision."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        pool.map(burn, [1] * processes)
        began = time.perf_counter()
        pool.map(burn, [data] * jobs, chunksize=1)
        return jobs / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long one process computes in a round")
    given = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    jobs, data = round(given.seconds / JOB_SECONDS), rounds_for(JOB_SECONDS)
    rates: dict[str, list[float]] = {}
    with running() as forq:
        for processes in (1, cpus):
            settings = [f"processes={processes}", "journal=off"]
            forq.ctl("create", f"burn{processes}", "--handler", "burner:handle", "--path", str(HANDLERS), *settings)
        for number in range(given.rounds):
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
            for processes in (1, cpus):
                found = forq_rate(forq, processes, jobs, data)
                rates.setdefault(f"forq, {processes} process{'es' * (processes > 1)}", []).append(found)
            rates.setdefault(f"multiprocessing.Pool({cpus})", []).append(pool_rate(cpus, jobs, data))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    pool = medians[f"multiprocessing.Pool({cpus})"]
    rows = [[name, f"{rate:.1f}", f"{rate / pool:.0%}"] for name, rate in medians.items()]
    print(markdown(["", "jobs/s", "of the pool"], rows))
    print(f"\n{jobs} jobs of {JOB_SECONDS * 1000:.0f} ms, {given.rounds} rounds; load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
