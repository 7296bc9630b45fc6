"""Many delayed jobs in one queue: stored ahead of their times, then compared with when they were promoted and run.

The journal shows when a job was promoted, with the start time of that call; its handler records when it ran.
"""

import struct
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from forq.broker.journal import Event, read_entry
from forq.client import Queue, new_job
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq
from tests.support.drive.wait import wait_until

RUN = struct.Struct("<qd")
STORED_PER_SECOND = 8000
PAGE = 2000


@dataclass(frozen=True)
class Lateness:
    """The lateness of one kind of event, in ms."""

    earliest: float
    p50: float
    p99: float
    latest: float

    def __str__(self) -> str:
        return f"min {self.earliest:.2f}, p50 {self.p50:.2f}, p99 {self.p99:.2f}, max {self.latest:.2f} ms"


def lateness(late_us: list[float]) -> Lateness:
    cuts = quantiles(late_us, n=100)
    return Lateness(*(us / 1000 for us in (min(late_us), cuts[49], cuts[98], max(late_us))))


class DelayedJobs:
    """`made`: the queue exists already."""

    def __init__(
        self, forq: Forq, server: Server, name: str = "later", concurrency: int = 2, *, made: bool = False
    ) -> None:
        self._forq = forq
        self._server = server
        self.name = name
        settings = [f"--set=concurrency={concurrency}", "--set=journal_max=1gb"]
        if not made:
            forq.ctl("create", name, "--handler", "delayed:note_run", "--path", str(HANDLERS), *settings)
        forq.wait_for_child(name)
        self.queue: Queue = forq.client().queue(name)
        self.ids: list[str] = []
        self.due_us: list[int] = []

    def lead_seconds(self, number: int) -> float:
        """An upper bound for storing `number` jobs on a busy machine."""
        return 0.5 + number / STORED_PER_SECOND

    def store(self, due_ms: list[int], priority: int = 5) -> None:
        """Stores one job per time, in this order; its data is its number."""
        jobs = (new_job(number, priority=priority, run_at=ms / 1000) for number, ms in enumerate(due_ms))
        self.ids = self.queue.enqueue_jobs(jobs)
        self.due_us = [ms * 1000 for ms in due_ms]

    def wait_until_all_ran(self, seconds: float) -> None:
        # No polling before the last job is due: a request could wake the code that promotes them.
        time.sleep(max(0.0, max(self.due_us) / 1_000_000 - time.time()))
        wanted = len(self.ids) * RUN.size
        wait_until(lambda: sum(path.stat().st_size for path in self._files()) >= wanted, seconds, "every job ran")

    def _files(self) -> list[Path]:
        return list(self._forq.directory.glob(f"{self._forq.trace_file.name}.*"))

    def runs(self) -> list[tuple[int, float]]:
        """(number, µs) of each run, in the order of each process."""
        found: list[tuple[int, float]] = []
        for path in self._files():
            found += [(number, at * 1_000_000) for number, at in RUN.iter_unpack(path.read_bytes())]
        return found

    def events(self) -> list[Event]:
        found: list[Event] = []
        after = "-"
        with self._server.connect() as redis:
            while True:
                page: Any = redis.xrange(f"forq:queue:{{{self.name}}}:events", after, "+", PAGE)
                if not page:
                    return found
                found += [event for _, fields in page for event in read_entry(fields, self.name)]
                after = f"({page[-1][0].decode()}"

    def start_lateness(self) -> Lateness:
        """Fails unless each job ran exactly once."""
        runs = self.runs()
        again = [number for number, times in Counter(number for number, _ in runs).items() if times > 1]
        assert (len(runs), again) == (len(self.ids), []), "each ran once"
        return lateness([at - self.due_us[number] for number, at in runs])

    def promotion_lateness(self, events: list[Event]) -> tuple[Lateness, int]:
        """The lateness of jobs stored in time, and the number of the others. Fails unless each was promoted once."""
        number_of = {job_id: number for number, job_id in enumerate(self.ids)}
        stored = {event.job: event.time_us for event in events if event.verb == "enqueued"}
        scheduled = {event.job for event in events if event.verb == "scheduled"}
        promoted = [event for event in events if event.verb == "promoted"]
        too_late = [job_id for job_id in self.ids if job_id not in scheduled]
        assert [job_id for job_id in too_late if stored[job_id] < self.due_us[number_of[job_id]]] == []
        assert Counter(event.job for event in promoted) == dict.fromkeys(scheduled, 1)
        late = [event.time_us - self.due_us[number_of[event.job or ""]] for event in promoted]
        return lateness([float(us) for us in late]), len(too_late)
