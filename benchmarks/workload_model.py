"""The workload of workload.py, drawn from a seed, and its duration without any overhead. Times are in seconds."""

import random
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

# 150 workers in 11 queues.
WORKERS = (40, 30, 20, 16, 12, 10, 8, 6, 4, 3, 1)

MEDIAN_SECONDS, SIGMA = 0.3, 1.8
SHORTEST_SECONDS, LONGEST_SECONDS = 0.001, 20.0
# Tail of the gaps between arrivals: bursts, and quiet times in between.
GAP_ALPHA = 1.5
# More work arrives than the workers can do in that time, so that a backlog remains.
LOAD = 1.15


@dataclass(frozen=True, order=True)
class Arrival:
    at: float
    number: int
    service: float


@dataclass(frozen=True)
class Workload:
    """By queue: its arrivals in order. `kills`: (when, which queue), in order."""

    arrivals: tuple[tuple[Arrival, ...], ...]
    kills: tuple[tuple[float, int], ...]


def draw(seed: int, seconds: float, kills: int) -> Workload:
    chance = random.Random(seed)
    arrivals = tuple(_arrivals(chance, workers, seconds) for workers in WORKERS)
    times = sorted(chance.uniform(0.05, 0.95) * seconds for _ in range(kills))
    return Workload(arrivals, tuple((at, chance.choices(range(len(WORKERS)), WORKERS)[0]) for at in times))


def _arrivals(chance: random.Random, workers: int, seconds: float) -> tuple[Arrival, ...]:
    services: list[float] = []
    while sum(services) < LOAD * workers * seconds:
        drawn = chance.lognormvariate(0, SIGMA) * MEDIAN_SECONDS
        services.append(min(LONGEST_SECONDS, max(SHORTEST_SECONDS, drawn)))
    gaps = [chance.paretovariate(GAP_ALPHA) - 1 for _ in services]
    scale, at, arrivals = seconds / sum(gaps), 0.0, []
    for number, (gap, service) in enumerate(zip(gaps, services, strict=True)):
        at += gap * scale
        arrivals.append(Arrival(at, number, service))
    return tuple(arrivals)


@dataclass
class _Queue:
    """First come, first served. `alone`: how many suspects may run beside the workers."""

    workers: int
    alone: int
    waiting: deque[Arrival] = field(default_factory=deque)
    suspects: list[Arrival] = field(default_factory=list)
    running: list[tuple[float, Arrival]] = field(default_factory=list)
    running_alone: list[tuple[float, Arrival]] = field(default_factory=list)

    def begin(self, now: float) -> None:
        while self.waiting and len(self.running) < self.workers:
            first = self.waiting.popleft()
            insort(self.running, (now + first.service, first))
        while self.suspects and len(self.running_alone) < self.alone:
            oldest = self.suspects.pop(0)
            insort(self.running_alone, (now + oldest.service, oldest))

    def kill(self) -> None:
        """All workers die; each of their jobs begins again from its start."""
        killed = sorted(job for _, job in self.running)
        self.running = []
        if self.alone and len(killed) > 1:
            self.suspects = sorted(self.suspects + killed)
        else:
            self.waiting.extendleft(reversed(killed))

    def next_end(self) -> float:
        return min((ends[0][0] for ends in (self.running, self.running_alone) if ends), default=float("inf"))

    def end_until(self, now: float) -> list[tuple[float, Arrival]]:
        ended = [end for ends in (self.running, self.running_alone) for end in ends if end[0] <= now]
        self.running = [end for end in self.running if end[0] > now]
        self.running_alone = [end for end in self.running_alone if end[0] > now]
        return ended


def simulate(arrivals: Iterable[Arrival], kills: Iterable[float], workers: int, *, beside: bool) -> dict[int, float]:
    """When each job ends, by its number. `beside`: killed jobs run again beside the workers, as suspects do (one in the
    retry process, as many as there are workers in their own processes); else on the workers, before all others."""
    queue = _Queue(workers, workers + 1 if beside else 0)
    coming, dying, ends = deque(sorted(arrivals)), deque(sorted(kills)), {}
    while coming or queue.waiting or queue.suspects or queue.running or queue.running_alone:
        arrival = coming[0].at if coming else float("inf")
        death = dying[0] if dying else float("inf")
        now = min(arrival, death, queue.next_end())
        ends.update({job.number: at for at, job in queue.end_until(now)})
        if death <= now:
            dying.popleft()
            queue.kill()
        if arrival <= now:
            queue.waiting.append(coming.popleft())
        queue.begin(now)
    return ends


@dataclass(frozen=True)
class Outcome:
    """`mean_wait`: the part of a job's time in the system in which it did not run successfully."""

    mean_wait: float
    makespan: float


def outcome(arrivals: list[tuple[Arrival, ...]], ends: list[dict[int, float]]) -> Outcome:
    waits = [
        its_ends[job.number] - job.at - job.service
        for its_arrivals, its_ends in zip(arrivals, ends, strict=True)
        for job in its_arrivals
    ]
    return Outcome(sum(waits) / len(waits), max(at for its_ends in ends for at in its_ends.values()))
