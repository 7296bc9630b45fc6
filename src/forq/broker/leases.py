"""An awaiter's calls: ask for an item of a queue of the release modes, acknowledge it, leave.

An awaiter is a name that is used for one item. Every call may be repeated: after a lost reply it gets the same answer.

What a bridge asks for its workers, in a queue of mode external. A worker has a name of its own, for good.

Every call may be repeated: after a lost reply it gets the same answer.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson

from forq.broker.keys import awaiter_key, handed_channels, queue_base
from forq.broker.link import Link
from forq.broker.record import Record, unpack
from forq.broker.replies import NO_QUEUE, OK, error_for
from forq.broker.scripts import script
from forq.errors import InvalidData, InvalidId
from forq.settings import EXTERNAL
from forq.values import check_job_id, check_queue_name, shown

__all__ = ["Lease", "LeaseReply", "Leases", "handed_channels", "read_lease"]

# How an awaiter says that it blocks on its own list; else it says which clerk is to be told.
NO_CLERK = "-"
# An owner is written AWAITER:FENCE, and an awaiter between blanks.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Lease:
    """An item that was handed to an awaiter, and is to be acknowledged within its lease."""

    job_id: str
    fence: int
    lease_ms: int
    record: Record


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """What an awaiter was handed; if nothing, for how long it is registered: it must ask again before (0: now)."""

    lease: Lease | None
    valid_ms: int


class Leases:
    def __init__(self, link: Link, prefix: str, queue: str) -> None:
        self.queue = check_queue_name(queue)
        self._link = link
        self._base = queue_base(prefix, queue)

    def request(
        self,
        awaiter: str,
        job_id: str | None,
        *,
        mode: str,
        register: bool,
        lease_ms: int | None = None,
        via: str = NO_CLERK,
    ) -> LeaseReply:
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
        return LeaseReply(read_lease(reply[2]) if len(reply) > 2 else None, reply[1])

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


def read_lease(packed: bytes) -> Lease:
    head, _, record = packed.partition(b"\n")
    fence, job_id, lease_ms, *_ = head.decode().split(" ")
    return Lease(job_id, int(fence), int(lease_ms), unpack(record))


LOOKED_AT_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Failure:
    """`error` and `brief` (without a traceback) as JSON; `chance` (0 to 1) spreads the retry."""

    error: bytes
    brief: bytes
    kind: str
    retry_at_ms: int | None
    chance: float


class ExternalJobs:
    def __init__(self, link: Link, prefix: str, queue: str) -> None:
        self.queue = check_queue_name(queue)
        self._link = link
        self._base = queue_base(prefix, queue)

    def idle(self, worker: str, bridge: str) -> LeaseReply:
        """The worker says that it is idle: what it is assigned. If it had accepted a job, it has lost that."""
        return self._ask(worker, bridge, "1")

    def fetch_assigned(self, worker: str, bridge: str) -> LeaseReply:
        """The same, without a word from the worker: nothing if it is not idle any more."""
        return self._ask(worker, bridge, "rung")

    def _ask(self, worker: str, bridge: str, how: str) -> LeaseReply:
        reply = self._run("await", worker, "", EXTERNAL, "", how, bridge)
        if len(reply) < 3:
            return LeaseReply(None, reply[1])
        try:
            return LeaseReply(read_lease(reply[2]), reply[1])
        except InvalidData as exc:
            # Nobody could run it, and it would come back to the front for ever.
            job_id = reply[2].partition(b"\n")[0].decode().split(" ")[1]
            self.fail(worker, job_id, _broken(str(exc)))
            return LeaseReply(None, 0)

    def accept(self, worker: str, job_id: str, fence: int | None = None) -> None:
        """The worker has the job; LeaseLapsed if it is not its own (any more)."""
        self._run("accept", worker, job_id, self._fence(worker, job_id, fence), "", "")

    def progress(self, worker: str, job_id: str, fraction: float, text: str, fence: int | None = None) -> None:
        self._run("accept", worker, job_id, self._fence(worker, job_id, fence), f"{fraction:.6g}", text)

    def finish(self, worker: str, job_id: str, fence: int | None = None, result: bytes = b"null") -> None:
        """`result`: JSON, or '!' and why there is none; kept if the queue keeps results."""
        self._run("finish", worker, job_id, self._fence(worker, job_id, fence), "done", result)

    def fail(self, worker: str, job_id: str, failure: Failure, fence: int | None = None) -> None:
        why = (failure.error, failure.brief, failure.kind, _text(failure.retry_at_ms), f"{failure.chance:.6f}")
        self._run("finish", worker, job_id, self._fence(worker, job_id, fence), "failed", *why)

    def _fence(self, worker: str, job_id: str, fence: int | None) -> int:
        """Workers need not tell the fence: then it is the one under which the worker holds the job now (0: none).

        A call that reaches the server late must not be about a later attempt.
        """
        if fence is not None:
            return fence
        owner, _, rest = (self._link.call("HGET", f"{self._base}:active", job_id) or b"").decode().partition(":")
        return int(rest.partition(":")[0]) if owner == worker else 0

    def leave(self, worker: str, bridge: str) -> bool:
        """The worker is forgotten if it is idle and spoke to this bridge last; whether a job that it held went back."""
        reply = self._link.run(script("unawait"), self._base, worker, bridge)
        if reply[0] not in (OK, NO_QUEUE):
            raise error_for(self.queue, reply)
        return reply[0] == OK and bool(reply[1])

    def workers(self) -> list[dict[str, Any]]:
        found = []
        for some in _chunks(self._scored("workers")):
            hands = self._link.pipeline([("LINDEX", awaiter_key(self._base, worker), 0) for worker, _ in some])
            for (worker, seen_ms), hand in zip(some, hands, strict=True):
                state, job_id = _in_hand(hand or b"")
                held = {} if job_id is None else {"uuid": job_id}
                found.append({"worker_uuid": worker, "state": state, "last_seen": seen_ms / 1000, **held})
        return found

    def dispatched(self) -> list[dict[str, Any]]:
        """Jobs that are assigned and not accepted."""
        return [
            {"uuid": job_id, "worker_uuid": worker, "since": since}
            for job_id, worker, since, accepted_ms, _ in self._held("leases")
            if accepted_ms is None
        ]

    def running(self) -> list[dict[str, Any]]:
        """Jobs that are accepted, and how far they are."""
        found = []
        for job_id, worker, since, accepted_ms, said in self._held("accepted"):
            fraction, _, text = (said or b"0 0 ").decode(errors="replace").split(" ", 2)
            if accepted_ms is not None:
                far = {"progress": float(fraction), "text": text, "since": since, "last": accepted_ms / 1000}
                found.append({"uuid": job_id, "worker_uuid": worker, **far})
        return found

    def _held(self, zset: str) -> Iterator[tuple[str, str, float, float | None, bytes | None]]:
        """The jobs of a set that are in a worker's hands: id, worker, since when, last sign of life, progress."""
        for some in _chunks(self._scored(zset)):
            ids = [job_id for job_id, _ in some]
            owners, accepted, said = self._link.pipeline(
                [
                    ("HMGET", f"{self._base}:active", *ids),
                    ("ZMSCORE", f"{self._base}:accepted", *ids),
                    ("HMGET", f"{self._base}:progress", *ids),
                ]
            )
            for job_id, owner, accepted_ms, far in zip(ids, owners, accepted, said, strict=True):
                if owner is not None:
                    # A fence is the time of its claim in µs.
                    worker, fence = owner.decode().split(":")[:2]
                    last_ms = None if accepted_ms is None else float(accepted_ms)
                    yield job_id, worker, int(fence) // 1000 / 1000, last_ms, far

    def _scored(self, zset: str) -> list[tuple[str, float]]:
        flat = self._link.call("ZRANGE", f"{self._base}:{zset}", 0, -1, "WITHSCORES")
        return [(name.decode(), float(score)) for name, score in zip(flat[::2], flat[1::2], strict=True)]

    def _run(self, verb: str, *args: object) -> list[Any]:
        reply = self._link.run(script(verb), self._base, *args)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        return reply


def _broken(reason: str) -> Failure:
    brief = orjson.dumps({"name": "BrokenRecord", "message": reason, "kind": "permanent"})
    return Failure(brief, brief, "permanent", None, 0.0)


def _in_hand(hand: bytes) -> tuple[str, str | None]:
    words = hand.partition(b"\n")[0].decode().split(" ")
    if words[0] == "accepted":
        return "busy", words[2]
    return ("assigned", words[1]) if words[0].isdigit() else ("idle", None)


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _chunks(rows: Iterable[tuple[str, float]]) -> Iterator[list[tuple[str, float]]]:
    left = iter(rows)
    while some := list(islice(left, LOOKED_AT_AT_ONCE)):
        yield some
