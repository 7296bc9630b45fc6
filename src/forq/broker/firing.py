"""Ticks that are due become jobs: what promote tells of is planned here, and fire carries the plan out, once in all."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from forq.broker.codes import NO_QUEUE
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.scheduling import read_head
from forq.broker.scripts import script
from forq.errors import BackPressure, ForqError, InvalidData, RedisUnavailable
from forq.ticks import plan, show_tick

# Calls of promote in a row, before others get their turn: a queue has at most 1,000 schedules, told by the hundred.
LOOKS_AT_ONCE = 16

log = logging.getLogger("forq")


@dataclass(frozen=True, slots=True)
class DueTick:
    """The next tick of a schedule, and the head of its definition at the moment when it was due."""

    key: str
    tick_ms: int
    head: bytes


def due_ticks(reply: list[Any]) -> list[DueTick]:
    """Those that promote tells of."""
    told = zip(reply[3::3], reply[4::3], reply[5::3], strict=True)
    return [DueTick(key.decode(errors="replace"), int(float(tick)), head) for key, tick, head in told]


class Firing:
    """`chance`: how much of its jitter a job gets, from 0 to 1."""

    def __init__(self, link: Link, prefix: str, chance: Callable[[], float] = random.random) -> None:
        self._link = link
        self._prefix = prefix
        self._chance = chance
        # queue -> schedule -> the tick that could not be fired and why, as logged.
        self._logged: dict[str, dict[str, tuple[int, str]]] = {}

    def promote(self, queue: str) -> int | None:
        """Makes waiting what is due, and fires ticks; in how many ms to call again (None: nothing has a time).

        A tick that cannot be fired here (a zone that this host does not know, a definition of a newer release) stays
        due, for a host that can. promote tells of few ticks per call, so it is asked again without those: however many
        there are, they must not hide the others.
        """
        base = queue_base(self._prefix, queue)
        refused: dict[str, tuple[int, str]] = {}
        wait_ms = None
        for _ in range(LOOKS_AT_ONCE):
            reply = self._link.run(script("promote"), base, *refused)
            if reply[0] == NO_QUEUE:
                self._logged.pop(queue, None)
                return None
            wait_ms = None if reply[1] < 0 else int(reply[1])
            due = due_ticks(reply)
            for number, tick in enumerate(due):
                try:
                    _, wait_ms = self.fire(queue, tick, int(reply[2]))
                except RedisUnavailable:
                    raise
                except BackPressure as exc:
                    # Of a server that is out of memory the others would hear the same.
                    refused |= {other.key: (other.tick_ms, str(exc)) for other in due[number:]}
                    break
                except ForqError as exc:
                    refused[tick.key] = (tick.tick_ms, str(exc))
            if not due or not refused:
                break
        self._log(queue, refused)
        return wait_ms

    def _log(self, queue: str, refused: dict[str, tuple[int, str]]) -> None:
        """Once per tick and reason: it is tried with each heartbeat."""
        before = self._logged.pop(queue, {})
        for key, (tick_ms, error) in refused.items():
            if before.get(key) != (tick_ms, error):
                log.error("a tick cannot be fired queue=%s schedule=%s error=%s", queue, key, error)
        if refused:
            self._logged[queue] = refused

    def fire(self, queue: str, due: DueTick, now_ms: int) -> tuple[bool, int | None]:
        """Whether this call fired it, and in how many ms to call promote again (None: nothing has a time)."""
        args: list[Any] = [due.key, due.tick_ms, due.head, *self._plan(due, now_ms)]
        reply = self._link.run(script("fire"), queue_base(self._prefix, queue), *args)
        if reply[0] == NO_QUEUE:
            return False, None
        return bool(reply[1]), None if reply[2] < 0 else int(reply[2])

    def _plan(self, due: DueTick, now_ms: int) -> list[Any]:
        """The rest of what fire.lua takes."""
        rule, catch_up = read_head(due.head)
        try:
            planned = plan(rule, catch_up, due.tick_ms, now_ms)
            named = [f"{due.key} {show_tick(rule, tick_ms)}" for tick_ms in planned.ticks]
        except ForqError:
            raise
        except Exception as exc:  # a rule that another release can read must not end the process that keeps all timers
            raise InvalidData(f"broken definition of a schedule: {type(exc).__name__}: {exc}") from exc
        args: list[Any] = ["" if planned.next_ms is None else planned.next_ms, planned.missed]
        for tick_ms, identifier in zip(planned.ticks, named, strict=True):
            args += (tick_ms, orjson.dumps(identifier), f"{self._chance():.6f}")
        return args
