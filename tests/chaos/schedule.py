"""When which fault strikes: drawn from the seed, and from nothing else."""

import random
from collections.abc import Mapping
from typing import NamedTuple

# Faults come between these parts of a run: before, there is nothing to hit; after, there must be time to be hit.
_FIRST, _LAST = 0.03, 0.85


class Strike(NamedTuple):
    at_seconds: float
    fault: str
    # Of the choices that the fault makes when it strikes.
    seed: int


def draw(seed: int, seconds: float, per_minute: Mapping[str, float]) -> list[Strike]:
    """Each fault as often as it comes per minute, and at least once; in the order of time."""
    strikes = []
    for fault, rate in sorted(per_minute.items()):
        # A generator per fault: the strikes of one stay where they are when another is left out.
        chance = random.Random(f"{seed} {fault}")
        for _ in range(max(1, round(rate * seconds / 60))):
            at = seconds * (_FIRST + (_LAST - _FIRST) * chance.random())
            strikes.append(Strike(at, fault, chance.getrandbits(32)))
    return sorted(strikes)
