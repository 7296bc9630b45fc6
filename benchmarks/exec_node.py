"""Jobs run by one Node.js process: forq with an exec: handler against BullMQ, on one server, in one run.

    python benchmarks/exec_node.py [--rounds 3] [--jobs 10000]

Both run no-op jobs, one at a time (concurrency 1), and do not keep done jobs. The clock runs from the start of a ready
worker to the end of the last job. Rounds are interleaved in alternating order; the table shows the median of each. The
difference: forq's process claims short jobs up to 128 at a time and passes them to the program one by one, over a pipe;
BullMQ's worker makes a request to the server for each job. BullMQ is installed by npm into a temporary directory.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.drive.server import Server
from tests.support.drive.supervisor import running
from tests.support.drive.wait import wait_until

HERE = Path(__file__).parent


class LoopbackServer(Server):
    """A server that also listens on a TCP port, which BullMQ needs; forq uses it too."""

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    def _command(self) -> list[str]:
        command = super()._command()
        command[command.index("--port") + 1] = str(self.port)
        return [*command, "--bind", "127.0.0.1"]


def forq_rate(server: LoopbackServer, node: str, jobs: int) -> float:
    server.flush()
    with running(redis=f"redis://127.0.0.1:{server.port}/0") as forq:
        forq.ctl("create", "bench", "--handler", f"exec:{node} {HERE / 'handlers' / 'exec_noop.js'}")
        queue = forq.client().queue("bench")
        queue.enqueue(0)
        wait_until(lambda: queue.status()["done"] == 1, what="the program is up")
        forq.ctl("pause", "bench")
        queue.enqueue_many({"n": n} for n in range(jobs))
        began = time.perf_counter()
        forq.ctl("resume", "bench")
        wait_until(lambda: queue.status()["done"] == jobs + 1, 300.0)
        return jobs / (time.perf_counter() - began)


def bullmq_rate(server: LoopbackServer, node: str, directory: Path, jobs: int) -> float:
    server.flush()
    environ = {**os.environ, "BENCH_PORT": str(server.port)}
    command = [node, str(HERE / "peers" / "bullmq_noop.js")]
    subprocess.run([*command, "fill", str(jobs)], env=environ, cwd=directory, check=True)
    drain = [*command, "drain", str(jobs)]
    drained = subprocess.run(drain, env=environ, cwd=directory, check=True, capture_output=True, text=True)
    return jobs / float(drained.stdout)


def install_bullmq(npm: str, directory: Path) -> str:
    """Returns its version."""
    print(f"installing bullmq into {directory} ...", file=sys.stderr)
    subprocess.run(
        [npm, "install", "--silent", "--no-audit", "--no-fund", "bullmq", "ioredis"], cwd=directory, check=True
    )
    return str(json.loads((directory / "node_modules/bullmq/package.json").read_text())["version"])


def measure(server: LoopbackServer, node: str, directory: Path, rounds: int, jobs: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"forq": [], "bullmq": []}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name in ("forq", "bullmq") if number % 2 == 0 else ("bullmq", "forq"):
            rate = forq_rate(server, node, jobs) if name == "forq" else bullmq_rate(server, node, directory, jobs)
            rates[name].append(rate)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=10_000)
    arguments = parser.parse_args()
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        sys.exit("this needs node and npm")
    server = LoopbackServer()
    with tempfile.TemporaryDirectory(prefix="forq-bullmq-") as directory:
        version = install_bullmq(npm, Path(directory))
        try:
            server.start()
            rates = measure(server, node, Path(directory), arguments.rounds, arguments.jobs)
        finally:
            server.remove()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{arguments.jobs:,} no-op jobs, concurrency 1, bullmq {version}; jobs/s:")
    print(f"{'':12} {'median':>10}   {'forq is':>8}")
    for name, median in medians.items():
        ratio = "" if name == "forq" else f"{medians['forq'] / median:7.1f}x"
        label = "forq exec:" if name == "forq" else name
        print(f"{label:12} {median:10,.0f}   {ratio:>8}   {' '.join(f'{value:,.0f}' for value in rates[name])}")


if __name__ == "__main__":
    main()
