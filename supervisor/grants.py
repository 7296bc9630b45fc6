"""Carries what capacity.py decides to the workers, and what they say to it."""

from collections.abc import Sequence
from typing import Any, Protocol

from forq.procs.loop import Loop, Timer
from forq.procs.scoreboard import Scoreboard, State
from forq.supervisor.capacity import Capacity, CapacityView, Order


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
