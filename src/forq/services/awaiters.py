"""Those who await an item through the control socket: the clerk speaks for all of them, and blocks for none.

1. Each is registered in Redis under a name of its own, and renewed in half the time that this is valid for.
2. The clerk hears on a channel of its own who was handed something, and asks for it.
3. What was published while nobody heard it is lost: when that connection breaks, all of them ask again on the next one.
4. While Redis is away they wait on, each until its own time is up.
"""

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from forq.broker.leases import Awaiting, Hand, handed_channels
from forq.broker.link import Link
from forq.broker.pubsub import Listener
from forq.errors import ForqError, OutcomeUnknown, RedisUnavailable
from forq.job import new_id
from forq.procs.loop import Loop
from forq.redis_url import database_of
from forq.services.desk import Later

RETRY_SECONDS = 0.5
# How many are looked after before the clerk's other requests get their turn again.
SLICE = 200

log = logging.getLogger("forq")


@dataclass(eq=False)
class Awaiter:
    """`until`: when its time is up, on the monotonic clock, which all processes of a machine share."""

    awaiting: Awaiting
    name: str
    job_id: str | None
    mode: str
    lease_ms: int | None
    until: float
    due: float = 0.0
    later: Later = field(default_factory=Later)


class Awaiters:
    def __init__(self, link: Link, prefix: str, loop: Loop, *, now: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._prefix = prefix
        self._loop = loop
        self._now = now
        self._clerk = new_id()
        self._ears = Listener(
            link.url, handed_channels(prefix, database_of(link.url), self._clerk), name="forq-clerk-ears"
        )
        self._awaiters: dict[str, Awaiter] = {}
        self._plans: list[tuple[float, int, Awaiter]] = []
        self._order = count()
        self._away_until = 0.0

    def __len__(self) -> int:
        return len(self._awaiters)

    def ask(self, params: dict[str, Any]) -> object:
        """The verb: an item, or None when time is up (`until`, None: never)."""
        until = params["until"]
        one = Awaiter(
            awaiting=Awaiting(self._link, self._prefix, params["name"]),
            name=params["awaiter"],
            job_id=params["id"],
            mode=params["mode"],
            lease_ms=params["lease_ms"],
            until=float("inf") if until is None else until,
        )
        if one.until <= self._now():
            return self._ask_once(one)
        self._awaiters[one.name] = one
        try:
            item = self._look(one)
        except ForqError:
            del self._awaiters[one.name]
            raise
        if item is None:
            return one.later
        del self._awaiters[one.name]
        return item

    def leave(self, params: dict[str, Any]) -> object:
        """The verb: whoever asked is gone. What it was handed meanwhile goes back in line."""
        one = self._awaiters.pop(params["awaiter"], None)
        if one is not None:
            one.later.answer(None)
        try:
            Awaiting(self._link, self._prefix, params["name"]).leave(params["awaiter"])
        except RedisUnavailable as exc:
            log.info("an awaiter is forgotten when its lease lapses queue=%s error=%s", params["name"], exc)
        return {}

    def _hear(self) -> None:
        """Somebody has something in its list."""
        fd = self._ears.fileno()
        try:
            heard = self._ears.hear()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("awaiters are deaf until the next connect awaiters=%s error=%s", len(self), exc)
            for one in self._awaiters.values():
                self._plan(one, self._now())
            return
        for _, name in heard:
            if name in self._awaiters:
                self._plan(self._awaiters[name], self._now())

    def tick(self) -> float | None:
        """Looks after those whose time has come; how long nothing is due then."""
        now = self._now()
        for _ in range(SLICE):
            if not self._plans or self._plans[0][0] > now:
                break
            plan = heapq.heappop(self._plans)
            if self._is_current(*plan):
                self._serve(plan[2])
        while self._plans and not self._is_current(*self._plans[0]):
            heapq.heappop(self._plans)
        return max(0.0, self._plans[0][0] - self._now()) if self._plans else None

    def _serve(self, one: Awaiter) -> None:
        last = one.until <= self._now()
        answer: object
        try:
            answer = self._look(one)
        except ForqError as exc:
            answer = exc
        except Exception as exc:  # a fault of ours must not end the clerk: all others would lose theirs too
            log.exception("cannot serve an awaiter queue=%s", one.awaiting.queue)
            answer = ForqError(f"internal error: {type(exc).__name__}: {exc}")
        if answer is not None or last:
            del self._awaiters[one.name]
            one.later.answer(answer)

    def _look(self, one: Awaiter) -> dict[str, Any] | None:
        """What it was handed; None if there is nothing yet, and then the next look is planned."""
        now = self._now()
        if now >= self._away_until:
            try:
                self._listen()
                return self._ask(one)
            except RedisUnavailable:
                # One that fails is enough: the others need not wait for their own timeouts.
                self._away_until = self._now() + RETRY_SECONDS
        self._plan(one, min(self._away_until, one.until))
        return None

    def _ask(self, one: Awaiter) -> dict[str, Any] | None:
        """Registers it again; not if its time is up: then it is forgotten."""
        now = self._now()
        answer = one.awaiting.ask(
            one.name, one.job_id, mode=one.mode, register=now < one.until, lease_ms=one.lease_ms, via=self._clerk
        )
        if answer.hand is not None:
            return _describe(one.name, answer.hand)
        self._plan(one, min(now + answer.valid_ms / 2000, one.until))
        return None

    def _ask_once(self, one: Awaiter) -> dict[str, Any] | None:
        try:
            return self._ask(one)
        except OutcomeUnknown:
            # It may hold an item by now: the same question again gets the same one.
            return self._ask(one)

    def _listen(self) -> None:
        if not self._ears.connected:
            self._ears.connect()
            self._loop.add_reader(self._ears.fileno(), self._hear)

    def _plan(self, one: Awaiter, at: float) -> None:
        one.due = at
        heapq.heappush(self._plans, (at, next(self._order), one))

    def _is_current(self, at: float, _: int, one: Awaiter) -> bool:
        """Not one that was served, or planned anew, meanwhile."""
        return one.due == at and self._awaiters.get(one.name) is one


def _describe(awaiter: str, hand: Hand) -> dict[str, Any]:
    return {
        "id": hand.job_id,
        "identifier": hand.record.identifier or hand.job_id,
        "data": hand.record.data,
        "fence": hand.fence,
        "awaiter": awaiter,
        "lease_seconds": hand.lease_ms / 1000,
    }
