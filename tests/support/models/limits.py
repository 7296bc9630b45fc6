"""A model of rate and max_active. Tokens return only when a test lets an hour pass."""

from dataclasses import dataclass

BURST = 3


@dataclass
class ModelLimits:
    max_active: int = 0
    rate: bool = False  # one job per hour, BURST at once
    used: int = 0  # tokens that have not returned yet
    # Time has passed, or a limit was changed, and pulse has not called promote yet.
    promised: bool = False
    # Pulse has a timer for its next call of promote.
    timer: bool = False

    def __bool__(self) -> bool:
        return self.rate or self.max_active > 0

    def room(self, active: int) -> int:
        """How many jobs may begin; always finite."""
        places = [max(0, self.max_active - active)] if self.max_active else []
        return min(places + ([BURST - self.used] if self.rate else []))

    def begin(self, number: int, active: int) -> None:
        """`active`: including those that begin."""
        if self.max_active:
            assert number == 1, "a queue with max_active takes one at a time"
            assert active <= self.max_active, f"{active} are active, {self.max_active} may be"
        if self.rate:
            self.used += number
            assert self.used <= BURST, "more have begun than there were tokens"

    def refill(self, number: int) -> None:
        self.used = max(0, self.used - number)
