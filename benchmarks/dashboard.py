"""Cost of the dashboard: a drain beside many viewers, the commands it sends to Redis, and the times of its pages.

    python benchmarks/dashboard.py [--rounds 5] [--jobs 400000] [--viewers 50] [--queues 1000] [--waiting 1000000]

1. `drain`: one worker process drains a queue, with live pages open and without, in interleaved rounds. The viewers
   watch the overview, the queue and the processes; they run on the same machine and count against the dashboard.
2. `commands`: what the server carries out for the dashboard per second with no viewer, one and many. Commands inside
   functions count: those of the counts of one queue are about 30.
3. `pages`: the time of each page with many queues and many waiting jobs, in requests of one keep-alive connection.
"""

import argparse
import http.client
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import percentile
from benchmarks.processes import cpu_seconds
from benchmarks.scale import rested, settings
from forq.client import Client, new_job
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

WATCHED = ("/live/", "/live/queues/drain", "/live/processes")
PAGES = (
    "/",
    "/?order=waiting",
    "/queues/q7",
    "/queues/q7/jobs?state=waiting",
    "/queues/q7/jobs?state=waiting&text=no-such-job",
    "/queues/q7/options",
    "/find?id=q7-500",
    "/processes",
    "/schedules",
    "/dead",
)
CHUNK = 10_000
PAGE_SECONDS = 8.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def viewers(port: int, count: int) -> Iterator[list[int]]:
    """Open live pages. Yields a list whose only element is the number of bytes received so far."""
    received = [0]
    poll = selectors.DefaultSelector()
    ended = threading.Event()
    socks = []
    for number in range(count):
        sock = socket.create_connection(("127.0.0.1", port))
        path = WATCHED[number % len(WATCHED)]
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: text/event-stream\r\n\r\n".encode())
        assert sock.recv(12) == b"HTTP/1.1 200", path
        sock.setblocking(False)
        poll.register(sock, selectors.EVENT_READ)
        socks.append(sock)

    def read() -> None:
        while not ended.is_set():
            for key, _ in poll.select(0.2):
                received[0] += len(key.fileobj.recv(1 << 18))  # type: ignore[union-attr]
            # One pass for all of them: what arrives within this time is read at once.
            ended.wait(0.05)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield received
    finally:
        ended.set()
        reader.join()
        for sock in socks:
            sock.close()


def drain_rate(forq: Forq, jobs: int, name: str = "drain") -> float:
    client = forq.client()
    queue = client.queue(name)
    queue.pause()
    for at in range(0, jobs, CHUNK):
        queue.enqueue_many([None] * min(CHUNK, jobs - at))
    done = queue.status()["done"]
    queue.resume()
    began = time.perf_counter()
    wait_until(lambda: queue.status()["done"] - done >= jobs, 300.0, "all jobs are done")
    return jobs / (time.perf_counter() - began)


def drain(rounds: int, jobs: int, count: int) -> None:
    port = free_port()
    text = f'[web]\nlisten = "127.0.0.1:{port}"\n[queues.drain]\nhandler = "still:noop"\npath = ["{HANDLERS}"]\n'
    rates: dict[str, list[float]] = {"without": [], "with": []}
    with running(settings=text) as forq:
        forq.wait_for_child("drain")
        drain_rate(forq, jobs)
        services = forq.status()["supervisor"]["services"]
        web = next(each["pid"] for each in services if each["name"] == "web")
        cpu: list[float] = []
        for number in range(rounds):
            for name in ("without", "with") if number % 2 else ("with", "without"):
                if name == "without":
                    rates[name].append(drain_rate(forq, jobs))
                    continue
                with viewers(port, count) as received:
                    began, before, used = time.monotonic(), received[0], cpu_seconds(web)
                    rates[name].append(drain_rate(forq, jobs))
                    seconds = time.monotonic() - began
                    cpu.append(100 * (cpu_seconds(web) - used) / seconds)
                    each = (received[0] - before) / seconds / count
                print(f"round {number + 1}: {each / 1000:.1f} kB/s per viewer", file=sys.stderr)
        commands(forq, port, count)
    print(f"drain of {jobs:,} jobs, {rounds} rounds: jobs per second")
    for name, values in rates.items():
        print(f"  {name:8} {statistics.median(values):10,.0f}   {' '.join(f'{value:,.0f}' for value in values)}")
    ratio = statistics.median(rates["with"]) / statistics.median(rates["without"])
    print(f"  with {count} viewers: {100 * ratio:.1f} % of the rate without")
    print(f"  CPU of the dashboard's process: {statistics.median(cpu):.1f} % of a core")


def commands(forq: Forq, port: int, count: int) -> None:
    print("commands of the dashboard's connections per second")
    link = Client(forq.url).link()

    def sent() -> int:
        lines = link.call("CLIENT", "LIST").decode().splitlines()
        fields = [dict(part.partition("=")[::2] for part in line.split(" ")) for line in lines]
        return sum(int(each["tot-cmds"]) for each in fields if each["name"] == "forq-web")

    for number in (0, 1, count):
        with viewers(port, number):
            # The first snapshots open connections.
            time.sleep(2)
            before = sent()
            time.sleep(10)
            print(f"  {number:3} viewers: {(sent() - before) / 10:.1f}")


def pages(server: Server, queues: int, waiting: int) -> None:
    port = free_port()
    forq = Forq(redis=server.url, settings=f'{settings(queues)}[web]\nlisten = "127.0.0.1:{port}"\n')
    try:
        forq.start(ready=False)
        wait_until(lambda: rested(forq, queues) if forq.run_ctl("ping").returncode == 0 else False, 600.0, "it serves")
        client = forq.client()
        each = waiting // queues
        for number in range(queues):
            queue = client.queue(f"q{number}")
            queue.pause()
            queue.enqueue_jobs([new_job(None, id=f"q{number}-{at}") for at in range(each)])
        print(f"pages with {queues:,} queues and {each * queues:,} waiting jobs: ms")
        print(f"  {'page':50} {'p50':>8} {'p99':>8} {'requests':>9}")
        for page in PAGES:
            times = request_times(port, page)
            print(f"  {page:50} {percentile(times, 50):8.1f} {percentile(times, 99):8.1f} {len(times):9}")
    finally:
        forq.remove()


def request_times(port: int, page: str) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times: list[float] = []
    until = time.monotonic() + PAGE_SECONDS
    while time.monotonic() < until:
        began = time.perf_counter()
        connection.request("GET", page)
        answer = connection.getresponse()
        answer.read()
        times.append(1000 * (time.perf_counter() - began))
        assert answer.status == 200, (page, answer.status)
        # As a person would click: so that some pages need a new snapshot.
        time.sleep(0.05)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=400_000)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--only", choices=("drain", "pages"))
    given = parser.parse_args()
    if given.only != "pages":
        drain(given.rounds, given.jobs, given.viewers)
    if given.only != "drain":
        with Server() as server:
            pages(server, given.queues, given.waiting)


if __name__ == "__main__":
    main()
