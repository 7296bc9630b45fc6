"""Cost of a call with a long backlog: the server's time per enqueue and claim at 10, 10k and 1M jobs.

    python benchmarks/backlog.py [--calls 1000] [--rounds 12]

Measured in the server (INFO commandstats), without client and socket. Rounds are interleaved over the sizes; each
figure is the best round, the least disturbed one.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forq import Client
from forq.broker.claim import Consumer, Settled
from forq.job import new_id
from tests.support.drive.server import Server

SIZES = (10, 10_000, 1_000_000)
BATCH = 64


def server_micros(client: Client, calls: Callable[[], int]) -> float:
    """The server's time per job of `calls`, which returns the number of its jobs."""
    client.link().call("CONFIG", "RESETSTAT")
    jobs = calls()
    stats = client.link().call("INFO", "commandstats").decode()
    line = next(line for line in stats.splitlines() if line.startswith("cmdstat_fcall:"))
    return int(line.partition("usec=")[2].partition(",")[0]) / jobs


def enqueue(client: Client, name: str, calls: int) -> int:
    queue = client.queue(name)
    for number in range(calls):
        queue.enqueue({"n": number})
    return calls


class Worker:
    """Claims and settles as many jobs as were enqueued, `want` at a time, so that the backlog keeps its size."""

    def __init__(self, client: Client, name: str) -> None:
        self._consumer = Consumer(client.url, client.prefix, name, new_id(), new_id())
        self._consumer.join(3_600_000)
        self._number = 0

    def drain(self, jobs: int, want: int) -> int:
        done: Settled = []
        ran = 0
        while ran < jobs:
            self._number += 1
            turn = self._consumer.turn(self._number, done, [], 0, want)
            done = [part for job_id in turn.jobs[::2] for part in (job_id, turn.fence, 1)]
            ran += len(turn.jobs) // 2
        self._number += 1
        self._consumer.turn(self._number, done, [], 0, 0)
        return ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    server = Server()
    server.start()
    best: dict[tuple[str, int], float] = {}
    try:
        client = Client(server.url)
        workers = {}
        for size in SIZES:
            print(f"filling a queue with {size:,} jobs", file=sys.stderr)
            client.create_queue(f"q{size}").enqueue_many({"n": n} for n in range(size))
            workers[size] = Worker(client, f"q{size}")
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for size in SIZES:
                measures: dict[str, Callable[[], int]] = {
                    "enqueue, one": lambda size=size: enqueue(client, f"q{size}", arguments.calls),
                    "claim, one": lambda size=size: workers[size].drain(arguments.calls, 1),
                }
                for what, calls in measures.items():
                    best[what, size] = min(best.get((what, size), 1e9), server_micros(client, calls))
                enqueue(client, f"q{size}", arguments.calls)
                what, batched = f"claim, {BATCH}", lambda size=size: workers[size].drain(arguments.calls, BATCH)
                best[what, size] = min(best.get((what, size), 1e9), server_micros(client, batched))
    finally:
        server.remove()
    print("server µs per job   " + "".join(f"{size:>12,}" for size in SIZES) + "     worst / best")
    for what in dict.fromkeys(what for what, _ in best):
        row = [best[what, size] for size in SIZES]
        print(f"{what:18}  " + "".join(f"{value:12.2f}" for value in row) + f"     {max(row) / min(row):8.2f}")


if __name__ == "__main__":
    main()
