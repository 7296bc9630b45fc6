"""Held jobs: reads what they wait for, and which jobs wait for a job. lua/flows.lua describes the keys."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from forq.api_types import DependencyInfo, DependencyState, When
from forq.broker.dependencies import NOT_USED
from forq.broker.link import Link
from forq.broker.record import live_state

# Of the dependencies and the dependants of one job, these many are read.
SHOWN_DEPENDENCIES = 100
SHOWN_DEPENDANTS = 20
# Edges that are searched for those of one job.
_EDGES = 1000
# Jobs per step of a scan. Positions in a step need the same number in every call.
_STEP = 500
_HOLD = re.compile(rb"([0-9]+) (done|ended|dead) ([0-9]) ([0-9]+) ([0-9]+) ([0-9]+)")
_GROUP = re.compile(rb"([0-9]+):([0-9]+):")

# Dependencies in another queue, which is named before the id.
_ELSEWHERE: Mapping[bytes, Literal["job", "batch"]] = {b"from": "job", b"gate": "batch"}
_MEMBER = re.compile(rb"(?:to (\S+) [0-9]+ )?batch (\S+) [0-9]+ ([0-9]+) ")


class Hold(NamedTuple):
    """An entry of `held`. `nonce`: of the edges to it. `total`: its dependencies; `open`: those that have not ended."""

    nonce: bytes
    when: When
    use: int
    run_at_ms: int
    total: int
    open: int

    @property
    def run_at(self) -> float | None:
        return self.run_at_ms / 1000 or None


def read_hold(entry: bytes) -> Hold:
    """A broken entry waits for nothing that is known."""
    found = _HOLD.fullmatch(entry)
    if found is None:
        return Hold(b"", "done", NOT_USED, 0, 0, 0)
    nonce, when, *numbers = found.groups()
    return Hold(nonce, cast(When, when.decode()), *map(int, numbers))


def scan_held(link: Link, base: str, position: str, limit: int) -> tuple[list[bytes], str | None]:
    """At most this many ids of held jobs, perhaps none, and the position of those that follow (None: there are none).

    In no order: the hash may be large, so it is never read as a whole. The first position is '0.0'. While the server
    moves a hash that has grown to a larger table, a page that ends within a step may repeat or omit an id.
    """
    cursor, offset = (int(part) for part in position.split("."))
    following, flat = link.call("HSCAN", f"{base}:held", cursor, "COUNT", _STEP)
    ids = flat[::2][offset:]
    if len(ids) > limit:
        return ids[:limit], f"{cursor}.{offset + limit}"
    return ids, None if following == b"0" else f"{following.decode()}.0"


class HeldJobs:
    """The jobs of one queue that wait for others."""

    def __init__(self, link: Link, base: str, name: str) -> None:
        self._link = link
        self._base = base
        self._name = name

    def details(self, job_id: str, entry: bytes) -> dict[str, Any]:
        """The fields that only a held job has. `entry`: of `held`."""
        hold = read_hold(entry)
        return {
            "run_at": hold.run_at,
            "when": hold.when,
            "with_results": hold.use != NOT_USED,
            "waits_for": list(self._waits_for(job_id, hold)),
            "waits_for_count": hold.open,
            "waited_for": hold.total - hold.open,
        }

    def _waits_for(self, job_id: str, hold: Hold) -> Iterator[DependencyInfo]:
        """Its dependencies that have not ended, in the order in which they were given."""
        fields = [f"{job_id} {number}" for number in range(1, hold.total + 1)]
        found = self._link.call("HMGET", f"{self._base}:held:open", *fields) if fields else []
        named = [self._named(each) for each in found if each is not None][:SHOWN_DEPENDENCIES]
        ids = [name for kind, name in named if kind == b"job"]
        known = dict(zip(ids, self._states(ids, b"job %s %s " % (job_id.encode(), hold.nonce)), strict=True))
        for kind, name in named:
            id = name.decode(errors="replace")
            if kind in _ELSEWHERE:
                queue, _, id = id.partition(" ")
                yield {"kind": _ELSEWHERE[kind], "id": id, "state": None, "queue": queue}
                continue
            if kind != b"job":
                yield {"kind": "batch", "id": id, "state": None}
                continue
            state, run_at = known[name]
            about: DependencyInfo = {"kind": "job", "id": id, "state": state}
            yield about if run_at is None else {**about, "run_at": run_at}

    def _named(self, dependency: bytes) -> tuple[bytes, bytes]:
        """Kind and name. A flow of several calls names also its jobs of this queue with the queue."""
        kind, _, name = dependency.partition(b" ")
        own, _, job_id = name.partition(b" ")
        return (b"job", job_id) if kind == b"from" and own.decode() == self._name else (kind, name)

    def _states(self, ids: list[bytes], edge: bytes) -> Iterator[tuple[DependencyState, float | None]]:
        """The states of these jobs, and their times if they are scheduled. `edge`: how those of the held job begin."""
        if not ids:
            return
        owners, due, held, sources, ends, older = self._link.pipeline(
            [
                ("HMGET", f"{self._base}:active", *ids),
                ("ZMSCORE", f"{self._base}:scheduled", *ids),
                ("HMGET", f"{self._base}:held", *ids),
                ("HMGET", f"{self._base}:sources", *(each + b" blocked" for each in ids)),
                ("HMGET", f"{self._base}:ends", *ids),
                ("HMGET", f"{self._base}:ends:old", *ids),
            ]
        )
        records = self._link.hash_values(f"{self._base}:jobs", ids)
        found = zip(owners, due, held, sources, ends, older, records, strict=True)
        for owner, due_ms, hold, groups, end, older_end, record in found:
            if groups is not None and any(found.startswith(edge) for found in self._edges(groups, _EDGES)):
                yield "blocked", None
            elif record is not None:
                state = cast(DependencyState, live_state(record, owner, due_ms))
                yield state, float(due_ms) / 1000 if state == "scheduled" else None
            elif hold is not None:
                yield "held", None
            else:
                # Its end has not been followed yet.
                yield cast(DependencyState, (end or older_end or b"gone").decode()), None

    def dependants(self, job_id: str, groups: bytes | None) -> dict[str, Any]:
        """The first jobs that wait for a job, and how many do. `groups`: its entry in `sources`."""
        if groups is None:
            return {}
        edges = [edge.split(b" ") for edge in self._edges(groups, SHOWN_DEPENDANTS) if edge.startswith(b"job ")]
        ids = [edge[1] for edge in edges]
        entries = self._link.call("HMGET", f"{self._base}:held", *ids) if ids else []
        waiting = [
            id.decode(errors="replace")
            for (_, id, nonce, *_), entry in zip(edges, entries, strict=True)
            # A job that was cancelled leaves its edges, and its id may be that of another job by now.
            if entry is not None and entry.startswith(nonce + b" ")
        ]
        count = sum(int(number) for _, number in _GROUP.findall(groups))
        return {"dependants": list(dict.fromkeys(waiting)), "dependant_count": count} if waiting else {}

    def membership(self, groups: bytes | None) -> dict[str, Any]:
        """The batch that a job belongs to, if any: the target of its first edge (lua/flows.lua, membership)."""
        first = self._edges(groups, 1) if groups is not None else []
        found = _MEMBER.match(first[0]) if first else None
        if found is None:
            return {}
        home, batch, number = (part.decode() if part else "" for part in found.groups())
        return {"member_of": {"queue": home or self._name, "id": batch, "number": int(number)}}

    def _edges(self, groups: bytes, limit: int) -> list[bytes]:
        """The first edges of a source."""
        fields: list[str] = []
        for group, count in _GROUP.findall(groups):
            left = min(int(count), limit - len(fields))
            fields += [f"{group.decode()} {index}" for index in range(1, left + 1)]
        found: Sequence[bytes | None] = self._link.call("HMGET", f"{self._base}:edges", *fields) if fields else []
        return [edge for edge in found if edge is not None]
