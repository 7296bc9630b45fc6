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
from forq.errors import BackPressure, InvalidData, UsageError
from forq.ticks import plan, show_tick

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
    return [DueTick(key.decode(), int(float(tick)), head) for key, tick, head in told]


class Firing:
    """`chance`: how much of its jitter a job gets, from 0 to 1."""

    def __init__(self, link: Link, prefix: str, chance: Callable[[], float] = random.random) -> None:
        self._link = link
        self._prefix = prefix
        self._chance = chance

    def fire_all(self, queue: str, due: list[DueTick], now_ms: int, wait_ms: int | None) -> int | None:
        """Fires what is due; in how many ms the queue is to be looked at again (None: nothing has a time).

        One that cannot be fired stays due, and does not hold up the others; `wait_ms` holds if none can.
        """
        for tick in due:
            try:
                _, wait_ms = self.fire(queue, tick, now_ms)
            except (UsageError, InvalidData, BackPressure) as exc:
                log.error("a tick cannot be fired queue=%s schedule=%s error=%s", queue, tick.key, exc)
        return wait_ms

    def fire(self, queue: str, due: DueTick, now_ms: int) -> tuple[bool, int | None]:
        """Whether this call fired it; and the same as fire_all."""
        rule, catch_up = read_head(due.head)
        planned = plan(rule, catch_up, due.tick_ms, now_ms)
        args: list[Any] = [due.key, due.tick_ms, due.head]
        args += ("" if planned.next_ms is None else planned.next_ms, planned.missed)
        for tick_ms in planned.ticks:
            args += (tick_ms, orjson.dumps(f"{due.key} {show_tick(rule, tick_ms)}"), f"{self._chance():.6f}")
        reply = self._link.run(script("fire"), queue_base(self._prefix, queue), *args)
        if reply[0] == NO_QUEUE:
            return False, None
        return bool(reply[1]), None if reply[2] < 0 else int(reply[2])
