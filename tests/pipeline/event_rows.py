"""Event rows without a server: journals written by hand, or simulated traffic from a seed."""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

BEGIN = datetime(2026, 11, 9, tzinfo=UTC)


@dataclass
class Journal:
    """One queue's journal. Each call of `note` is one entry."""

    queue: str
    epoch: int = 1
    notes: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)

    def note(self, at_us: int, *events: dict[str, Any]) -> None:
        self.notes.append((at_us, list(events)))

    def rows(self) -> Iterator[tuple[Any, ...]]:
        for sequence, (at_us, events) in enumerate(sorted(self.notes, key=lambda note: note[0]), 1):
            for position, event in enumerate(events):
                yield self._row(sequence, position, at_us, event)

    def _row(self, sequence: int, position: int, at_us: int, event: dict[str, Any]) -> tuple[Any, ...]:
        due = event.get("due")
        return (
            self.queue,
            self.epoch,
            sequence,
            position,
            moment(at_us),
            event["verb"],
            event.get("job"),
            event.get("fence", 0),
            event.get("attempt"),
            event.get("actor", "w1"),
            event.get("micros"),
            event.get("cause"),
            event.get("fail_job"),
            None if due is None else moment(due),
            "" if position == 0 else None,
            "" if position == 0 else None,
        )


def moment(at_us: int) -> datetime:
    return BEGIN + timedelta(microseconds=at_us)


def event(verb: str, job: str | None = None, **columns: Any) -> dict[str, Any]:
    return {"verb": verb, "job": job, **columns}


@dataclass
class Traffic:
    """Load of a queue and outcomes of its jobs. The rate is per second at the peak of the day."""

    rate: float
    run_ms: float
    workers: int
    failing: float = 0.02
    hanging: float = 0.003
    crashing: float = 0.002
    max_attempts: int = 4


def simulated(name: str, traffic: Traffic, seconds: int, seed: int = 1) -> Journal:
    """`seconds` of this traffic, busiest at 14:00."""
    chance = random.Random(f"{name} {seed}")
    journal = Journal(name)
    arrivals = list(_arrivals(traffic, seconds, chance))
    for number, at in enumerate(arrivals):
        journal.note(at, event("enqueued", f"{name}-{number:06}", actor="-"))
    ready = [(at, number, 1) for number, at in enumerate(arrivals)]
    heapq.heapify(ready)
    free = [0] * traffic.workers
    while ready:
        since, number, attempt = heapq.heappop(ready)
        begin = max(since, heapq.heappop(free)) + chance.randrange(200, 900)
        end, again = _attempt(journal, traffic, chance, f"{name}-{number:06}", begin, attempt)
        heapq.heappush(free, end)
        if again is not None:
            heapq.heappush(ready, (again, number, attempt + 1))
    return journal


def _arrivals(traffic: Traffic, seconds: int, chance: random.Random) -> Iterator[int]:
    at = 0.0
    while True:
        hour = (at / 3600) % 24
        busy = 0.15 + 0.85 * max(0.0, 1 - ((hour - 14) / 6) ** 2)
        at += chance.expovariate(traffic.rate * busy)
        if at >= seconds:
            return
        yield int(at * 1_000_000)


def _attempt(
    journal: Journal, traffic: Traffic, chance: random.Random, job: str, begin: int, attempt: int
) -> tuple[int, int | None]:
    """The times when the worker is free and when the job is ready again (None: never)."""
    fence = begin
    journal.note(begin, event("claimed", job, fence=fence, attempt=attempt))
    micros = int(1000 * traffic.run_ms * chance.lognormvariate(0, 0.7))
    end, fate = begin + micros, chance.random()
    if fate < traffic.crashing:
        cause = chance.choice(["signal 9", "signal 11", "oom"])
        journal.note(end, event("stalled", job, cause=cause, fence=fence), event("returned", job))
        return end, end
    if fate < traffic.crashing + traffic.hanging:
        end = begin + 60_000_000
        journal.note(
            end, event("timed_out", job, cause="timeout 60s", micros=60_000_000, fence=fence), event("returned", job)
        )
        return end, end
    if fate < traffic.crashing + traffic.hanging + traffic.failing:
        if attempt == traffic.max_attempts:
            journal.note(end, event("dead", job, micros=micros, fence=fence, cause="ValueError", fail_job=False))
            return end, None
        due = end + 2_000_000 * 2**attempt
        failed = event("retried", job, micros=micros, fence=fence, cause="ValueError")
        journal.note(end, failed, event("scheduled", job, due=due))
        return end, due
    journal.note(end, event("done", job, micros=micros, fence=fence))
    return end, None
