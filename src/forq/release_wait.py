"""Takes items from a queue of a release mode: Release, and the calls of a Client that wait for one (get_release)."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from forq.broker.leases import Lease, LeaseReply, Leases
from forq.errors import BackPressure, ForqError, LeaseLapsed, RedisUnavailable
from forq.job import new_id

# Longest blocking read, so that a dead connection is noticed.
MAX_BLOCK_SECONDS = 5.0
RETRY_PAUSE_SECONDS = 0.1
# How long a call is retried while Redis is unavailable. With the duration of its last call, the time for an ack must
# stay below the minute for which Redis remembers acks: otherwise an acked item would look like a lapsed one.
RETRY_SECONDS = 10.0
ACK_RETRY_SECONDS = 30.0
ACK_MEMORY_SECONDS = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Release:
    """An item taken from its queue. With a lease it leaves the queue when it is acknowledged."""

    id: str
    identifier: str
    data: Any
    fence: int
    enqueued_at: float
    lease_seconds: float
    _leases: Leases = field(repr=False, compare=False)
    _awaiter: str = field(repr=False, compare=False)

    def ack(self) -> None:
        """Removes the item from the queue. LeaseLapsed if it has gone back in line. Repeating it is harmless."""
        link = self._leases.link
        seconds = ack_retry_seconds(link.timeout_seconds, link.connect_timeout_seconds)
        _retry_while_unavailable(seconds, lambda: self._leases.ack(self._awaiter, self.id, self.fence))

    def give_back(self) -> bool:
        """Returns the item to the front of the line; False if it had already left or gone back."""
        return _retry_while_unavailable(RETRY_SECONDS, lambda: self._leases.leave(self._awaiter))


def get_release(
    leases: Leases, job_id: str | None, *, mode: str, wait_seconds: float | None, lease_seconds: float | None = None
) -> Release | None:
    """The next item, or the one with this id; None when `wait_seconds` (None: no limit) are over.

    Without `lease_seconds` the item is acknowledged before it is returned. If the caller dies earlier, the item goes
    back in line when its lease lapses.
    """
    deadline = float("inf") if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        lease_ms = None if lease_seconds is None else round(lease_seconds * 1000)
        release = _ReleaseRequest(leases, job_id, mode, lease_ms).run(deadline)
        if release is None or lease_seconds is not None:
            return release
        try:
            release.ack()
        except LeaseLapsed:
            continue
        return release


class _ReleaseRequest:
    """One awaiter, from its first request to the item."""

    def __init__(self, leases: Leases, job_id: str | None, mode: str, lease_ms: int | None) -> None:
        self._leases = leases
        self._job_id = job_id
        self._mode = mode
        self._lease_ms = lease_ms
        self._awaiter = new_id()

    def run(self, deadline: float) -> Release | None:
        try:
            while True:
                waiting = time.monotonic() < deadline
                reply = _retry_while_unavailable(RETRY_SECONDS, partial(self._request, register=waiting))
                if reply.lease is not None:
                    return self._release(reply.lease)
                if reply.valid_ms == 0:
                    continue
                if not waiting:
                    return None
                # A blocking read must end before the connection's timeout.
                longest_seconds = min(MAX_BLOCK_SECONDS, self._leases.link.timeout_seconds / 2)
                self._wait(min(longest_seconds, reply.valid_ms / 2000, deadline - time.monotonic()))
        except BaseException:
            # Return an item that was handed out meanwhile now, not when its lease lapses.
            with suppress(ForqError):
                self._leases.leave(self._awaiter)
            raise

    def _wait(self, seconds: float) -> None:
        try:
            self._leases.wait(self._awaiter, seconds)
        except RedisUnavailable:
            return
        except BackPressure:
            # Out of memory Redis refuses the blocking read, but not the next request.
            time.sleep(max(0.0, min(seconds, RETRY_PAUSE_SECONDS)))

    def _request(self, *, register: bool) -> LeaseReply:
        return self._leases.request(
            self._awaiter, self._job_id, mode=self._mode, register=register, lease_ms=self._lease_ms
        )

    def _release(self, lease: Lease) -> Release:
        record = lease.record
        return Release(
            id=lease.job_id,
            identifier=record.identifier or lease.job_id,
            data=record.data,
            fence=lease.fence,
            enqueued_at=record.enqueued_us / 1e6,
            lease_seconds=lease.lease_ms / 1000,
            _leases=self._leases,
            _awaiter=self._awaiter,
        )


def ack_retry_seconds(timeout_seconds: float, connect_timeout_seconds: float) -> float:
    """How long to repeat an ack: with its last call it must end while Redis remembers it."""
    return min(ACK_RETRY_SECONDS, ACK_MEMORY_SECONDS - 5 - timeout_seconds - connect_timeout_seconds)


def _retry_while_unavailable(seconds: float, call: Callable[[], T]) -> T:
    """Repeats an idempotent call while Redis is unavailable, for this long."""
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            return call()
        except RedisUnavailable:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(RETRY_PAUSE_SECONDS)
