"""A model that checks each instruction of a Capacity, and a simulation of workers with a fake clock."""

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


class CapacityModel:
    """Tracks the state of a Capacity independently, and checks each instruction against the rules."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idle: set[Holder] = set()
        self.held: dict[Holder, Terms] = {}
        self.requests: dict[Holder, Terms] = {}
        self.yielding: dict[Holder, float] = {}
        self.capacity = Capacity(UNITS, aging_seconds=AGING_SECONDS, idle=self.idle.__contains__)

    def want(self, holder: Holder, units: int, priority: int) -> list[Instruction]:
        known, new = self.requests.get(holder), Terms(min(units, UNITS), priority, self.now)
        self._forget(holder)
        same = known is not None and (known.units, known.priority) == (new.units, priority)
        self.requests[holder] = known if known is not None and same else new
        instructions = self.capacity.want(holder, units, priority, self.now)
        answers = [
            instruction.action
            for instruction in instructions
            if instruction.holder == holder and instruction.action != "yield"
        ]
        self.check(instructions)
        assert answers == (["go"] if holder in self.held else ["wait"])
        return instructions

    def done(self, holder: Holder) -> list[Instruction]:
        self._forget(holder)
        return self.check(self.capacity.done(holder, self.now))

    def gone(self, holder: Holder) -> list[Instruction]:
        self._forget(holder)
        instructions = self.check(self.capacity.done(holder, self.now))
        assert holder not in {instruction.holder for instruction in instructions}
        return instructions

    def tick(self) -> list[Instruction]:
        return self.check(self.capacity.tick(self.now))

    def _forget(self, holder: Holder) -> None:
        self.held.pop(holder, None)
        self.requests.pop(holder, None)
        self.yielding.pop(holder, None)

    @property
    def free(self) -> int:
        return UNITS - sum(terms.units for terms in self.held.values())

    def head(self) -> Terms | None:
        return min(self.requests.values(), key=lambda w: (-w.level(self.now), w.units, w.since), default=None)

    def check(self, instructions: list[Instruction]) -> list[Instruction]:
        for instruction in instructions:
            {"go": self._check_go, "wait": self._check_wait, "yield": self._check_yield}[instruction.action](
                instruction.holder
            )
        self._check_invariants()
        return instructions

    def _check_wait(self, holder: Holder) -> None:
        assert holder in self.requests

    def _check_go(self, holder: Holder) -> None:
        assert holder in self.requests, "granted without a request"
        request, head = self.requests[holder], self.head()
        assert head is not None
        for other in self.requests.values():
            assert other.level(self.now) <= request.level(self.now) or other.units > self.free, (
                "overtook a request that fits"
            )
        if head.level(self.now) > request.level(self.now):
            assert self.now - head.since < AGING_SECONDS, "overtook the first waiter, which has waited too long"
        del self.requests[holder]
        self.held[holder] = Terms(request.units, request.priority, self.now)
        assert self.free >= 0, "granted more than the capacity"

    def _may_yield(self, holder: Holder, head: Terms) -> bool:
        held, level = self.held[holder], head.level(self.now)
        return held.priority < level or (self._slice_over(holder) and (holder in self.idle or held.priority == level))

    def _slice_over(self, holder: Holder) -> bool:
        return self.now >= self.held[holder].since + SLICE_SECONDS

    def _counts_as_idle(self, holder: Holder) -> bool:
        """A holder may not have received a new grant yet."""
        return holder in self.idle and self._slice_over(holder)

    def _check_yield(self, holder: Holder) -> None:
        head = self.head()
        assert head is not None
        assert holder in self.held
        assert holder not in self.yielding, "requested to yield twice"
        assert self._may_yield(holder, head)
        idle = self._counts_as_idle(holder)
        expected = sum(self.held[other].units for other in self._expected() if not idle or self._counts_as_idle(other))
        assert self.free + expected < head.units, "requested to yield without need"
        self.yielding[holder] = self.now

    def _expected(self) -> list[Holder]:
        """Holders requested to yield so recently that they are still expected to."""
        return [holder for holder, at in self.yielding.items() if self.now < at + PATIENCE_SECONDS]

    def _check_invariants(self) -> None:
        """Invariants between any two calls."""
        view = self.capacity.describe(self.now)
        assert {grant["holder"]: grant["units"] for grant in view["holders"]} == {
            holder: terms.units for holder, terms in self.held.items()
        }
        assert {grant["holder"] for grant in view["holders"] if grant["yield_sent"]} == set(self.yielding)
        assert {waiter["holder"] for waiter in view["waiting"]} == set(self.requests)
        assert (view["granted"], view["free"]) == (UNITS - self.free, self.free)
        head = self.head()
        if head is None:
            assert self.capacity.next_tick_seconds(self.now) is None
            return
        assert head.units > self.free, "the first waiter fits but waits"
        if self.now - head.since < AGING_SECONDS:
            assert all(request.units > self.free for request in self.requests.values()), "units left unused"
        expected = sum(self.held[holder].units for holder in self._expected())
        others = [holder for holder in self.held if holder not in self.yielding and self._may_yield(holder, head)]
        assert self.free + expected >= head.units or not others, "no yield was requested of a holder that should"


@dataclass(frozen=True)
class Kind:
    """A simulated worker: its terms, and how often it pauses or dies."""

    units: int
    priority: int
    longest_job_seconds: float
    rests: float = 0.0
    dies: float = 0.0


class Simulation:
    """Workers that run jobs of random length under a Capacity, and yield on request at the end of a job."""

    def __init__(self, kinds: list[Kind], seed: int) -> None:
        self.kinds = kinds
        self.random = random.Random(seed)
        self.model = CapacityModel()
        self.model.idle.update(range(len(kinds)))
        self.events: list[tuple[float, int, Holder, str]] = []
        self.numbers = count()
        self.tick_at: float | None = None
        self.served = [0] * len(kinds)
        longest = max(kind.longest_job_seconds for kind in kinds)
        tick_seconds = SLICE_SECONDS + SHORTEST_TICK_SECONDS
        highest = max(kind.priority for kind in kinds)
        self.bounds = [
            (highest - kind.priority + 1) * AGING_SECONDS + len(kinds) * (longest + tick_seconds) for kind in kinds
        ]

    def run(self, seconds: float) -> None:
        for holder in range(len(self.kinds)):
            self._later(self.random.random() * 0.1, holder, "want")
        while self.model.now < seconds:
            self._step()
            for holder, request in self.model.requests.items():
                assert self.model.now - request.since <= self.bounds[holder], f"{holder} starves"

    def _later(self, seconds: float, holder: Holder, what: str) -> None:
        heapq.heappush(self.events, (self.model.now + seconds, next(self.numbers), holder, what))

    def _step(self) -> None:
        if self.tick_at is not None and (not self.events or self.tick_at <= self.events[0][0]):
            self.model.now = self.tick_at
            instructions = self.model.tick()
        else:
            self.model.now, _, holder, what = heapq.heappop(self.events)
            instructions = self._job_ends(holder) if what == "job ends" else self._want(holder)
        pending = list(instructions)
        while pending:
            pending += self._follow(pending.pop(0))
        patience = self.model.capacity.next_tick_seconds(self.model.now)
        self.tick_at = None if patience is None else self.model.now + patience

    def _want(self, holder: Holder) -> list[Instruction]:
        if holder in self.model.held:
            self._run_job(holder)
            return []
        return self.model.want(holder, self.kinds[holder].units, self.kinds[holder].priority)

    def _run_job(self, holder: Holder) -> None:
        self.model.idle.discard(holder)
        self.served[holder] += 1
        self._later(self.random.random() * self.kinds[holder].longest_job_seconds, holder, "job ends")

    def _job_ends(self, holder: Holder) -> list[Instruction]:
        kind = self.kinds[holder]
        self.model.idle.add(holder)
        if self.random.random() < kind.dies:
            self._later(0.1, holder, "want")
            return self.model.gone(holder)
        if holder in self.model.yielding:
            instructions = self.model.done(holder)
            self._later(0.0, holder, "want")
            return instructions
        self._later(self.random.random() if self.random.random() < kind.rests else 0.0, holder, "want")
        return []

    def _follow(self, instruction: Instruction) -> list[Instruction]:
        if instruction.action == "go":
            self._run_job(instruction.holder)
        elif instruction.action == "yield" and instruction.holder in self.model.idle:
            return self.model.done(instruction.holder)
        return []
