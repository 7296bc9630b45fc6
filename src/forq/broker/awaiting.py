"""An awaiter's calls: ask for an item of a queue of the release modes, acknowledge it, leave.

An awaiter is a name that is used for one item. Every call may be repeated: after a lost reply it gets the same answer.
"""

import re
from dataclasses import dataclass

from forq.broker.codes import NO_QUEUE, OK, error_for
from forq.broker.keys import awaiter_key, handed_channels, queue_base
from forq.broker.link import Link
from forq.broker.record import Record, unpack
from forq.broker.scripts import script
from forq.errors import InvalidId
from forq.names import check_job_id, check_queue_name, shown

__all__ = ["Answer", "Awaiting", "Hand", "handed_channels", "read_hand"]

# How an awaiter says that it blocks on its own list; else it says which clerk is to be told.
BY_ITSELF = "-"
# An owner is written AWAITER:FENCE, and an awaiter between blanks.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Hand:
    """An item that was handed to an awaiter, and is to be acknowledged within its lease."""

    job_id: str
    fence: int
    lease_ms: int
    record: Record


@dataclass(frozen=True, slots=True)
class Answer:
    """What an awaiter was handed; if nothing, for how long it is registered: it must ask again before (0: now)."""

    hand: Hand | None
    valid_ms: int


class Awaiting:
    def __init__(self, link: Link, prefix: str, queue: str) -> None:
        self.queue = check_queue_name(queue)
        self._link = link
        self._base = queue_base(prefix, queue)

    def ask(
        self,
        awaiter: str,
        job_id: str | None,
        *,
        mode: str,
        register: bool,
        lease_ms: int | None = None,
        via: str = BY_ITSELF,
    ) -> Answer:
        """The item that this awaiter was handed, or can take. If there is none it is registered, or with
        `register` False not any more."""
        for name in (awaiter, via):
            if not _NAME.match(name):
                raise InvalidId(f"awaiter {shown(name)} is not allowed: 1 to 128 of A-Z a-z 0-9 _ . -")
        wanted = "" if job_id is None else check_job_id(job_id)
        lease = "" if lease_ms is None else lease_ms
        reply = self._link.run(script("await"), self._base, awaiter, wanted, mode, lease, int(register), via)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        return Answer(read_hand(reply[2]) if len(reply) > 2 else None, reply[1])

    def wait(self, awaiter: str, seconds: float) -> None:
        """Blocks until the awaiter has something in its list, or time is up. What is there stays there."""
        own = awaiter_key(self._base, awaiter)
        self._link.call("BLMOVE", own, own, "LEFT", "LEFT", f"{max(0.001, seconds):.3f}")

    def ack(self, awaiter: str, job_id: str, fence: int) -> None:
        """The item is released; LeaseLapsed if it has gone back."""
        reply = self._link.run(script("ack"), self._base, awaiter, job_id, fence)
        if reply[0] != OK:
            raise error_for(self.queue, reply)

    def leave(self, awaiter: str) -> bool:
        """The awaiter is forgotten; whether it held an item, which goes back in line."""
        reply = self._link.run(script("unawait"), self._base, awaiter, "")
        if reply[0] not in (OK, NO_QUEUE):
            raise error_for(self.queue, reply)
        return reply[0] == OK and bool(reply[1])


def read_hand(packed: bytes) -> Hand:
    head, _, record = packed.partition(b"\n")
    fence, job_id, lease_ms, *_ = head.decode().split(" ")
    return Hand(job_id, int(fence), int(lease_ms), unpack(record))
