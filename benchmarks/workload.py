"""A real workload shape: 150 workers in 11 queues, jobs from 1 ms to 20 s in bursts, 20 kills of busy processes.

    python benchmarks/workload.py [--seed 1] [--seconds 100] [--kills 20]

The result is compared with simulations of the same arrivals, service times and kills without any overhead: first come,
first served, killed jobs run again at once from their start. In one simulation they run on the queue's workers, before
all others; in the other beside them, as suspects do. The second is stricter, and the measure: exit code 1 if the mean
wait is more than 2 % above it, or the makespan more than 1 %.

It needs a machine without other work: --seconds 100 takes about two and a half minutes.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.workload_model import WORKERS, Arrival, Outcome, Workload, draw, outcome, simulate
from forq.client import new_job
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

HANDLERS = Path(__file__).parent / "handlers"
NAMES = tuple(f"work{number}" for number in range(len(WORKERS)))
MOST_WAIT, MOST_MAKESPAN = 0.02, 0.01
# Before the first arrival, everything is up and idle.
SETTLE_SECONDS = 2.0
LONGEST_RUN_SECONDS = 900.0


class Run:
    """One run on a real forq. Times count from its beginning."""

    def __init__(self, forq: Forq, workload: Workload, ends_file: Path) -> None:
        self._forq = forq
        self._workload = workload
        self._ends_file = ends_file
        self._began = 0.0
        # Actual events by queue: late producers and kills are not forq's fault.
        self.arrivals: list[tuple[Arrival, ...]] = [() for _ in NAMES]
        self.kills: list[list[float]] = [[] for _ in NAMES]
        self.killed_jobs = 0

    def run(self) -> list[dict[int, float]]:
        """When each job ended."""
        self._began = time.monotonic() + SETTLE_SECONDS
        threads = [threading.Thread(target=self._produce, args=(number,)) for number in range(len(NAMES))]
        threads.append(threading.Thread(target=self._kill))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        jobs = sum(map(len, self._workload.arrivals))
        wait_until(lambda: len(self._read_ends()) >= jobs, LONGEST_RUN_SECONDS, "all jobs have ended")
        ends: list[dict[int, float]] = [{} for _ in NAMES]
        for job_id, at in self._read_ends().items():
            queue, number = map(int, job_id.split("-"))
            ends[queue][number] = at
        return ends

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _read_ends(self) -> dict[str, float]:
        if not self._ends_file.exists():
            return {}
        lines = self._ends_file.read_text().rpartition("\n")[0].splitlines()
        # The last one counts: a process may die between the end of a job and its settling.
        return {job_id: int(ns) / 1e9 - self._began for job_id, ns in (line.split(" ") for line in lines)}

    def _produce(self, queue: int) -> None:
        """In order; jobs due together are sent together."""
        jobs = self._forq.client().queue(NAMES[queue])
        left, stored = list(self._workload.arrivals[queue]), []
        while left:
            time.sleep(max(0.0, left[0].at - self._now()))
            at = self._now()
            due = [arrival for arrival in left if arrival.at <= at]
            left = left[len(due) :]
            jobs.enqueue_jobs(new_job(each.service, id=f"{queue}-{each.number}") for each in due)
            stored += [Arrival(at, each.number, each.service) for each in due]
        self.arrivals[queue] = tuple(stored)

    def _kill(self) -> None:
        for at, queue in self._workload.kills:
            time.sleep(max(0.0, at - self._now()))
            child = wait_until(lambda name=NAMES[queue]: self._busy(name), 120.0, "it is busy")  # type: ignore[misc]
            os.kill(child["pid"], signal.SIGKILL)
            self.kills[queue].append(self._now())
            self.killed_jobs += len(child["jobs"])

    def _busy(self, name: str) -> dict[str, Any] | None:
        child = self._forq.child(name)
        return child if child["state"] == "busy" and child["jobs"] else None


def compare(workload: Workload) -> bool:
    # Twice what all workers need: capacity is not measured here.
    settings = f"capacity = {20 * 2 * sum(WORKERS)}\n"
    with tempfile.TemporaryDirectory(prefix="forq-") as directory:
        ends_file = Path(directory) / "ends"
        with running(settings=settings, environment={"WORKLOAD_ENDS": str(ends_file)}) as forq:
            return _compare(forq, Run(forq, workload, ends_file))


def _compare(forq: Forq, run: Run) -> bool:
    for name, workers in zip(NAMES, WORKERS, strict=True):
        options = (f"--set=concurrency={workers}", "--set=timeout=0", "--set=max_stalls=100")
        forq.ctl("create", name, "--handler", "sleeper:handle", "--path", str(HANDLERS), *options)
    for name in NAMES:
        forq.wait_for_child(name)
    ends = run.run()
    real = outcome(run.arrivals, ends)
    simulated = {
        "on the workers": _simulated(run, beside=False),
        "beside them": _simulated(run, beside=True),
    }
    jobs = sum(map(len, run.arrivals))
    kills = Counter({NAMES[at]: len(times) for at, times in enumerate(run.kills) if times})
    print(f"{jobs} jobs, {sum(WORKERS)} workers, {len(NAMES)} queues; killed {dict(kills)}: {run.killed_jobs} jobs")
    print(f"{'':34}{'mean wait':>12}{'':9}{'makespan':>12}")
    print(f"{'forq':34}{real.mean_wait:10.3f} s{'':9}{real.makespan:10.2f} s")
    for name, ideal in simulated.items():
        wait, makespan = real.mean_wait / ideal.mean_wait - 1, real.makespan / ideal.makespan - 1
        label = f"no overhead, reruns {name}"
        print(f"{label:34}{ideal.mean_wait:10.3f} s {wait:+7.2%} {ideal.makespan:10.2f} s {makespan:+7.2%}")
    ideal = simulated["beside them"]
    slower = real.mean_wait / ideal.mean_wait - 1 > MOST_WAIT or real.makespan / ideal.makespan - 1 > MOST_MAKESPAN
    print(f"load average {os.getloadavg()[0]:.1f}: {'too slow' if slower else 'within 2 % and 1 %'}")
    return not slower


def _simulated(run: Run, *, beside: bool) -> Outcome:
    ends = [
        simulate(arrivals, kills, workers, beside=beside)
        for arrivals, kills, workers in zip(run.arrivals, run.kills, WORKERS, strict=True)
    ]
    return outcome(run.arrivals, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=100.0, help="from the first arrival to the last")
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    sys.exit(0 if compare(draw(arguments.seed, arguments.seconds, arguments.kills)) else 1)


if __name__ == "__main__":
    main()
