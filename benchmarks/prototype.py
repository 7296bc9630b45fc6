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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson

from benchmarks.layouts import as_function, claim_source, fill
from benchmarks.processes import cpu_seconds
from benchmarks.servers import RedisServer
from forq.broker.link import Link
from forq.broker.scripts import Script

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


def measure(server: RedisServer, most_jobs: int, batch: int) -> dict[str, float]:
    """Jobs per second, and CPU time per job, here and in the server."""
    link = Link(server.url)
    script = as_function("prototype", claim_source(LAYOUT))
    jobs = min(most_jobs, 4000 * batch)
    fill(link, LAYOUT, jobs)
    cpu, began = (cpu_seconds(os.getpid()), server.cpu_seconds()), time.perf_counter()
    drain(link, script, jobs, batch)
    seconds = time.perf_counter() - began
    own, servers = cpu_seconds(os.getpid()) - cpu[0], server.cpu_seconds() - cpu[1]
    link.close()
    return {"per_second": jobs / seconds, "worker_us": own / jobs * 1e6, "redis_us": servers / jobs * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    server = RedisServer()
    rounds: dict[int, list[dict[str, float]]] = {batch: [] for batch in BATCHES}
    try:
        server.start()
        for _ in range(given.rounds):
            for batch, every in rounds.items():
                server.flush()
                every.append(measure(server, given.jobs, batch))
    finally:
        server.remove()
    print(f"{'batch':>6} {'jobs/s':>10} {'worker µs':>10} {'server µs':>10}")
    for batch, every in rounds.items():
        found = max(every, key=lambda figures: figures["per_second"])
        print(f"{batch:>6} {found['per_second']:>10,.0f} {found['worker_us']:>10.1f} {found['redis_us']:>10.1f}")


if __name__ == "__main__":
    main()
