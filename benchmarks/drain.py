"""Drain rate of one worker process: forq against RQ, Huey and Dramatiq, on one server, in one run.

    python benchmarks/drain.py [--rounds 3] [--jobs 100000] [--peer-jobs 3000]

Peers are installed into their own environment under --venv. Rates are for a no-op job with a small JSON argument, from
the first job to the last. Rounds are interleaved; the table shows the median of each.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, running
from tests.support.drive.wait import wait_until

HERE = Path(__file__).parent
PEERS = ("rq", "huey", "dramatiq")


def install_peers(directory: Path) -> Path:
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"installing the peers into {directory} ...", file=sys.stderr)
        venv.create(directory, with_pip=True)
        wanted = ["rq", "huey", "dramatiq", "redis[hiredis]<7"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def peer_rate(python: Path, server: Server, peer: str, jobs: int) -> float:
    server.flush()
    environ = {**os.environ, "BENCH_SOCKET": str(server.socket), "PYTHONPATH": str(HERE / "peers")}
    command = [str(python), str(HERE / "peers" / "noop_jobs.py"), peer]
    subprocess.run([*command, "fill", str(jobs)], env=environ, check=True)
    drained = subprocess.run([*command, "drain", str(jobs)], env=environ, check=True, capture_output=True, text=True)
    return jobs / float(drained.stdout.split()[-1])


def forq_rates(server: Server, jobs: int, settings: str = "") -> dict[str, float]:
    """Drain rate, bulk enqueue rate, and CPU time (µs) of the worker and the server per job."""
    server.flush()
    with running(redis=server.url, settings=settings) as forq:
        forq.create("bench", "noop")
        forq.ctl("pause", "bench")
        queue = forq.client().queue("bench")
        began = time.perf_counter()
        queue.enqueue_many({"n": n} for n in range(jobs))
        enqueue_rate = jobs / (time.perf_counter() - began)
        pid = forq.child("bench")["pid"]
        cpu = [_cpu_seconds(pid), _cpu_seconds(server.pid)]
        began = time.perf_counter()
        forq.ctl("resume", "bench")
        wait_until(lambda: queue.status()["done"] == jobs, 120.0)
        took = time.perf_counter() - began
        spent = [
            after - before for before, after in zip(cpu, (_cpu_seconds(pid), _cpu_seconds(server.pid)), strict=True)
        ]
        return {
            "drain": jobs / took,
            "enqueue": enqueue_rate,
            "worker_us": spent[0] / jobs * 1e6,
            "redis_us": spent[1] / jobs * 1e6,
        }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--peer-jobs", type=int, default=3_000)
    parser.add_argument("--venv", type=Path, default=HERE / ".peers")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    assert HANDLERS.exists()
    python = None if arguments.no_peers else install_peers(arguments.venv)
    server = Server()
    server.start()
    rates: dict[str, list[float]] = {}
    try:
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for name, value in forq_rates(server, arguments.jobs).items():
                rates.setdefault(f"forq {name}", []).append(value)
            for peer in PEERS if python else ():
                assert python is not None
                rates.setdefault(peer, []).append(peer_rate(python, server, peer, arguments.peer_jobs))
    finally:
        server.remove()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{'':16} {'median':>12}   {'forq is':>8}")
    for name, median in medians.items():
        ratio = "" if name.startswith("forq") else f"{medians['forq drain'] / median:7.1f}x"
        print(f"{name:16} {median:12,.1f}   {ratio:>8}   {' '.join(f'{value:,.0f}' for value in rates[name])}")


if __name__ == "__main__":
    main()
