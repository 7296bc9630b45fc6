"""Who may run jobs: the supervisor's units of capacity, handed out and asked back. Pure: time is an argument.

1. A worker that wants units is told `go` when it may use them, else `wait`, and `go` later.
2. It keeps them, idle or busy, until it says `done`. While nobody waits, nobody is asked for anything.
3. When the first in line does not fit, holders are told to `yield`, each once until it answers with `done`.

The line: highest level first (priority, plus one for each `aging_seconds` of waiting), then fewest units, then longest
waiting. Smaller ones may pass a head that does not fit, but only until it has waited for `aging_seconds`: after that
what becomes free is kept for it. So nobody starves: with A = aging_seconds, J the longest time from `yield` to `done`,
D how far a wish's priority is below the highest, and N workers, it is served within (D + 1) * A + N * J, if looks are
in time. For whoever comes (D + 1) * A or more after it never gets before it, and by then it and all before it (at most
N - 1) are above every priority, so that each of them, once the head, has all holders asked and all units kept for it.

A holder is the number of a worker's slot. After `gone` the number is its successor's: the caller must not pass on what
the dead one had still said.

Carries what capacity.py decides to the workers, and what they say to it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any, Literal, Protocol, TypedDict

from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import Scoreboard, State

# So long a worker may run jobs before it has to share with others of its level. For as long a new grant counts as in
# use, whatever its holder's slot says: the holder has yet to hear of it, and to ask it back at once because it looks
# idle would give a queue of lower priority every other turn.
SLICE_SECONDS = 0.05
# A holder that was asked and has not answered for so long runs a long job, or never will: others are asked, too.
PATIENCE_SECONDS = 1.0
# Looks are no closer than this, so that a thousand wishes that age at different moments do not keep the loop busy.
SHORTEST_LOOK_SECONDS = 0.01

Holder = int
Word = Literal["go", "wait", "yield"]


@dataclass(frozen=True)
class Order:
    """What to tell a worker."""

    holder: Holder
    word: Word


class HolderView(TypedDict):
    holder: Holder
    units: int
    priority: int
    held_seconds: float
    asked_to_yield: bool


class WaiterView(TypedDict):
    holder: Holder
    units: int
    priority: int
    level: int
    waited_seconds: float


class CapacityView(TypedDict):
    units: int
    out: int
    free: int
    holders: list[HolderView]
    waiting: list[WaiterView]


@dataclass(slots=True)
class _Grant:
    holder: Holder
    units: int
    priority: int
    since: float
    asked_at: float | None = None

    @property
    def asked(self) -> bool:
        return self.asked_at is not None

    def slice_end(self) -> float:
        return self.since + SLICE_SECONDS

    def patience_end(self) -> float:
        return -inf if self.asked_at is None else self.asked_at + PATIENCE_SECONDS

    def is_coming(self, now: float) -> bool:
        """Whether its units can be counted on."""
        return now < self.patience_end()


@dataclass(frozen=True, slots=True)
class _Wish:
    holder: Holder
    units: int
    priority: int
    since: float


class Capacity:
    """The units of one supervisor. `units` and `aging_seconds` are above 0; `idle` says that a holder runs no job."""

    def __init__(self, units: int, *, aging_seconds: float, idle: Callable[[Holder], bool]) -> None:
        self.units = units
        self.out = 0
        self._aging_seconds = aging_seconds
        self._idle = idle
        self._grants: dict[Holder, _Grant] = {}
        self._wishes: dict[Holder, _Wish] = {}
        self._looked_at = 0.0

    @property
    def free(self) -> int:
        return self.units - self.out

    def want(self, holder: Holder, units: int, priority: int, now: float) -> list[Order]:
        """This worker would like to run jobs; the answer to it, `go` or `wait`, is among the orders.

        More units than there are mean all of them. A holder that wants has ended its use of what it held. The same
        wish once more keeps its place in the line; a different one starts anew.
        """
        self._take_back(holder)
        wish = _Wish(holder, max(1, min(units, self.units)), priority, now)
        if not self._wishes and wish.units <= self.free:
            return [self._give(wish, now)]
        known = self._wishes.get(holder)
        if known is None or (known.units, known.priority) != (wish.units, wish.priority):
            self._wishes.pop(holder, None)
            self._wishes[holder] = wish
        orders = self._serve(now)
        return [Order(holder, "wait"), *orders] if holder in self._wishes else orders

    def done(self, holder: Holder, now: float) -> list[Order]:
        """This worker uses nothing and wants nothing."""
        self._take_back(holder)
        self._wishes.pop(holder, None)
        return self._serve(now)

    def gone(self, holder: Holder, now: float) -> list[Order]:
        """This worker is dead."""
        return self.done(holder, now)

    def look(self, now: float) -> list[Order]:
        """Time has passed."""
        return self._serve(now)

    def next_look_seconds(self, now: float) -> float | None:
        """In how long a look may change something; None: not by time alone.

        Counted from the last look (each call is one while somebody waits), so that asking again postpones nothing.
        """
        if not self._wishes:
            return None
        last = self._looked_at
        moments = [wish.since + (self._rises(wish, last) + 1) * self._aging_seconds for wish in self._wishes.values()]
        unasked = [grant for grant in self._grants.values() if not grant.asked]
        moments += [grant.slice_end() for grant in unasked if grant.slice_end() > last]
        moments += [grant.patience_end() for grant in self._grants.values() if grant.is_coming(last)]
        if unasked:
            # Nobody says when a holder becomes idle.
            moments.append(last + SLICE_SECONDS)
        return max(0.0, max(min(moments), last + SHORTEST_LOOK_SECONDS) - now)

    def describe(self, now: float) -> CapacityView:
        """For people: holders with the longest holding first, and the line."""
        return {
            "units": self.units,
            "out": self.out,
            "free": self.free,
            "holders": [
                {
                    "holder": grant.holder,
                    "units": grant.units,
                    "priority": grant.priority,
                    "held_seconds": now - grant.since,
                    "asked_to_yield": grant.asked,
                }
                for grant in self._grants.values()
            ],
            "waiting": [
                {
                    "holder": wish.holder,
                    "units": wish.units,
                    "priority": wish.priority,
                    "level": self._level(wish, now),
                    "waited_seconds": now - wish.since,
                }
                for wish in self._line(now)
            ],
        }

    def _serve(self, now: float) -> list[Order]:
        """Hands out what is free, and asks for what the first in line lacks."""
        if not self._wishes:
            return []
        self._looked_at = now
        orders: list[Order] = []
        head: _Wish | None = None
        for wish in self._line(now):
            if wish.units <= self.free:
                del self._wishes[wish.holder]
                orders.append(self._give(wish, now))
            elif head is None:
                head = wish
                if self._rises(head, now) >= 1:
                    break
        if head is not None:
            orders += self._ask_for(head, now)
        return orders

    def _ask_for(self, head: _Wish, now: float) -> Iterator[Order]:
        """Asks idle holders first, then busy ones that the head may displace, until it will fit.

        What busy holders were asked for does not spare an idle one: they may take long, and a reservation that nobody
        uses should not keep the head waiting for them.
        """
        level = self._level(head, now)
        lacking = lacking_without_busy = head.units - self.free
        candidates: list[tuple[bool, int, float, _Grant]] = []
        for grant in self._grants.values():
            slice_over = now >= grant.slice_end()
            busy = not (slice_over and self._idle(grant.holder))
            if grant.is_coming(now):
                lacking -= grant.units
                lacking_without_busy -= 0 if busy else grant.units
            elif grant.asked:
                continue
            elif not busy or grant.priority < level or (grant.priority == level and slice_over):
                candidates.append((busy, grant.priority, grant.since, grant))
        candidates.sort(key=lambda candidate: candidate[:3])
        for busy, _, _, grant in candidates:
            if (lacking if busy else lacking_without_busy) > 0:
                grant.asked_at = now
                lacking -= grant.units
                lacking_without_busy -= grant.units
                yield Order(grant.holder, "yield")

    def _give(self, wish: _Wish, now: float) -> Order:
        self._grants[wish.holder] = _Grant(wish.holder, wish.units, wish.priority, now)
        self.out += wish.units
        return Order(wish.holder, "go")

    def _take_back(self, holder: Holder) -> None:
        grant = self._grants.pop(holder, None)
        if grant is not None:
            self.out -= grant.units

    def _line(self, now: float) -> list[_Wish]:
        return sorted(self._wishes.values(), key=lambda wish: (-self._level(wish, now), wish.units, wish.since))

    def _level(self, wish: _Wish, now: float) -> int:
        return wish.priority + self._rises(wish, now)

    def _rises(self, wish: _Wish, now: float) -> int:
        return floor((now - wish.since) / self._aging_seconds)


class Crew(Protocol):
    """A process whose workers hold grants: `slots` are their numbers, `name` is what it is called."""

    @property
    def slots(self) -> Sequence[int]: ...

    @property
    def name(self) -> str: ...

    def tell(self, message: dict[str, Any]) -> None: ...


class Grants:
    def __init__(self, loop: Loop, scoreboard: Scoreboard, units: int, aging_seconds: float) -> None:
        self._loop = loop
        self._board = scoreboard
        self._crews: dict[int, Crew] = {}
        self._timer: Timer | None = None
        self.capacity = Capacity(units, aging_seconds=aging_seconds, idle=self._is_idle)

    def enter(self, crew: Crew) -> None:
        for number in crew.slots:
            self._crews[number] = crew

    def leave(self, crew: Crew) -> None:
        """Its process is dead: what its workers held is free at once."""
        for number in crew.slots:
            self._crews.pop(number, None)
            self._carry_out(self.capacity.gone(number, self._loop.now()))

    def hear(self, message: dict[str, Any]) -> None:
        now = self._loop.now()
        if "want" in message:
            self._carry_out(self.capacity.want(message["want"], message["units"], message["priority"], now))
        else:
            self._carry_out(self.capacity.done(message["done"], now))

    def waiting_seconds(self, name: str) -> float | None:
        """How long a process of this name has waited for units; None if it does not."""
        waits = self.capacity.describe(self._loop.now())["waiting"]
        mine = [wish["waited_seconds"] for wish in waits if self._crews[wish["holder"]].name == name]
        return max(mine, default=None)

    def unused_units(self) -> int:
        """Free, or kept by workers that run nothing: they hand them over when somebody needs them."""
        view = self.capacity.describe(self._loop.now())
        return int(view["units"]) - self._in_use(view)

    def _in_use(self, view: CapacityView) -> int:
        return sum(grant["units"] for grant in view["holders"] if not self._is_idle(grant["holder"]))

    def describe(self) -> dict[str, Any]:
        """How many units are out, who holds them (in use, or only kept for the next job), and who waits for some."""
        view = self.capacity.describe(self._loop.now())
        held = [
            {
                "worker": self._crews[grant["holder"]].name,
                "units": grant["units"],
                "priority": grant["priority"],
                "in_use": not self._is_idle(grant["holder"]),
                "seconds": round(grant["held_seconds"], 3),
            }
            for grant in view["holders"]
        ]
        waiting = [
            {
                "worker": self._crews[wish["holder"]].name,
                "units": wish["units"],
                "priority": wish["priority"],
                "seconds": round(wish["waited_seconds"], 3),
            }
            for wish in view["waiting"]
        ]
        in_use = self._in_use(view)
        return {"units": view["units"], "in_use": in_use, "free": view["free"], "held": held, "waiting": waiting}

    def _is_idle(self, number: int) -> bool:
        return self._board.slot(number).state != State.BUSY

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            self._crews[order.holder].tell({order.word: order.holder})
        if self._timer is not None:
            self._timer.cancel()
        seconds = self.capacity.next_look_seconds(self._loop.now())
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        self._carry_out(self.capacity.look(self._loop.now()))
