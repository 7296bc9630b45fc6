"""rate and max_active in plain Python. No token comes in by itself during a run: an hour passes when a test says so."""

from dataclasses import dataclass

BURST = 3


@dataclass
class ModelLimits:
    max_active: int = 0
    rate: bool = False  # one job per hour, BURST at once
    used: int = 0  # tokens that have not come back yet
    # Time has passed, or a limit was changed: pulse calls promote, but has not done so yet.
    promised: bool = False
    # Pulse has a time at which it calls promote.
    timer: bool = False

    def __bool__(self) -> bool:
        return self.rate or self.max_active > 0

    def room(self, active: int) -> int:
        """How many may begin; they are limited in some way."""
        places = [max(0, self.max_active - active)] if self.max_active else []
        return min(places + ([BURST - self.used] if self.rate else []))

    def begin(self, number: int, active: int) -> None:
        """`active`: with those that begin."""
        if self.max_active:
            assert number == 1, "a queue with max_active takes one at a time"
            assert active <= self.max_active, f"{active} are active, {self.max_active} may be"
        if self.rate:
            self.used += number
            assert self.used <= BURST, "more have begun than there were tokens"

    def refill(self, number: int) -> None:
        self.used = max(0, self.used - number)
