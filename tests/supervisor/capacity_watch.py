"""Workers under a Capacity: books of our own to check each of its orders against, and a simulation with a clock."""

import heapq
import random
from dataclasses import dataclass
from itertools import count

from forq.supervisor.capacity import (
    PATIENCE_SECONDS,
    SHORTEST_TICK_SECONDS,
    SLICE_SECONDS,
    Capacity,
    Holder,
    Instruction,
)

# A power of two: differences of times divided by it are exact.
AGING_SECONDS = 0.25
UNITS = 100


@dataclass
class Terms:
    units: int
    priority: int
    since: float

    def level(self, now: float) -> int:
        return self.priority + int((now - self.since) // AGING_SECONDS)


class Watch:
    """Keeps its own books of a Capacity, and checks each order against the rules."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idle: set[Holder] = set()
        self.held: dict[Holder, Terms] = {}
        self.wishes: dict[Holder, Terms] = {}
        self.asked: dict[Holder, float] = {}
        self.capacity = Capacity(UNITS, aging_seconds=AGING_SECONDS, idle=self.idle.__contains__)

    def want(self, holder: Holder, units: int, priority: int) -> list[Instruction]:
        known, new = self.wishes.get(holder), Terms(min(units, UNITS), priority, self.now)
        self._forget(holder)
        same = known is not None and (known.units, known.priority) == (new.units, priority)
        self.wishes[holder] = known if known is not None and same else new
        orders = self.capacity.want(holder, units, priority, self.now)
        answers = [order.action for order in orders if order.holder == holder and order.action != "yield"]
        self.check(orders)
        assert answers == (["go"] if holder in self.held else ["wait"])
        return orders

    def done(self, holder: Holder) -> list[Instruction]:
        self._forget(holder)
        return self.check(self.capacity.done(holder, self.now))

    def gone(self, holder: Holder) -> list[Instruction]:
        self._forget(holder)
        orders = self.check(self.capacity.done(holder, self.now))
        assert holder not in {order.holder for order in orders}
        return orders

    def look(self) -> list[Instruction]:
        return self.check(self.capacity.tick(self.now))

    def _forget(self, holder: Holder) -> None:
        self.held.pop(holder, None)
        self.wishes.pop(holder, None)
        self.asked.pop(holder, None)

    @property
    def free(self) -> int:
        return UNITS - sum(terms.units for terms in self.held.values())

    def head(self) -> Terms | None:
        return min(self.wishes.values(), key=lambda w: (-w.level(self.now), w.units, w.since), default=None)

    def check(self, orders: list[Instruction]) -> list[Instruction]:
        for order in orders:
            {"go": self._check_go, "wait": self._check_wait, "yield": self._check_yield}[order.action](order.holder)
        self._check_rest()
        return orders

    def _check_wait(self, holder: Holder) -> None:
        assert holder in self.wishes

    def _check_go(self, holder: Holder) -> None:
        assert holder in self.wishes, "go for who does not want"
        wish, head = self.wishes[holder], self.head()
        assert head is not None
        for other in self.wishes.values():
            assert other.level(self.now) <= wish.level(self.now) or other.units > self.free, "passed one that fits"
        if head.level(self.now) > wish.level(self.now):
            assert self.now - head.since < AGING_SECONDS, "passed a head that has waited too long"
        del self.wishes[holder]
        self.held[holder] = Terms(wish.units, wish.priority, self.now)
        assert self.free >= 0, "more out than there is"

    def _may_ask(self, holder: Holder, head: Terms) -> bool:
        held, level = self.held[holder], head.level(self.now)
        slice_over = self.now >= held.since + SLICE_SECONDS
        return held.priority < level or (slice_over and (holder in self.idle or held.priority == level))

    def _check_yield(self, holder: Holder) -> None:
        head = self.head()
        assert head is not None
        assert holder in self.held
        assert holder not in self.asked, "asked twice"
        assert self._may_ask(holder, head)
        coming = sum(
            self.held[other].units for other in self._coming() if holder not in self.idle or other in self.idle
        )
        assert self.free + coming < head.units, "asked for nothing"
        self.asked[holder] = self.now

    def _coming(self) -> list[Holder]:
        """Who was asked a short time ago, and can be counted on."""
        return [holder for holder, at in self.asked.items() if self.now < at + PATIENCE_SECONDS]

    def _check_rest(self) -> None:
        """What holds between any two calls."""
        view = self.capacity.describe(self.now)
        assert {grant["holder"]: grant["units"] for grant in view["holders"]} == {
            holder: terms.units for holder, terms in self.held.items()
        }
        assert {grant["holder"] for grant in view["holders"] if grant["yield_sent"]} == set(self.asked)
        assert {waiter["holder"] for waiter in view["waiting"]} == set(self.wishes)
        assert (view["granted"], view["free"]) == (UNITS - self.free, self.free)
        head = self.head()
        if head is None:
            assert self.capacity.next_tick_seconds(self.now) is None
            return
        assert head.units > self.free, "the head fits and waits"
        if self.now - head.since < AGING_SECONDS:
            assert all(wish.units > self.free for wish in self.wishes.values()), "units left unused"
        coming = sum(self.held[holder].units for holder in self._coming())
        unasked = [holder for holder in self.held if holder not in self.asked and self._may_ask(holder, head)]
        assert self.free + coming >= head.units or not unasked, "one that should yield was not asked"


@dataclass(frozen=True)
class Kind:
    """A simulated worker: what it wants, and how often it does something else than going on."""

    units: int
    priority: int
    longest_job_seconds: float
    rests: float = 0.0
    dies: float = 0.0


class Simulation:
    """Workers that run jobs of random length under a Capacity; an asked one says done at the end of its job."""

    def __init__(self, kinds: list[Kind], seed: int) -> None:
        self.kinds = kinds
        self.random = random.Random(seed)
        self.watch = Watch()
        self.watch.idle.update(range(len(kinds)))
        self.events: list[tuple[float, int, Holder, str]] = []
        self.numbers = count()
        self.look_at: float | None = None
        self.served = [0] * len(kinds)
        longest = max(kind.longest_job_seconds for kind in kinds)
        looks = SLICE_SECONDS + SHORTEST_TICK_SECONDS
        highest = max(kind.priority for kind in kinds)
        self.bounds = [(highest - kind.priority + 1) * AGING_SECONDS + len(kinds) * (longest + looks) for kind in kinds]

    def run(self, seconds: float) -> None:
        for holder in range(len(self.kinds)):
            self._later(self.random.random() * 0.1, holder, "want")
        while self.watch.now < seconds:
            self._step()
            for holder, wish in self.watch.wishes.items():
                assert self.watch.now - wish.since <= self.bounds[holder], f"{holder} starves"

    def _later(self, seconds: float, holder: Holder, what: str) -> None:
        heapq.heappush(self.events, (self.watch.now + seconds, next(self.numbers), holder, what))

    def _step(self) -> None:
        if self.look_at is not None and (not self.events or self.look_at <= self.events[0][0]):
            self.watch.now = self.look_at
            orders = self.watch.look()
        else:
            self.watch.now, _, holder, what = heapq.heappop(self.events)
            orders = self._job_ends(holder) if what == "job ends" else self._want(holder)
        pending = list(orders)
        while pending:
            pending += self._obey(pending.pop(0))
        patience = self.watch.capacity.next_tick_seconds(self.watch.now)
        self.look_at = None if patience is None else self.watch.now + patience

    def _want(self, holder: Holder) -> list[Instruction]:
        if holder in self.watch.held:
            self._run_job(holder)
            return []
        return self.watch.want(holder, self.kinds[holder].units, self.kinds[holder].priority)

    def _run_job(self, holder: Holder) -> None:
        self.watch.idle.discard(holder)
        self.served[holder] += 1
        self._later(self.random.random() * self.kinds[holder].longest_job_seconds, holder, "job ends")

    def _job_ends(self, holder: Holder) -> list[Instruction]:
        kind = self.kinds[holder]
        self.watch.idle.add(holder)
        if self.random.random() < kind.dies:
            self._later(0.1, holder, "want")
            return self.watch.gone(holder)
        if holder in self.watch.asked:
            orders = self.watch.done(holder)
            self._later(0.0, holder, "want")
            return orders
        self._later(self.random.random() if self.random.random() < kind.rests else 0.0, holder, "want")
        return []

    def _obey(self, order: Instruction) -> list[Instruction]:
        if order.action == "go":
            self._run_job(order.holder)
        elif order.action == "yield" and order.holder in self.watch.idle:
            return self.watch.done(order.holder)
        return []
