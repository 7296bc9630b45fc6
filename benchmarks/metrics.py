"""Cost of metrics: CPU time of a worker per no-op job with and without [metrics], and a scrape of many queues.

    python benchmarks/metrics.py [--rounds 5] [--jobs 100000] [--queues 1000]

Rounds are interleaved; the table shows the median of each. The queues of the scrape are in Redis without processes, and
the status of their supervisor is made up.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from drain import forq_rates

from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.procs import jsonrpc
from forq.procs.scoreboard import AttemptStats, Scoreboard
from forq.procs.unix_socket import listen
from forq.services.metrics import faults_in
from forq.services.metrics_page import render
from forq.services.snapshot import Sampler
from forq.settings import WORK, defaults, stored, stored_defaults
from tests.support.drive.metrics import make_snapshot, queue_status
from tests.support.drive.server import Server

WITH = '[metrics]\nlisten = "./m.sock"\n'


def hot_path(server: Server, rounds: int, jobs: int) -> None:
    spent: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name in ("without", "with") if number % 2 else ("with", "without"):
            spent[name].append(forq_rates(server, jobs, WITH if name == "with" else "")["worker_us"])
    medians = {name: statistics.median(values) for name, values in spent.items()}
    print(f"CPU time of the worker per no-op job, {rounds} rounds of {jobs:,} jobs")
    for name, values in spent.items():
        print(f"{name:8} {medians[name]:7.2f} µs   {' '.join(f'{value:.2f}' for value in values)}")
    print(f"metrics cost {medians['with'] - medians['without']:.2f} µs per job")


def answer_status(listener: Any, status: dict[str, Any]) -> None:
    """Answers like the supervisor."""
    line = jsonrpc.result(1, status)
    while True:
        client, _ = listener.accept()
        with client:
            client.recv(4096)
            client.sendall(line)


def scrape(server: Server, queues: int, rounds: int) -> None:
    server.flush()
    names = [f"queue-{number}" for number in range(queues)]
    registry = Registry(Link(server.url), "forq:")
    board, stats = Scoreboard.create(), AttemptStats()
    for slot, name in enumerate(names):
        registry.create(name, WORK, queues, stored_defaults(WORK), stored(defaults(WORK)))
        board.slot(board.take()).queue = name
        board.slot(slot).state = 2
        stats.take(slot, name)
        stats.of_slot(slot).count(10**15, [(b"", b"p5 1763000000000000\n")] * 50, list(range(50)), 1, 1)
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/control.sock"
        listener = listen(path)
        listener.setblocking(True)
        status = make_snapshot([queue_status(name) for name in names]).status
        assert status is not None
        threading.Thread(target=answer_status, args=(listener, status), daemon=True).start()
        sampler = Sampler(url=server.url, prefix="forq:", control_socket=path, board=board, stats=stats)
        print(f"a scrape of {queues:,} queues: seconds (CPU seconds)")
        for _ in range(rounds):
            began, cpu = time.perf_counter(), time.process_time()
            snapshot = sampler.sample()
            assert not snapshot.redis_error, snapshot.redis_error
            assert len(snapshot.counts) == queues
            faults = faults_in(snapshot, 60.0)
            looked = time.perf_counter()
            body, _ = render(snapshot, healthy=not faults, accept="application/openmetrics-text;version=1.0.0")
            ended = time.perf_counter()
            lines = body.count(b"\n")
            print(
                f"snapshot {looked - began:.3f}, page {ended - looked:.3f}, both {ended - began:.3f} "
                f"({time.process_time() - cpu:.3f}), {lines:,} lines, {len(body) / 1e6:.1f} MB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--queues", type=int, default=1000)
    arguments = parser.parse_args()
    server = Server()
    server.start()
    try:
        scrape(server, arguments.queues, arguments.rounds)
        hot_path(server, arguments.rounds, arguments.jobs)
    finally:
        server.remove()


if __name__ == "__main__":
    main()
