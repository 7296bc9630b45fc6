"""A fault is a function of the stage and its own random choices.

It returns None while there is nothing to hit (it is tried again shortly after), else a Hit.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.stage import Stage


@dataclass(frozen=True)
class Hit:
    """`undo` is called after `seconds`, or as soon as `enough` is true, and repeatedly until it returns True."""

    what: str
    undo: Callable[[], bool] | None = None
    seconds: float = 0.0
    enough: Callable[[], bool] = lambda: False


Fault = Callable[[Stage, random.Random], Hit | None]
