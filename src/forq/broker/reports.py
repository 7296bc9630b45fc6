"""Ends of jobs that another queue waits for: delivers the reports of a queue, and looks after members and dependencies
whose report may never come. Called by pulse; lua/batches.lua has the data.

A report may be delivered twice: its edge counts once. It is forgotten only when its destination has it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from forq.broker.keys import QUEUE_OF_REPORTS, queue_base, reports_key
from forq.broker.link import READ_BYTES, Link
from forq.broker.scripts import NO_QUEUE, OK, error_for, script

# Lines per call, at first and at most; long results make it fewer.
FIRST_LINES, MOST_LINES = 20, 500
PARTS_PER_DELIVERY = 4
NUMBERS_PER_CALL = 500


class Reports:
    """Delivers reports, and verifies that those which are awaited can still come."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix

    def deliver(self, queue: str) -> bool:
        """Delivers a part of the reports of this queue; returns whether there are more."""
        base, more = queue_base(self._prefix, queue), False
        for destination in self._link.call("HKEYS", f"{base}:reports"):
            more |= self._deliver_to(base, destination.decode())
        return more

    def _deliver_to(self, base: str, destination: str) -> bool:
        """Returns False once the list is empty: only the first report after that wakes pulse again."""
        name, count = f"{QUEUE_OF_REPORTS}{destination}", FIRST_LINES
        there = queue_base(self._prefix, destination)
        for attempt in range(PARTS_PER_DELIVERY):
            lines = self._link.call("LRANGE", reports_key(base, destination), 0, count - 1)
            if not lines:
                if attempt == 0:
                    self._forget(base, name, [])
                return False
            sent = _within_limit(lines)
            reply = self._link.run(script("report"), there, *lines[:sent])
            # Without that queue, nobody waits.
            applied = sent if reply[0] == NO_QUEUE else int(reply[1])
            if applied:
                self._forget(base, name, lines[:applied])
            if applied == count:
                count = min(MOST_LINES, 5 * count)
            elif applied < len(lines):
                count = max(1, applied)
        return True

    def _forget(self, base: str, name: str, lines: Sequence[bytes]) -> None:
        joined = hashlib.sha1(b"\n".join(lines), usedforsecurity=False).hexdigest()
        self._link.run(script("forget"), base, name, len(lines), joined)

    def verify(self, queue: str, what: Sequence[str]) -> None:
        """Ends members of batches, and dependencies of held jobs, that are gone without a report.

        `what`: 'b' and the id of a batch, or 'j' and that of a held job (lua/batches.lua, tend).
        """
        base = queue_base(self._prefix, queue)
        for each in what:
            by_queue: dict[str, list[Awaited]] = {}
            for awaited in self._awaited(base, queue, each[0], each[1:]):
                by_queue.setdefault(awaited.queue, []).append(awaited)
            for member_queue, members in by_queue.items():
                self._verify_members(base, queue, each, member_queue, members)

    def _verify_members(self, base: str, queue: str, what: str, member_queue: str, members: "list[Awaited]") -> None:
        for first in range(0, len(members), NUMBERS_PER_CALL):
            part = members[first : first + NUMBERS_PER_CALL]
            pairs = [value for each in part for value in (each.source, each.edge)]
            reply = self._link.run(script("verify"), queue_base(self._prefix, member_queue), queue, *pairs)
            known = [0] * len(part) if reply[0] == NO_QUEUE else reply[1:]
            gone = [each.number for each, is_known in zip(part, known, strict=True) if not is_known]
            if gone:
                how = "deleted" if reply[0] == NO_QUEUE else "lost"
                lost = self._link.run(script("lose"), base, how, what, part[0].nonce, *gone)
                if lost[0] not in (OK, NO_QUEUE):
                    raise error_for(queue, lost)

    def _awaited(self, base: str, queue: str, kind: str, name: str) -> "Iterator[Awaited]":
        """The members, or dependencies in other queues, that have not ended."""
        table, open_ones = ("batches", "batch:members") if kind == "b" else ("held", "held:open")
        entry, epoch = self._link.pipeline(
            [("HGET", f"{base}:{table}", name), ("HGET", f"{base}:options", "epoch")], at=base
        )
        if entry is None or epoch is None:
            return
        fields = entry.decode().split(" ")
        use, count, nonce = (
            (fields[1], int(fields[2]), fields[8]) if kind == "b" else (fields[2], int(fields[4]), fields[0])
        )
        target = f"{'batch' if kind == 'b' else 'job'} {name} {nonce}"
        for first in range(1, count + 1, NUMBERS_PER_CALL):
            numbers = range(first, min(first + NUMBERS_PER_CALL, count + 1))
            values = self._link.call("HMGET", f"{base}:{open_ones}", *(f"{name} {number}" for number in numbers))
            for number, value in zip(numbers, values, strict=True):
                parts = value.decode().split(" ") if value else []
                if kind == "j":
                    # Other dependencies are in this queue.
                    batch = " batch" if parts[:1] == ["gate"] else ""
                    parts = [parts[1], parts[2] + batch] if parts[:1] in (["from"], ["gate"]) else []
                if parts:
                    edge = f"{target} {number} {use}"
                    there = edge if parts[0] == queue else f"to {queue} {epoch.decode()} {edge}"
                    yield Awaited(number, parts[0], parts[1], nonce, there)


class Awaited(NamedTuple):
    """A job whose end is awaited: the number of its place, its queue, its id, the nonce of what waits for it, and the
    edge between them."""

    number: int
    queue: str
    source: str
    nonce: str
    edge: str


def _within_limit(lines: Sequence[Any]) -> int:
    """How many of these lines one call may carry: at least one."""
    total = 0
    for number, line in enumerate(lines):
        total += len(line)
        if total > READ_BYTES and number:
            return number
    return len(lines)
