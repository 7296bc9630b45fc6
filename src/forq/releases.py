"""Getting an item of a queue of the release modes: ask, wait, acknowledge, return.

The item is acknowledged before it is returned, so that it is nobody's but the caller's. Whatever breaks on the way, it
is not lost: an item that was not acknowledged goes back in line when its lease lapses.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from forq.broker.leases import Answer, Awaiting, Hand
from forq.errors import BackPressure, ForqError, LeaseLapsed, RedisUnavailable
from forq.ids import new_id

# A blocking read never takes longer, so that a connection that is dead is noticed.
SLICE_SECONDS = 5.0
PAUSE_SECONDS = 0.1
# How long Redis may be away before a call gives up; and before an acknowledgement does, which decides about an item.
# With the time that its last call takes that must be less than the minute for which Redis knows that it had been made:
# else an item that has left would be taken for one that has gone back.
PATIENCE_SECONDS = 10.0
ACK_PATIENCE_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Release:
    """An item that has left its queue; with a lease: that will have left it once it is acknowledged."""

    id: str
    identifier: str
    data: Any
    fence: int
    enqueued_at: float
    lease_seconds: float
    _awaiting: Awaiting = field(repr=False, compare=False)
    _awaiter: str = field(repr=False, compare=False)

    def ack(self) -> None:
        """The item is done with, and leaves the queue; LeaseLapsed if it has gone back. Repeating it is harmless."""
        _persist(ACK_PATIENCE_SECONDS, lambda: self._awaiting.ack(self._awaiter, self.id, self.fence))

    def give_back(self) -> bool:
        """The item goes back to the front of the line; False if it had left, or had gone back, already."""
        return _persist(PATIENCE_SECONDS, lambda: self._awaiting.leave(self._awaiter))


def get(
    awaiting: Awaiting, job_id: str | None, *, mode: str, wait_seconds: float | None, lease_seconds: float | None = None
) -> Release | None:
    """The next item, or that one; None when time is up (`wait_seconds` None: never).

    With `lease_seconds` the caller acknowledges it.
    """
    deadline = float("inf") if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        call = _Call(awaiting, job_id, mode, None if lease_seconds is None else round(lease_seconds * 1000))
        release = call.run(deadline)
        if release is None or lease_seconds is not None:
            return release
        try:
            release.ack()
        except LeaseLapsed:
            continue
        return release


class _Call:
    """One awaiter: a name, from the first question to the item."""

    def __init__(self, awaiting: Awaiting, job_id: str | None, mode: str, lease_ms: int | None) -> None:
        self._awaiting = awaiting
        self._job_id = job_id
        self._mode = mode
        self._lease_ms = lease_ms
        self._awaiter = new_id()

    def run(self, deadline: float) -> Release | None:
        try:
            while True:
                waiting = time.monotonic() < deadline
                answer = _persist(PATIENCE_SECONDS, partial(self._ask, register=waiting))
                if answer.hand is not None:
                    return self._release(answer.hand)
                if answer.valid_ms == 0:
                    continue
                if not waiting:
                    return None
                patience = min(SLICE_SECONDS, answer.valid_ms / 2000, deadline - time.monotonic())
                self._wait(patience)
        except BaseException:
            # Interrupted, or Redis is away: what nobody waits for any more need not wait for its lease.
            with suppress(ForqError):
                self._awaiting.leave(self._awaiter)
            raise

    def _wait(self, seconds: float) -> None:
        try:
            self._awaiting.wait(self._awaiter, seconds)
        except RedisUnavailable:
            return
        except BackPressure:
            # Out of memory a blocking read is refused, but a question is not.
            time.sleep(max(0.0, min(seconds, PAUSE_SECONDS)))

    def _ask(self, *, register: bool) -> Answer:
        return self._awaiting.ask(
            self._awaiter, self._job_id, mode=self._mode, register=register, lease_ms=self._lease_ms
        )

    def _release(self, hand: Hand) -> Release:
        record = hand.record
        return Release(
            id=hand.job_id,
            identifier=record.identifier or hand.job_id,
            data=record.data,
            fence=hand.fence,
            enqueued_at=record.enqueued_ms / 1000,
            lease_seconds=hand.lease_ms / 1000,
            _awaiting=self._awaiting,
            _awaiter=self._awaiter,
        )


def _persist(patience_seconds: float, call: Callable[[], T]) -> T:
    """Repeats a call that may be repeated while Redis is away, for so long."""
    give_up_at = time.monotonic() + patience_seconds
    while True:
        try:
            return call()
        except RedisUnavailable:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(PAUSE_SECONDS)
