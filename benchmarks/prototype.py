"""The limit of one Python consumer: a bare loop that settles a batch and claims the next in one script.

    python benchmarks/prototype.py [--jobs 200000] [--rounds 3]

No fences, counts, journal, options or recovery, on forq's layout (one hash of records). forq cannot be faster than
this; the difference is the cost of its features. Rounds are interleaved over the batch sizes; best of each.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson

from benchmarks.layouts import as_function, claim_source, fill
from benchmarks.processes import DISTURBED_CORES, Quiet, cpu_seconds
from forq.broker.link import Link
from forq.broker.scripts import Script
from tests.support.drive.server import Server

BATCHES = (1, 8, 64, 128)
LAYOUT = "one hash of records"


def drain(link: Link, script: Script, jobs: int, batch: int) -> None:
    settled: list[bytes] = []
    ran = 0
    while ran < jobs:
        flat = link.run(script, "{q}", batch, *settled)
        for record in flat[1::2]:
            handle(*orjson.loads(record[record.index(b"\n") + 1 :]))
        settled = flat[::2]
        ran += len(settled)


def handle(identifier: object, type: object, data: object) -> None:
    return


def measure(server: Server, most_jobs: int, rounds: int) -> dict[int, dict[str, Any]]:
    """By batch size, for its fastest round: jobs per second, and CPU time per job, here and in the server."""
    link = Link(server.url)
    source = claim_source(LAYOUT)
    script = as_function("prototype", source)
    best: dict[int, dict[str, Any]] = {}
    for _ in range(rounds):
        for batch in BATCHES:
            jobs = min(most_jobs, 4000 * batch)
            fill(link, LAYOUT, jobs)
            quiet = Quiet()
            cpu, began = (cpu_seconds(os.getpid()), cpu_seconds(server.pid)), time.perf_counter()
            drain(link, script, jobs, batch)
            seconds = time.perf_counter() - began
            own, servers = cpu_seconds(os.getpid()) - cpu[0], cpu_seconds(server.pid) - cpu[1]
            found: dict[str, Any] = {
                "per_second": jobs / seconds,
                "worker_us": own / jobs * 1e6,
                "redis_us": servers / jobs * 1e6,
            }
            found["disturbed"] = quiet.foreign_share() > DISTURBED_CORES
            # A quiet round beats any disturbed one; among equals the faster wins.
            if batch not in best or _worth(found) > _worth(best[batch]):
                best[batch] = found
    link.close()
    return best


def _worth(found: dict[str, Any]) -> tuple[bool, float]:
    return not found["disturbed"], found["per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    server = Server()
    try:
        server.start()
        best = measure(server, given.jobs, given.rounds)
    finally:
        server.remove()
    print(f"{'batch':>6} {'jobs/s':>10} {'worker µs':>10} {'server µs':>10}")
    for batch, found in best.items():
        print(f"{batch:>6} {found['per_second']:>10,.0f} {found['worker_us']:>10.1f} {found['redis_us']:>10.1f}")


if __name__ == "__main__":
    main()
