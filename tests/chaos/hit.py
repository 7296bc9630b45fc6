"""What a fault is: a function of the stage and of its own random choices.

It returns None while there is nothing that it could hit (it is tried again shortly after), else a Hit.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.stage import Stage


@dataclass(frozen=True)
class Hit:
    """`undo` is called after `seconds`, or as soon as `enough` says so, and again until it says that it is done."""

    what: str
    undo: Callable[[], bool] | None = None
    seconds: float = 0.0
    enough: Callable[[], bool] = lambda: False


Fault = Callable[[Stage, random.Random], Hit | None]
