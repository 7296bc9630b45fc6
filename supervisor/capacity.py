"""The supervisor's capacity: which workers may run jobs now (Capacity), and the messages to and from them (Grants).

1. A worker that wants units gets `go` if it may use them at once, else `wait`, and `go` later.
2. It keeps its units, idle or busy, until it sends `done`. While no worker waits, no holder has to yield.
3. If the first waiter in line does not fit, holders get `yield`, each once until it answers with `done`.

Order of the line: highest level first (priority, plus one for each `aging_seconds` of waiting), then fewest units, then
longest waiting. Smaller waiters may pass a head that does not fit, until the head has waited for `aging_seconds`. From
then on all units that become free are reserved for it.

No worker starves. Let A = aging_seconds, J = longest time from `yield` to `done`, D = distance of a waiter's priority
from the highest one, N = number of workers. If ticks are on time, a waiter is served within (D + 1) * A + N * J:
a worker that comes (D + 1) * A or more after it never passes it, and by then the waiter and all before it (at most
N - 1) are above every priority. So each of them, once it is the head, makes all holders yield and reserves all units.

A holder is the slot number of a worker. When a worker dies, its successor may get the same number: the caller must drop
messages of the dead worker.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any, Literal, Protocol, TypedDict

from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import Scoreboard, State

# A worker may run jobs this long before it has to share with others of its level. A new grant counts as busy for the
# same time, even if the slot is idle: its holder may not have received it yet. If such a grant were taken back, a queue
# of lower priority would get every other turn.
SLICE_SECONDS = 0.05
# A holder that has not answered `yield` within this time runs a long job or hangs: further holders must yield, too.
PATIENCE_SECONDS = 1.0
# Shortest time between ticks: a thousand waiters that age at different moments must not keep the loop busy.
SHORTEST_TICK_SECONDS = 0.01

Holder = int
Action = Literal["go", "wait", "yield"]


@dataclass(frozen=True)
class Instruction:
    holder: Holder
    action: Action


class HolderView(TypedDict):
    holder: Holder
    units: int
    priority: int
    held_seconds: float
    yield_sent: bool


class WaiterView(TypedDict):
    holder: Holder
    units: int
    priority: int
    level: int
    waited_seconds: float


class CapacityView(TypedDict):
    units: int
    granted: int
    free: int
    holders: list[HolderView]
    waiting: list[WaiterView]


@dataclass(slots=True)
class _Grant:
    holder: Holder
    units: int
    priority: int
    since: float
    yield_sent_at: float | None = None

    @property
    def yield_sent(self) -> bool:
        return self.yield_sent_at is not None

    def slice_end(self) -> float:
        return self.since + SLICE_SECONDS

    def patience_end(self) -> float:
        return -inf if self.yield_sent_at is None else self.yield_sent_at + PATIENCE_SECONDS

    def is_expected_back(self, now: float) -> bool:
        """Whether it got a `yield` recently, so that its `done` is likely to follow soon."""
        return now < self.patience_end()


@dataclass(frozen=True, slots=True)
class _Waiter:
    holder: Holder
    units: int
    priority: int
    since: float


class Capacity:
    """The units of one supervisor. Has no clock and no I/O: time is an argument, messages are returned.

    `units` and `aging_seconds` are above 0; `idle` returns whether a holder runs no job.
    """

    def __init__(self, units: int, *, aging_seconds: float, idle: Callable[[Holder], bool]) -> None:
        self.units = units
        self.granted = 0
        self._aging_seconds = aging_seconds
        self._idle = idle
        self._grants: dict[Holder, _Grant] = {}
        self._waiters: dict[Holder, _Waiter] = {}
        self._ticked_at = 0.0

    @property
    def free(self) -> int:
        return self.units - self.granted

    def want(self, holder: Holder, units: int, priority: int, now: float) -> list[Instruction]:
        """A worker wants to run jobs. The result contains the answer for it, `go` or `wait`.

        Requests for more than all units mean all units. A holder that wants units has given back its old ones. The
        same request again keeps its place in the line; one with other units or priority goes to the end.
        """
        self._take_back(holder)
        waiter = _Waiter(holder, max(1, min(units, self.units)), priority, now)
        if not self._waiters and waiter.units <= self.free:
            return [self._give(waiter, now)]
        known = self._waiters.get(holder)
        if known is None or (known.units, known.priority) != (waiter.units, waiter.priority):
            self._waiters.pop(holder, None)
            self._waiters[holder] = waiter
        instructions = self._serve(now)
        return [Instruction(holder, "wait"), *instructions] if holder in self._waiters else instructions

    def done(self, holder: Holder, now: float) -> list[Instruction]:
        """A worker gives back its units and leaves the line, or has died."""
        self._take_back(holder)
        self._waiters.pop(holder, None)
        return self._serve(now)

    def tick(self, now: float) -> list[Instruction]:
        return self._serve(now)

    def next_tick_seconds(self, now: float) -> float | None:
        """Seconds until a tick may change something; None if time alone changes nothing.

        Counted from the last tick (while a worker waits, every call is one), so that calling this postpones nothing.
        """
        if not self._waiters:
            return None
        last = self._ticked_at
        moments = [
            waiter.since + (self._aged_levels(waiter, last) + 1) * self._aging_seconds
            for waiter in self._waiters.values()
        ]
        not_yielding = [grant for grant in self._grants.values() if not grant.yield_sent]
        moments += [grant.slice_end() for grant in not_yielding if grant.slice_end() > last]
        moments += [grant.patience_end() for grant in self._grants.values() if grant.is_expected_back(last)]
        if not_yielding:
            # No message arrives when a holder becomes idle.
            moments.append(last + SLICE_SECONDS)
        return max(0.0, max(min(moments), last + SHORTEST_TICK_SECONDS) - now)

    def describe(self, now: float) -> CapacityView:
        """Holders, oldest grant first, and the line."""
        return {
            "units": self.units,
            "granted": self.granted,
            "free": self.free,
            "holders": [
                {
                    "holder": grant.holder,
                    "units": grant.units,
                    "priority": grant.priority,
                    "held_seconds": now - grant.since,
                    "yield_sent": grant.yield_sent,
                }
                for grant in self._grants.values()
            ],
            "waiting": [
                {
                    "holder": waiter.holder,
                    "units": waiter.units,
                    "priority": waiter.priority,
                    "level": self._level(waiter, now),
                    "waited_seconds": now - waiter.since,
                }
                for waiter in self._waiting_line(now)
            ],
        }

    def _serve(self, now: float) -> list[Instruction]:
        """Grants free units, and makes holders yield the units that the first waiter still needs."""
        if not self._waiters:
            return []
        self._ticked_at = now
        instructions: list[Instruction] = []
        head: _Waiter | None = None
        for waiter in self._waiting_line(now):
            if waiter.units <= self.free:
                del self._waiters[waiter.holder]
                instructions.append(self._give(waiter, now))
            elif head is None:
                head = waiter
                if self._aged_levels(head, now) >= 1:
                    break
        if head is not None:
            instructions += self._make_holders_yield(head, now)
        return instructions

    def _make_holders_yield(self, head: _Waiter, now: float) -> Iterator[Instruction]:
        """Idle holders first, then busy ones that the head may displace, until it will fit.

        Units expected from busy holders do not spare an idle holder: a busy one may take long, and the head should not
        wait while units are reserved and unused.
        """
        level = self._level(head, now)
        lacking = lacking_without_busy = head.units - self.free
        candidates: list[tuple[bool, int, float, _Grant]] = []
        for grant in self._grants.values():
            slice_over = now >= grant.slice_end()
            busy = not (slice_over and self._idle(grant.holder))
            if grant.is_expected_back(now):
                lacking -= grant.units
                lacking_without_busy -= 0 if busy else grant.units
            elif grant.yield_sent:
                continue
            elif not busy or grant.priority < level or (grant.priority == level and slice_over):
                candidates.append((busy, grant.priority, grant.since, grant))
        candidates.sort(key=lambda candidate: candidate[:3])
        for busy, _, _, grant in candidates:
            if (lacking if busy else lacking_without_busy) > 0:
                grant.yield_sent_at = now
                lacking -= grant.units
                lacking_without_busy -= grant.units
                yield Instruction(grant.holder, "yield")

    def _give(self, waiter: _Waiter, now: float) -> Instruction:
        self._grants[waiter.holder] = _Grant(waiter.holder, waiter.units, waiter.priority, now)
        self.granted += waiter.units
        return Instruction(waiter.holder, "go")

    def _take_back(self, holder: Holder) -> None:
        grant = self._grants.pop(holder, None)
        if grant is not None:
            self.granted -= grant.units

    def _waiting_line(self, now: float) -> list[_Waiter]:
        return sorted(
            self._waiters.values(), key=lambda waiter: (-self._level(waiter, now), waiter.units, waiter.since)
        )

    def _level(self, waiter: _Waiter, now: float) -> int:
        return waiter.priority + self._aged_levels(waiter, now)

    def _aged_levels(self, waiter: _Waiter, now: float) -> int:
        return floor((now - waiter.since) / self._aging_seconds)


class WorkerProcess(Protocol):
    """A process whose workers hold grants; `slots` are their slot numbers."""

    @property
    def slots(self) -> Sequence[int]: ...

    @property
    def name(self) -> str: ...

    @property
    def main_of(self) -> str | None:
        """The queue of which it is a main process."""

    def send(self, message: dict[str, Any]) -> None: ...


class Grants:
    """Passes messages between the workers and Capacity, and runs its ticks."""

    def __init__(self, loop: Loop, scoreboard: Scoreboard, units: int, aging_seconds: float) -> None:
        self._loop = loop
        self._board = scoreboard
        self._processes: dict[int, WorkerProcess] = {}
        self._timer: Timer | None = None
        self.capacity = Capacity(units, aging_seconds=aging_seconds, idle=self._is_idle)

    def add(self, process: WorkerProcess) -> None:
        for number in process.slots:
            self._processes[number] = process

    def remove(self, process: WorkerProcess) -> None:
        """The process is dead: the units of its workers are free at once."""
        for number in process.slots:
            self._processes.pop(number, None)
            self._send_all(self.capacity.done(number, self._loop.now()))

    def handle(self, message: dict[str, Any]) -> None:
        now = self._loop.now()
        if "want" in message:
            self._send_all(self.capacity.want(message["want"], message["units"], message["priority"], now))
        else:
            self._send_all(self.capacity.done(message["done"], now))

    def waiting_seconds(self, queue: str) -> float | None:
        """How long a main process of this queue has been waiting for units; None if none is."""
        waits = self.capacity.describe(self._loop.now())["waiting"]
        mine = [waiter["waited_seconds"] for waiter in waits if self._processes[waiter["holder"]].main_of == queue]
        return max(mine, default=None)

    def unused_units(self) -> int:
        """Units that are free or held by idle workers, which yield them on request."""
        view = self.capacity.describe(self._loop.now())
        return int(view["units"]) - self._in_use(view)

    def _in_use(self, view: CapacityView) -> int:
        return sum(grant["units"] for grant in view["holders"] if not self._is_idle(grant["holder"]))

    def describe(self) -> dict[str, Any]:
        """For `status`: units in use, their holders (running a job or idle), and the workers waiting."""
        view = self.capacity.describe(self._loop.now())
        held = [
            {
                "worker": self._processes[grant["holder"]].name,
                "units": grant["units"],
                "priority": grant["priority"],
                "in_use": not self._is_idle(grant["holder"]),
                "seconds": round(grant["held_seconds"], 3),
            }
            for grant in view["holders"]
        ]
        waiting = [
            {
                "worker": self._processes[waiter["holder"]].name,
                "units": waiter["units"],
                "priority": waiter["priority"],
                "seconds": round(waiter["waited_seconds"], 3),
            }
            for waiter in view["waiting"]
        ]
        in_use = self._in_use(view)
        return {"units": view["units"], "in_use": in_use, "free": view["free"], "held": held, "waiting": waiting}

    def _is_idle(self, number: int) -> bool:
        return self._board.slot(number).state != State.BUSY

    def _send_all(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._processes[instruction.holder].send({instruction.action: instruction.holder})
        if self._timer is not None:
            self._timer.cancel()
        seconds = self.capacity.next_tick_seconds(self._loop.now())
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._send_all(self.capacity.tick(self._loop.now()))
