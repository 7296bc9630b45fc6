"""Counts the instructions that the server executes for an enqueue and for a turn.

Valgrind counts them, so the load of the machine does not matter.

    python benchmarks/instructions.py [OPTION=NUMBER]...

The options are those of the queue, as they are stored: flows=2 is "on".
Each figure is the difference of two counts, with few and with many calls, divided by the additional calls.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forq.broker.claim import Settled
from forq.broker.enqueue import Update, new_job
from tests.support.drive.one_queue import HandWorker, OneQueue
from tests.support.drive.server import Server

FEW, MANY = 200, 1200
BATCH = 100


class CountingServer(Server):
    """A server under Valgrind."""

    def _command(self) -> list[str]:
        valgrind = shutil.which("valgrind")
        assert valgrind is not None, "valgrind is not installed (on Debian: apt install valgrind)"
        counts = f"--cachegrind-out-file={self.directory / 'counts'}"
        # Reduces the server's periodic work.
        return [valgrind, "--quiet", "--tool=cachegrind", "--cache-sim=no", counts, *super()._command(), "--hz", "1"]

    def instructions(self) -> int:
        """The instructions executed until it ended."""
        self.stop()
        summary = re.search(r"^summary: (\d+)", (self.directory / "counts").read_text(), re.MULTILINE)
        assert summary is not None, "Valgrind wrote no summary"
        return int(summary[1])


def enqueue(queue: OneQueue, worker: HandWorker, calls: int) -> None:
    for number in range(calls):
        queue.producer.enqueue([new_job({"n": number}, id=f"j{number}")], Update("refuse"))


def turn_of_one(queue: OneQueue, worker: HandWorker, calls: int) -> None:
    """Claims a job and settles the previous one; all were enqueued together."""
    _turns(queue, worker, calls, 1)


def turn_of_a_hundred(queue: OneQueue, worker: HandWorker, calls: int) -> None:
    _turns(queue, worker, calls, BATCH)


def _turns(queue: OneQueue, worker: HandWorker, jobs: int, batch: int) -> None:
    done: Settled = []
    for _ in range(jobs // batch):
        worker.number += 1
        turn = worker.consumer.turn(worker.number, done, [], 0, batch)
        assert len(turn.jobs) == 2 * batch
        done = [part for job_id in turn.jobs[::2] for part in (job_id, turn.fence, 7)]


def count(work: Callable[[OneQueue, HandWorker, int], None], calls: int, options: dict[str, int]) -> int:
    server = CountingServer()
    server.start()
    try:
        queue = OneQueue(server.url, "q", "work", **options)
        if work is not enqueue:
            for start in range(0, MANY, BATCH):
                jobs = [new_job({"n": n}, id=f"j{n}") for n in range(start, start + BATCH)]
                queue.producer.enqueue(jobs, Update("refuse"))
        work(queue, queue.worker(), calls)
        queue.close()
        return server.instructions()
    finally:
        server.remove()


def figures(**options: int) -> dict[str, int]:
    """Instructions per call, by kind of call; the last figure is per job."""
    works = {"enqueue": enqueue, "turn_of_one": turn_of_one, "per_job_of_a_hundred": turn_of_a_hundred}
    more = MANY - FEW
    return {name: (count(work, MANY, options) - count(work, FEW, options)) // more for name, work in works.items()}


if __name__ == "__main__":
    try:
        options = dict(each.split("=", 1) for each in sys.argv[1:])
        print(json.dumps(figures(**{name: int(value) for name, value in options.items()}), indent=1))
    except (AssertionError, subprocess.SubprocessError) as error:
        sys.exit(f"instructions: {error}")
