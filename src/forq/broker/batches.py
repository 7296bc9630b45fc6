"""Batches in Redis: opens and seals them, reserves places for members, reads counts and results (lua/batches.lua)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from forq.broker.enqueue import Producer, TokenTerms
from forq.broker.keys import queue_base
from forq.broker.link import READ_BYTES, Link
from forq.broker.scripts import OK, error_for, script
from forq.errors import ForqError, InvalidId, NoResult, OutcomeUnknown, RedisUnavailable, UnknownBatch
from forq.values import check_queue_name, shown
from forq.version import PROTOCOL

BatchState = Literal["open", "sealed", "cancelled", "done", "failed", "abandoned"]
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
MEMBERS_PER_CALL = 500


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """The state of a batch, and its members: all, those that have not ended, and how the others have ended.

    `at`: epoch seconds of its creation; once it has ended, of its end.
    """

    state: BatchState
    members: int
    open: int
    done: int
    dead: int
    other: int
    at: float
    keeps_results: bool

    @property
    def has_ended(self) -> bool:
        return self.state in ("done", "failed", "abandoned")


def check_batch_id(given: object, what: str = "batch") -> str:
    """`what`: also for flows, whose gates are batches."""
    if not isinstance(given, str) or not _ID.match(given):
        raise InvalidId(f"{what} id {shown(given)} is not allowed: 1 to 64 of A-Z a-z 0-9 _ . -")
    return given


class StoredBatch:
    """One batch, in its home queue."""

    def __init__(self, link: Link, prefix: str, queue: str, batch_id: str) -> None:
        self.queue = check_queue_name(queue)
        self.id = check_batch_id(batch_id)
        self._link = link
        self._prefix = prefix
        self._base = queue_base(prefix, queue)
        # The epoch of the home queue, and the nonce of the batch.
        self._known: tuple[str, str] | None = None

    def open(self, *, keeps_results: bool) -> TokenTerms:
        """Creates it; an open one of this id is joined. BatchEnded if it is sealed or has ended. Returns the epoch and
        the time of its home queue."""
        reply = self._run("open_batch", PROTOCOL, self.id, int(keeps_results))
        return TokenTerms(reply[1].decode(), int(reply[2]), 0)

    def edge(self, number: int, queue: str, *, keeps_results: bool) -> str:
        """The edge of a member in this queue, as enqueue.lua stores it."""
        epoch, nonce = self._identity()
        edge = f"batch {self.id} {nonce} {number} {keeps_results:d}"
        return edge if queue == self.queue else f"to {self.queue} {epoch} {edge}"

    def token(self, number: int) -> str:
        """A token that no other member of any batch has."""
        return f"{self.queue}:{self.id}:{self._identity()[1]}:{number}"

    def _identity(self) -> tuple[str, str]:
        if self._known is None:
            epoch, entry = self._link.pipeline(
                [("HGET", f"{self._base}:options", "epoch"), ("HGET", f"{self._base}:batches", self.id)], at=self._base
            )
            if epoch is None or entry is None:
                raise self._unknown()
            self._known = epoch.decode(), entry.decode().split(" ")[8]
        return self._known

    def _unknown(self) -> UnknownBatch:
        return UnknownBatch(
            f"queue {self.queue!r} has no batch {self.id!r}: it never existed, or ended more than a day ago"
        )

    def reserve(self, members: Sequence[tuple[str, str]], parent: int | None = None, after: int = 0) -> list[int]:
        """Numbers for new members, given as (queue, id); 0 for one that has ended already.

        `parent`: the running member that adds them, after `after` others: the call may be repeated.
        """
        numbers: list[int] = []
        for first in range(0, len(members), MEMBERS_PER_CALL):
            part = [f"{queue} {job_id}" for queue, job_id in members[first : first + MEMBERS_PER_CALL]]
            reply = self._run("add_members", self.id, "" if parent is None else parent, after + first, *part)
            numbers += reply[1:]
        return numbers

    def seal(self, *, cancel: bool = False) -> int:
        """No more members; returns how many have not ended. Safe to repeat."""
        try:
            reply = self._run("seal_batch", self.id, int(cancel))
        except OutcomeUnknown as exc:
            try:
                reply = self._run("seal_batch", self.id, int(cancel))
            except RedisUnavailable:
                raise exc from None
        return int(reply[1])

    def attach(self, edges: Sequence[str]) -> None:
        """Adds edges to jobs in other queues that wait for the end of the batch."""
        for first in range(0, len(edges), MEMBERS_PER_CALL):
            self._run("attach", self.id, *edges[first : first + MEMBERS_PER_CALL])

    def counts(self) -> BatchCounts:
        """UnknownBatch if it never existed, or ended more than a day ago."""
        entry = self._link.call("HGET", f"{self._base}:batches", self.id)
        if entry is None:
            raise self._unknown()
        state, use, members, open_count, done, dead, other, at_ms, _ = entry.decode().split(" ")
        return BatchCounts(
            state=state,
            members=int(members),
            open=int(open_count),
            done=int(done),
            dead=int(dead),
            other=int(other),
            at=int(at_ms) / 1000,
            keeps_results=use == "1",
        )

    def open_members(self) -> Iterator[tuple[int, str, str]]:
        """Number, queue and id of each member that has not ended."""
        for first, values in self._numbered("batch:members", self.counts().members):
            for number, value in enumerate(values, first):
                if value is not None:
                    queue, job_id, *_ = value.decode().split(" ")
                    yield number, queue, job_id

    def cancel(self, most: int | None = None) -> tuple[int, bool]:
        """Cancels the members that have not begun, up to `most`; returns how many, and whether there may be more.

        Running ones end, and count as they end."""
        self.seal(cancel=True)
        cancelled, keeps_results = 0, self.counts().keeps_results
        for number, queue, job_id in self.open_members():
            if cancelled == most:
                return cancelled, True
            edge = self.edge(number, queue, keeps_results=keeps_results)
            try:
                cancelled += Producer(self._link, self._prefix, queue).cancel(job_id, edge=edge)
            except ForqError as exc:
                if exc.code != "unknown_queue":
                    raise
        return cancelled, False

    def results(self) -> list[Any]:
        """The results of all members in the order in which they were added; None for one that is not done."""
        found: list[Any] = []
        for first, values in self._numbered("batch:results", self.counts().members):
            found += [read_result(value, f"member {number}") for number, value in enumerate(values, first)]
        return found

    def _numbered(self, name: str, count: int) -> Iterator[tuple[int, list[bytes | None]]]:
        """Values of the members from 1 to `count`, in parts of limited size."""
        first, size = 1, 1 if name == "batch:results" else MEMBERS_PER_CALL
        while first <= count:
            fields = [f"{self.id} {number}" for number in range(first, min(first + size, count + 1))]
            values = self._link.call("HMGET", f"{self._base}:{name}", *fields)
            yield first, values
            first += len(fields)
            longest = max((len(value) for value in values if value), default=1)
            size = max(1, min(MEMBERS_PER_CALL, 4 * size, READ_BYTES // (2 * max(longest, 1))))

    def _run(self, verb: str, *args: Any) -> list[Any]:
        reply: list[Any] = self._link.run(script(verb), self._base, *args)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        return reply


def read_result(stored: bytes | None, what: str) -> Any:
    """The result in 'HOW RESULT'; None if the job is not done. NoResult if it is done and left none."""
    how, _, packed = (stored or b"").partition(b" ")
    if how not in (b"done", b"released") or not packed:
        return None
    if packed.startswith(b"!"):
        raise NoResult(f"{what} is done, but has no result: {packed[1:].decode(errors='replace')}")
    return orjson.loads(packed)
