"""One queue as the supervisor runs it: its main child and its retry child, their deaths and their state.

A child's death takes this way: its tree is gone (child.py) → what it held goes to pulse for recovery → its slots are
given back once that is done → another child is started, at once or after a pause (respawn.py).
"""

import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from forq import exits, wire
from forq.errors import ForqError
from forq.options import QueueSpec, Value
from forq.scoreboard import Role, Scoreboard, Slot, State, unpack_word
from forq.supervisor.child import Child, Nursery
from forq.supervisor.loop import Timer
from forq.supervisor.respawn import SETTLED_SECONDS, Respawn
from forq.supervisor.spawn import Exit

log = logging.getLogger("forq")


@dataclass(frozen=True)
class Surroundings:
    """What a queue's unit needs of the supervisor."""

    nursery: Nursery
    scoreboard: Scoreboard
    run_child: Callable[[QueueSpec, Role, tuple[int, ...], socket.socket], int]
    recover: Callable[[dict[str, Any], Callable[[], None]], None]
    queue_gone: Callable[[str], None]
    evicted: Callable[[], None]
    changed: Callable[[], None]
    processor: Callable[[], str]


class _Seat:
    """The place of one child of the queue: who sits there now, and its deaths so far."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.child: Child | None = None
        self.slots: tuple[int, ...] = ()
        self.restarts = 0
        self.processor = ""
        self.ready = False
        self.respawn = Respawn()
        self.timer: Timer | None = None
        self.last_words: str | None = None


class QueueUnit:
    def __init__(self, spec: QueueSpec, options: Mapping[str, Value], around: Surroundings) -> None:
        self.spec = spec
        self.options = options
        self.draining = False
        self.config_error: str | None = None
        self._around = around
        self._seats = [_Seat(Role.MAIN), _Seat(Role.RETRY)]
        self._wanted = False
        self._then: list[Callable[[], None]] = []
        self._start_again: Callable[[], None] | None = None
        self._opened = False
        self._when_opened: list[Callable[[], None]] = []

    @property
    def state(self) -> str:
        if self.config_error is not None:
            return "config_error"
        if not self._wanted:
            return "stopped"
        if any(self._flapping(seat) for seat in self._seats):
            return "flapping"
        return "draining" if self.draining else "running"

    def _flapping(self, seat: _Seat) -> bool:
        """It died again and again; the one that runs now has not shown yet that it does better."""
        if not seat.respawn.flapping:
            return False
        settled = any(self._around.scoreboard.slot(number).done for number in seat.slots)
        return seat.child is None or not (settled or seat.child.uptime_seconds() > SETTLED_SECONDS)

    @property
    def running(self) -> bool:
        return any(seat.child is not None for seat in self._seats)

    @property
    def wanted(self) -> bool:
        """Whether its children run, or are about to."""
        return self._wanted or self._start_again is not None

    @property
    def opening(self) -> bool:
        """Whether the queue has yet to be made in Redis for the first time."""
        return not self._opened and self.config_error is None

    def when_opened(self, call: Callable[[], None]) -> None:
        self._when_opened.append(call)

    def start(self) -> None:
        self._wanted = self._opened = True
        waiting, self._when_opened = self._when_opened, []
        for call in waiting:
            call()
        self.config_error = None
        for seat in self._seats:
            if seat.child is None:
                self._spawn(seat)

    def stop(self, then: Callable[[], None] | None = None, *, now: bool = False) -> None:
        """Ends both children: in order within the grace period, or at once. `then` is called when they are gone."""
        self._wanted = False
        self._start_again = None
        if then is not None:
            self._then.append(then)
        for seat in self._seats:
            if seat.timer is not None:
                seat.timer.cancel()
            if seat.child is not None:
                if now:
                    seat.child.kill()
                else:
                    seat.child.stop(float(self.options["stop_grace"]))
        self._tell_if_stopped()

    def restart(self, then: Callable[[], None]) -> None:
        """New children, with the handler's code as it is now. `then` is called also if a stop comes in between."""

        def start_again() -> None:
            for seat in self._seats:
                seat.respawn.forget()
            self.start()

        self.stop(then)
        if self.running:
            self._start_again = start_again
        else:
            start_again()

    def describe_children(self) -> list[dict[str, Any]]:
        return [self._describe(seat) for seat in self._seats]

    def _describe(self, seat: _Seat) -> dict[str, Any]:
        slots = [self._around.scoreboard.slot(number).describe() for number in seat.slots]
        busy = [slot for slot in slots if slot.state == State.BUSY]
        if seat.child is None:
            state = "backoff" if seat.timer is not None and self._wanted else "stopped"
        elif seat.child.stopping:
            state = "stopping"
        elif not seat.ready:
            state = "starting"
        else:
            state = "busy" if busy else State(slots[0].state).name.lower()
        return {
            "role": seat.role.name.lower(),
            "pid": seat.child.pid if seat.child is not None else None,
            "state": state,
            "job": busy[0].job if busy else None,
            "jobs": [slot.job for slot in busy],
            "done": sum(slot.done for slot in slots),
            "uptime_seconds": round(seat.child.uptime_seconds(), 3) if seat.child is not None else None,
            "restarts": seat.restarts,
        }

    def _spawn(self, seat: _Seat) -> None:
        if seat.timer is not None:
            seat.timer.cancel()
        seat.timer = None
        self._around.changed()
        count = int(self.options["concurrency"]) if seat.role == Role.MAIN else 1
        slots: list[int] = []
        try:
            while len(slots) < count:
                slots.append(self._around.scoreboard.take())
            seat.child = self._child(seat, tuple(slots))
        except (OSError, ForqError) as exc:
            # No process, descriptor or slot to be had now: that may pass.
            for number in slots:
                self._around.scoreboard.give_back(number)
            delay = seat.respawn.delay_after_death(0.0)
            log.error("cannot start child queue=%s error=%s again_in=%.2fs", self.spec.name, exc, delay)
            seat.timer = self._around.nursery.loop.call_later(delay, lambda: self._spawn(seat))
            return
        seat.slots = tuple(slots)
        seat.processor = self._around.processor()
        seat.ready = False
        seat.last_words = None
        for number in slots:
            # So that pulse finds it even before it has come to life.
            self._around.scoreboard.slot(number).pid = seat.child.pid

    def _child(self, seat: _Seat, slots: tuple[int, ...]) -> Child:
        return Child(
            self._around.nursery,
            f"{self.spec.name} {seat.role.name.lower()}",
            lambda leash: self._around.run_child(self.spec, seat.role, slots, leash),
            handled=(signal.SIGTERM,),
            runs_user_code=True,
            on_line=lambda line: self._heard(seat, line),
            on_end=lambda ended: self._ended(seat, ended),
        )

    def _heard(self, seat: _Seat, line: bytes) -> None:
        message = wire.decode(line)
        if message.get("ready"):
            seat.ready = True
        if "error" in message:
            seat.last_words = str(message["error"])

    def _ended(self, seat: _Seat, ended: Exit) -> None:
        child, seat.child = seat.child, None
        assert child is not None
        self._around.changed()
        slots = [self._around.scoreboard.slot(number) for number in seat.slots]
        progressed, began = any(slot.done for slot in slots), any(slot.started_ns for slot in slots)
        # With several jobs running nobody knows which of them did it: only a death with one of them counts.
        solo = sum(unpack_word(slot.word).running for slot in slots) == 1
        cause = "interrupted" if child.stopping else ended.text.replace(" ", "_")
        self._recover(seat.processor, slots, cause, count=solo and not child.stopping)
        seat.slots = ()
        if not self._wanted or child.stopping:
            self._tell_if_stopped()
            return
        seat.restarts += 1
        self._decide(seat, ended, child.uptime_seconds(), progressed=progressed, began=began)

    def _decide(self, seat: _Seat, ended: Exit, lived_seconds: float, *, progressed: bool, began: bool) -> None:
        """What follows a death that nobody asked for."""
        name, role = self.spec.name, seat.role.name.lower()
        if ended.code in (exits.CONFIG, exits.INCOMPATIBLE):
            log.error("queue cannot be served queue=%s reason=%s", name, seat.last_words)
            reason = seat.last_words or ended.text
            self.stop()
            self.config_error = reason
        elif ended.code == exits.QUEUE_GONE:
            self._around.queue_gone(name)
        elif ended.code == exits.FENCED:
            self._around.evicted()
        else:
            delay = seat.respawn.delay_after_death(lived_seconds, progressed=progressed, began=began)
            log.warning("child died queue=%s child=%s end=%s again_in=%.2fs", name, role, ended.text, delay)
            seat.timer = self._around.nursery.loop.call_later(delay, lambda: self._spawn(seat))

    def _recover(self, processor: str, slots: list[Slot], cause: str, *, count: bool) -> None:
        """Hands what the workers of a dead child held to pulse; a slot is used again only when that is done."""
        for slot in slots:
            word = unpack_word(slot.word)
            # Reading on: from here on nobody takes this slot for a living worker.
            slot.state, slot.held, slot.pid = State.EMPTY, 0, 0
            if not slot.worker:
                self._around.scoreboard.give_back(slot.number)
                continue
            params = {
                "queue": self.spec.name,
                "processor": processor,
                "with_fail_queue": slot.role == Role.RETRY and self.spec.fail_handler is not None,
                "worker": slot.worker,
                "turn": word.turn,
                "index": word.index,
                "running": word.running,
                "count": count,
                "cause": cause,
            }
            self._around.recover(params, partial(self._around.scoreboard.give_back, slot.number))

    def _tell_if_stopped(self) -> None:
        if not self.running and not self._wanted:
            waiting, self._then = self._then, []
            start_again, self._start_again = self._start_again, None
            if start_again is not None:
                start_again()
            for then in waiting:
                then()
