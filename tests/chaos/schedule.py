"""When each fault strikes, drawn from the seed alone."""

import random
from collections.abc import Mapping
from typing import NamedTuple

# Faults strike between these parts of a run: earlier there is nothing to hit; later there is no time to take effect.
_FIRST, _LAST = 0.03, 0.85


class Strike(NamedTuple):
    at_seconds: float
    fault: str
    # The seed of the fault's own choices.
    seed: int


def draw(seed: int, seconds: float, per_minute: Mapping[str, float]) -> list[Strike]:
    """Each fault at its frequency per minute, and at least once; in chronological order."""
    strikes = []
    for fault, rate in sorted(per_minute.items()):
        # One generator per fault: its strikes stay the same when another fault is left out.
        chance = random.Random(f"{seed} {fault}")
        for _ in range(max(1, round(rate * seconds / 60))):
            at = seconds * (_FIRST + (_LAST - _FIRST) * chance.random())
            strikes.append(Strike(at, fault, chance.getrandbits(32)))
    return sorted(strikes)
