"""Cost of a large batch: memory per member, rates, and the time from the last end to the callback.

    python benchmarks/flows.py [--members 100000]

1. `same`: members in the batch's own queue. `other`: in another queue, whose pulse reports their ends.
2. Memory is what the server needs per member, beyond what the same job needs without a batch.
3. `drain`: no-op jobs of a queue that has never had flows, and of one that remembers ends (flows = on), interleaved.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.dashboard import drain_rate
from forq.client import Client, new_job
from tests.support.drive.supervisor import HANDLERS, Forq, running

QUEUES = ("home", "work", "plain", "drain", "remembering")
CHUNK = 10_000


def settings() -> str:
    queue = f'handler = "still:noop"\npath = ["{HANDLERS}"]\n'
    text = "".join(f"[queues.{name}]\n{queue}" for name in QUEUES if name != "remembering")
    return f'{text}[queues.remembering]\nflows = "on"\n{queue}'


def used_memory(client: Client) -> int:
    lines = client.link().call("INFO", "memory").decode().splitlines()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


def bytes_per_job(client: Client, members: int) -> float:
    """Of a job without a batch."""
    queue = client.queue("plain")
    queue.pause()
    before = used_memory(client)
    for first in range(0, members, CHUNK):
        queue.enqueue_jobs(new_job(None) for _ in range(min(CHUNK, members - first)))
    grown = used_memory(client) - before
    queue.resume()
    wait_empty(client, "plain")
    return grown / members


def wait_empty(client: Client, name: str) -> None:
    queue = client.queue(name)
    while (counts := queue.status())["waiting"] or counts["active"]:
        time.sleep(0.02)


def batch_figures(client: Client, work: str, members: int, plain_bytes: float) -> None:
    queue = client.queue(work)
    queue.pause()
    before, began = used_memory(client), time.monotonic()
    with client.batch("home", on_done=new_job("callback")) as batch:
        for _ in range(members):
            batch.enqueue(work, None)
    stored = members / (time.monotonic() - began)
    each = (used_memory(client) - before) / members - plain_bytes
    home, own = client.queue("home"), members if work == "home" else 0
    done_before, home_before = queue.status()["done"], home.status()["done"]
    began = time.monotonic()
    queue.resume()
    # Not until the batch has counted them: reports between queues are a part of the way to the callback.
    while queue.status()["done"] < done_before + members:
        time.sleep(0.002)
    ended = time.monotonic()
    while home.status()["done"] < home_before + own + 1:
        time.sleep(0.0005)
    callback_ms = 1000 * (time.monotonic() - ended)
    print(f"  members in {'the same' if own else 'another'} queue: {members:,}")
    print(f"    stored per second              {stored:12,.0f}")
    print(f"    bytes per member               {each:12,.0f}   (the job itself: {plain_bytes:,.0f})")
    print(f"    ended per second               {members / (ended - began):12,.0f}")
    print(f"    last end -> callback done, ms  {callback_ms:12.1f}")


def drain(forq: Forq, rounds: int, jobs: int) -> None:
    rates: dict[str, list[float]] = {"drain": [], "remembering": []}
    for number in range(rounds):
        for name in rates if number % 2 else reversed(rates):
            rates[name].append(drain_rate(forq, jobs, name))
    print("drain: jobs per second, median")
    for name, values in rates.items():
        print(f"  {name:12} {statistics.median(values):10,.0f}   {' '.join(f'{value:,.0f}' for value in values)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=100_000)
    args = parser.parse_args()
    with running(settings=settings()) as forq:
        for name in QUEUES:
            forq.wait_for_child(name)
        client = forq.client()
        print("a batch")
        plain_bytes = bytes_per_job(client, args.members)
        for work in ("home", "work"):
            batch_figures(client, work, args.members, plain_bytes)
        drain(forq, args.rounds, args.jobs)


if __name__ == "__main__":
    main()
