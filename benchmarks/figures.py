"""Figures from trials: percentiles, summaries of rounds, Poisson arrivals and their minimum waits."""

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Trial:
    """One measurement of one peer in one round."""

    peer: str
    measure: str
    round: int
    figures: dict[str, float] = field(default_factory=dict)
    samples_ms: list[float] = field(default_factory=list)
    foreign_share: float = 0.0
    disturbed: bool = False
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Without the single samples, which are many: `summary` turns them into percentiles."""
        return {key: value for key, value in asdict(self).items() if key != "samples_ms"}


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    # In whole thousandths: 99.9 has no exact double, which could shift the rank by one.
    rank = -(-len(ordered) * round(percent * 10) // 1000)
    return ordered[max(rank, 1) - 1]


def percentiles(samples_ms: Sequence[float]) -> dict[str, float]:
    """A percentile is left out unless at least one sample is beyond it."""
    names = {"p50_ms": 50.0, "p99_ms": 99.0, "p999_ms": 99.9}
    enough = {name: percent for name, percent in names.items() if len(samples_ms) * round(1000 - 10 * percent) >= 1000}
    return {"samples": float(len(samples_ms))} | {
        name: percentile(samples_ms, percent) for name, percent in enough.items()
    }


def summary(trials: Iterable[Trial]) -> dict[str, Any]:
    """A summary of the rounds of one peer and measure: the median of each figure, percentiles over all samples.

    Disturbed rounds count only if there are no others, and the summary notes it. Failed rounds never count.
    """
    every = list(trials)
    good = [trial for trial in every if trial.error is None]
    quiet = [trial for trial in good if not trial.disturbed]
    used = quiet or good
    if not used:
        return {"error": next((trial.error for trial in every if trial.error), "not measured")}
    names = dict.fromkeys(name for trial in used for name in trial.figures)
    found: dict[str, Any] = {
        name: statistics.median(trial.figures[name] for trial in used if name in trial.figures) for name in names
    }
    samples = [sample for trial in used for sample in trial.samples_ms]
    if samples:
        found |= percentiles(samples)
    return found | {"rounds": len(used), "disturbed": not quiet}


def poisson_ns(rate: float, count: int, seed: int) -> list[int]:
    """Arrival times (ns from the start) of `count` independent jobs at `rate` per second."""
    chance = random.Random(seed)
    at = 0.0
    times = []
    for _ in range(count):
        at += chance.expovariate(rate)
        times.append(int(at * 1e9))
    return times


def least_waits_ms(arrivals_ns: Iterable[int], service_ms: float) -> list[float]:
    """The wait of each job without any overhead: one after the other, each for `service_ms`."""
    free_ns = 0
    waits = []
    for arrival in arrivals_ns:
        start = max(arrival, free_ns)
        waits.append((start - arrival) / 1e6)
        free_ns = start + int(service_ms * 1e6)
    return waits
