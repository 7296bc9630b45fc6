"""Leases: items of the release modes handed out to awaiters, and jobs of mode external assigned to external workers.

An awaiter is a name that is used for one item; an external worker keeps its name. Every call may be repeated: after a
lost reply it gets the same reply.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson

from forq.broker.keys import awaiter_key, queue_base
from forq.broker.link import Link
from forq.broker.record import Record, unpack
from forq.broker.scripts import NO_QUEUE, OK, error_for, script
from forq.errors import InvalidData, InvalidId
from forq.settings import EXTERNAL
from forq.values import check_job_id, check_queue_name, shown

# In place of a clerk's name: the awaiter blocks on its own list.
NO_CLERK = "-"
# Owners are stored as AWAITER:FENCE, and awaiters in lists separated by spaces.
_AWAITER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Lease:
    """An item that must be acknowledged within lease_ms."""

    job_id: str
    fence: int
    lease_ms: int
    record: Record


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """A lease, or None and the time for which the awaiter is registered: it must call again before (0: at once)."""

    lease: Lease | None
    valid_ms: int


class Leases:
    """The calls of the awaiters of one queue."""

    def __init__(self, link: Link, prefix: str, queue: str) -> None:
        self.queue = check_queue_name(queue)
        self.link = link
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
        """Returns the awaiter's lease, or leases an available item to it.

        If there is no item, the awaiter is registered, or with register=False unregistered.
        """
        for name in (awaiter, via):
            if not _AWAITER_NAME.match(name):
                raise InvalidId(f"awaiter {shown(name)} is not allowed: 1 to 128 of A-Z a-z 0-9 _ . -")
        wanted = "" if job_id is None else check_job_id(job_id)
        lease = "" if lease_ms is None else lease_ms
        reply = self.link.run(script("await"), self._base, awaiter, wanted, mode, lease, int(register), via)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        return LeaseReply(read_lease(reply[2]) if len(reply) > 2 else None, reply[1])

    def wait(self, awaiter: str, seconds: float) -> None:
        """Blocks until the awaiter's list has an entry or time is up. The entry stays in the list."""
        own = awaiter_key(self._base, awaiter)
        self.link.call("BLMOVE", own, own, "LEFT", "LEFT", f"{max(0.001, seconds):.3f}")

    def ack(self, awaiter: str, job_id: str, fence: int) -> None:
        """Releases the item; LeaseLapsed if it has gone back to the queue."""
        reply = self.link.run(script("ack"), self._base, awaiter, job_id, fence)
        if reply[0] != OK:
            raise error_for(self.queue, reply)

    def leave(self, awaiter: str) -> bool:
        """Unregisters the awaiter; True if it held an item, which goes back to the queue."""
        return _leave(self.link, self._base, self.queue, awaiter, "")


@dataclass(frozen=True, slots=True)
class Failure:
    """`error` and `brief` (without a traceback) as JSON; `chance` (0 to 1) spreads the retry."""

    error: bytes
    brief: bytes
    kind: str
    retry_at_ms: int | None
    chance: float


class ExternalJobs:
    """The jobs of one queue of mode external: a bridge's calls on behalf of its workers."""

    def __init__(self, link: Link, prefix: str, queue: str) -> None:
        self.queue = check_queue_name(queue)
        self._link = link
        self._base = queue_base(prefix, queue)

    def idle(self, worker: str, bridge: str) -> LeaseReply:
        """Registers the worker as idle; returns its assignment. A job that it had accepted is lost to it."""
        return self._request(worker, bridge, "1")

    def fetch_assigned(self, worker: str, bridge: str) -> LeaseReply:
        """Returns the worker's assignment after a notification; nothing if it is no longer idle."""
        return self._request(worker, bridge, "rung")

    def _request(self, worker: str, bridge: str, register: str) -> LeaseReply:
        reply = self._run("await", worker, "", EXTERNAL, "", register, bridge)
        if len(reply) < 3:
            return LeaseReply(None, reply[1])
        try:
            return LeaseReply(read_lease(reply[2]), reply[1])
        except InvalidData as exc:
            # No worker can run it. Without this it would return to the front of the queue for ever.
            job_id = reply[2].partition(b"\n")[0].decode().split(" ")[1]
            self.fail(worker, job_id, _broken_record(str(exc)))
            return LeaseReply(None, 0)

    def accept(self, worker: str, job_id: str, fence: int | None = None) -> None:
        """The worker starts the job; LeaseLapsed if it does not hold it."""
        self._run("accept", worker, job_id, self._fence(worker, job_id, fence), "", "")

    def progress(self, worker: str, job_id: str, fraction: float, text: str, fence: int | None = None) -> None:
        self._run("accept", worker, job_id, self._fence(worker, job_id, fence), f"{fraction:.6g}", text)

    def finish(self, worker: str, job_id: str, fence: int | None = None, result: bytes = b"null") -> None:
        """`result`: JSON, or '!' and the reason why there is none; kept if the queue keeps results."""
        self._run("finish", worker, job_id, self._fence(worker, job_id, fence), "done", result)

    def fail(self, worker: str, job_id: str, failure: Failure, fence: int | None = None) -> None:
        retry_at = "" if failure.retry_at_ms is None else str(failure.retry_at_ms)
        args = (failure.error, failure.brief, failure.kind, retry_at, f"{failure.chance:.6f}")
        self._run("finish", worker, job_id, self._fence(worker, job_id, fence), "failed", *args)

    def _fence(self, worker: str, job_id: str, fence: int | None) -> int:
        """The given fence, or the one under which the worker holds the job now (0: it does not hold it).

        Workers need not send the fence. The call still needs one: if it arrives late, it must not apply to a later
        attempt.
        """
        if fence is not None:
            return fence
        owner, _, rest = (self._link.call("HGET", f"{self._base}:active", job_id) or b"").decode().partition(":")
        return int(rest.partition(":")[0]) if owner == worker else 0

    def leave(self, worker: str, bridge: str) -> bool:
        """Unregisters the worker if it is idle and this bridge was its last; True if a job that it held went back."""
        return _leave(self._link, self._base, self.queue, worker, bridge)

    def workers(self) -> list[dict[str, Any]]:
        found = []
        for chunk in _chunks(self._scored("workers")):
            entries = self._link.pipeline([("LINDEX", awaiter_key(self._base, worker), 0) for worker, _ in chunk])
            for (worker, seen_ms), entry in zip(chunk, entries, strict=True):
                state, job_id = _read_worker_entry(entry or b"")
                held = {} if job_id is None else {"uuid": job_id}
                found.append({"worker_uuid": worker, "state": state, "last_seen": seen_ms / 1000, **held})
        return found

    def dispatched(self) -> list[dict[str, Any]]:
        """Jobs that are assigned but not accepted."""
        return [
            {"uuid": job_id, "worker_uuid": worker, "since": since}
            for job_id, worker, since, accepted_ms, _ in self._held("leases")
            if accepted_ms is None
        ]

    def running(self) -> list[dict[str, Any]]:
        """Accepted jobs with their progress."""
        found = []
        for job_id, worker, since, accepted_ms, packed in self._held("accepted"):
            fraction, _, text = (packed or b"0 0 ").decode(errors="replace").split(" ", 2)
            if accepted_ms is not None:
                progress = {"progress": float(fraction), "text": text, "since": since, "last": accepted_ms / 1000}
                found.append({"uuid": job_id, "worker_uuid": worker, **progress})
        return found

    def _held(self, zset: str) -> Iterator[tuple[str, str, float, float | None, bytes | None]]:
        """The jobs of a set that a worker holds: id, worker, held since, last message (ms), packed progress."""
        for chunk in _chunks(self._scored(zset)):
            ids = [job_id for job_id, _ in chunk]
            owners, accepted, progress = self._link.pipeline(
                [
                    ("HMGET", f"{self._base}:active", *ids),
                    ("ZMSCORE", f"{self._base}:accepted", *ids),
                    ("HMGET", f"{self._base}:progress", *ids),
                ]
            )
            for job_id, owner, accepted_ms, packed in zip(ids, owners, accepted, progress, strict=True):
                if owner is not None:
                    # A fence is the time of its claim in µs.
                    worker, fence = owner.decode().split(":")[:2]
                    last_ms = None if accepted_ms is None else float(accepted_ms)
                    yield job_id, worker, int(fence) // 1000 / 1000, last_ms, packed

    def _scored(self, zset: str) -> list[tuple[str, float]]:
        flat = self._link.call("ZRANGE", f"{self._base}:{zset}", 0, -1, "WITHSCORES")
        return [(name.decode(), float(score)) for name, score in zip(flat[::2], flat[1::2], strict=True)]

    def _run(self, verb: str, *args: object) -> list[Any]:
        reply = self._link.run(script(verb), self._base, *args)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        return reply


def _leave(link: Link, base: str, queue: str, awaiter: str, bridge: str) -> bool:
    reply = link.run(script("unawait"), base, awaiter, bridge)
    if reply[0] not in (OK, NO_QUEUE):
        raise error_for(queue, reply)
    return reply[0] == OK and bool(reply[1])


def read_lease(packed: bytes) -> Lease:
    head, _, record = packed.partition(b"\n")
    fence, job_id, lease_ms, *_ = head.decode().split(" ")
    return Lease(job_id, int(fence), int(lease_ms), unpack(record))


def _read_worker_entry(entry: bytes) -> tuple[str, str | None]:
    """The state of an external worker and its job, from the first entry of its list."""
    words = entry.partition(b"\n")[0].decode().split(" ")
    if words[0] == "accepted":
        return "busy", words[2]
    return ("assigned", words[1]) if words[0].isdigit() else ("idle", None)


def _broken_record(reason: str) -> Failure:
    brief = orjson.dumps({"name": "BrokenRecord", "message": reason, "kind": "permanent"})
    return Failure(brief, brief, "permanent", None, 0.0)


def _chunks(rows: Iterable[tuple[str, float]]) -> Iterator[list[tuple[str, float]]]:
    rest = iter(rows)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk
