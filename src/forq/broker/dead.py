"""Dead jobs: list, show, revive (the user's `retry`) and discard them.

`dead` holds id@fence by time of death, `dead:jobs` holds RECORD '\\n' ERROR ['\\n' ATTEMPTS] under the same name.
ERROR is a JSON object, ATTEMPTS a JSON array with the newest last.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forq.api_types import DeadBrief
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.record import read_error, show_record, unpack
from forq.broker.scripts import BROKEN, EXISTS, FULL, NO_QUEUE, OK, UNMET, Script, error_for, script
from forq.errors import ForqError, InvalidData, InvalidId, UnknownJob, UsageError
from forq.values import check_queue_name, shown

MAX_PAGE = 1000
# Jobs per script call.
CHUNK = 100
# Names that one step of a walk reads.
WALK_CHUNK = 500

_REFERENCE = re.compile(r"[!-~]{1,160}\Z")
_PAGE_CURSOR = re.compile(r"([0-9]{1,16})/([!-~]{1,160})")
_CHUNK_CURSOR = re.compile(r"([0-9]{1,16})/([0-9]{1,12})")


@dataclass(frozen=True, slots=True)
class DeadPage:
    """Dead jobs as {"id", "fence", "identifier", "type", "died_at", "attempts", "error", "message"}; `next` is the next
    page's cursor."""

    jobs: list[DeadBrief]
    next: str | None


@dataclass(frozen=True, slots=True)
class DeadChunk:
    """The result of one step of a walk through all dead jobs. `next`: the cursor for the next step (None: finished)."""

    done: int
    refused: int
    left: int
    next: str | None


@dataclass(frozen=True, slots=True)
class DeadChanged:
    """The number of dead jobs changed, and the errors of the others by id@fence or given reference."""

    done: int
    refused: dict[str, ForqError]


def read_dead(packed: bytes) -> tuple[bytes, Any, list[Any]]:
    """A dead job's packed record, its error and its attempts; broken parts are returned as text."""
    rest, _, last = packed.rpartition(b"\n")
    attempts: Any = []
    if last.startswith(b"["):
        attempts = read_error(last)
        rest, _, last = rest.rpartition(b"\n")
    return rest, read_error(last), attempts if isinstance(attempts, list) else [attempts]


class DeadJobs:
    """The dead jobs of one queue. A reference is id@fence, or an id, which means the newest with that id."""

    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self._link = link
        self._base = queue_base(prefix, name)
        self._zset, self._hash = f"{self._base}:dead", f"{self._base}:dead:jobs"

    def page(self, limit: int = 100, after: str | None = None) -> DeadPage:
        """A page of dead jobs, newest first."""
        self.check_exists()
        limit = max(1, min(limit, MAX_PAGE))
        start = self._start_of_page(after)
        flat = self._link.call("ZREVRANGE", self._zset, start, start + limit - 1, "WITHSCORES")
        members, died = flat[::2], [int(float(score)) for score in flat[1::2]]
        packed = self._link.hash_values(self._hash, members)
        jobs = [
            _brief(member.decode(errors="replace"), died_ms, record)
            for member, died_ms, record in zip(members, died, packed, strict=True)
        ]
        last = f"{died[-1]}/{members[-1].decode(errors='replace')}" if len(members) == limit else None
        return DeadPage(jobs, last)

    def show(self, reference: str) -> dict[str, Any]:
        """All fields of one dead job."""
        member = self.find(reference)
        packed, died_ms = self._link.pipeline([("HGET", self._hash, member), ("ZSCORE", self._zset, member)])
        if packed is None:
            raise self._unknown(reference)
        job_id = member.rpartition("@")[0]
        record, error, attempts = read_dead(packed)
        fields = {"id": job_id, "state": "dead", "fence": fence_of(member), **show_record(record, job_id)}
        return fields | {"died_at": float(died_ms or 0) / 1000, "error": error, "attempts": attempts}

    def retry(self, reference: str) -> str:
        """Revives the job with its counts reset; Exists if a live job has its id. Returns its id@fence."""
        return self._apply_to_one(script("revive"), reference)

    def retry_with_dependants(self, reference: str) -> DeadChanged:
        """Revives the job and those that are dead because of it, directly or through others: they wait for it again."""
        first = self.find(reference)
        members, ids = {first: None}, {first.rpartition("@")[0]}
        holds = dict(self._holds())
        found = True
        while found:
            found = False
            for member, names in holds.items():
                if member not in members and names & ids:
                    members[member], found = None, True
                    ids.add(member.rpartition("@")[0])
        return self._apply_to_many(script("revive"), members)

    def _holds(self) -> Iterator[tuple[str, set[str]]]:
        """Every dead job that waited for others, with the ids of the jobs of this queue for which it still waited."""
        cursor = b"0"
        while True:
            cursor, flat = self._link.call("HSCAN", f"{self._base}:dead:holds", cursor, "COUNT", 1000)
            for member, entry in zip(flat[::2], flat[1::2], strict=True):
                lines = [line.split(" ") for line in entry.decode().split("\n")[1:]]
                yield member.decode(), {name for _, kind, name, *_ in lines if kind == "job"}
            if cursor == b"0":
                return

    def discard(self, reference: str) -> str:
        """Removes the job. Returns its id@fence."""
        return self._apply_to_one(script("discard"), reference)

    def retry_some(self, after: str | None = None) -> DeadChunk:
        """Revives the next chunk of the jobs that were dead when the walk began, so jobs that die again are skipped.

        Refused jobs (a live job has the id, the record is broken, or what it waits for is not done) stay dead. A full
        queue ends the walk.
        """
        return self._apply_to_some(script("revive"), after)

    def discard_some(self, after: str | None = None) -> DeadChunk:
        return self._apply_to_some(script("discard"), after)

    def retry_many(self, references: Iterable[str] | None) -> DeadChanged:
        """Revives these jobs, or all with None. Safe to repeat: a job that is no longer dead is refused.

        If a call fails, its error has the number of jobs done before.
        """
        return self._apply_to_many(script("revive"), references)

    def discard_many(self, references: Iterable[str] | None) -> DeadChanged:
        return self._apply_to_many(script("discard"), references)

    def find(self, reference: str) -> str:
        """The id@fence of a reference; UnknownJob if there is none."""
        _check_reference(reference)
        self.check_exists()
        if self._link.call("HEXISTS", self._hash, reference):
            return reference
        newest = max(self._members_of(reference), key=fence_of, default=None)
        if newest is None:
            raise self._unknown(reference)
        return newest

    def walk(
        self,
        after: tuple[int, bytes] | None = None,
        *,
        first_ms: float | None = None,
        last_ms: float | None = None,
        newest_first: bool = False,
    ) -> Iterator[tuple[int, bytes]]:
        """The time of death (ms) and id@fence of dead jobs, from the position `after` on, which may be gone by now.

        Walks by time, not by rank: no job is skipped if others are removed meanwhile.
        """
        order, size, position = ("REV",) if newest_first else (), WALK_CHUNK, after
        while True:
            low, high = "-inf" if first_ms is None else first_ms, "+inf" if last_ms is None else last_ms
            if position is not None:
                low, high = (low, position[0]) if newest_first else (position[0], high)
            ends = (high, low) if newest_first else (low, high)
            flat = self._link.call("ZRANGE", self._zset, *ends, "BYSCORE", *order, "LIMIT", 0, size, "WITHSCORES")
            entries = [(int(float(died)), member) for member, died in zip(flat[::2], flat[1::2], strict=True)]
            new = [
                each for each in entries if position is None or (each < position if newest_first else each > position)
            ]
            yield from new
            if len(entries) < size:
                return
            # Many jobs may have died in one millisecond.
            size = WALK_CHUNK if new else 2 * size
            position = new[-1] if new else position

    def packed(self, members: Sequence[bytes]) -> Iterator[bytes | None]:
        """The stored dead jobs of these names, in order."""
        return self._link.hash_values(self._hash, members)

    def now_ms(self) -> int:
        """The server's time; UnknownQueue if there is no queue."""
        return self._start_of_walk(None)[0]

    def check_exists(self) -> None:
        """UnknownQueue if there is no queue."""
        if not self._link.call("EXISTS", f"{self._base}:options"):
            raise error_for(self.name, [NO_QUEUE])

    def died_ms(self, ids: Iterable[str]) -> dict[str, float]:
        """When these jobs died, by id, as far as they are dead: one scan for all."""
        wanted = set(ids)
        newest: dict[str, tuple[int, float]] = {}
        for member, died_ms in self._scan():
            job_id = member.rpartition("@")[0]
            if job_id in wanted:
                newest[job_id] = max(newest.get(job_id, (0, 0.0)), (fence_of(member), died_ms))
        return {job_id: died_ms for job_id, (_, died_ms) in newest.items()}

    def members_of(self, reference: str) -> list[str]:
        """Every id@fence of an id, newest first; or only the given one."""
        _check_reference(reference)
        if self._link.call("HEXISTS", self._hash, reference):
            return [reference]
        return sorted(self._members_of(reference), key=fence_of, reverse=True)

    def _members_of(self, job_id: str) -> list[str]:
        # A scan is fine: lookups by id alone are rare and `dead` is capped.
        found = dict(self._scan(f"{_escaped(job_id)}@*"))
        # Ids may contain an @.
        return [member for member in found if member.rpartition("@")[0] == job_id]

    def _start_of_page(self, after: str | None) -> int:
        if after is None:
            return 0
        cursor = _PAGE_CURSOR.fullmatch(after) if isinstance(after, str) else None
        if cursor is None:
            raise UsageError(f"cursor {shown(after)} is not allowed: use `next` of the previous page")
        died_ms, member = cursor.groups()
        rank, newer = self._link.pipeline(
            [("ZREVRANK", self._zset, member), ("ZCOUNT", self._zset, f"({died_ms}", "+inf")]
        )
        # If it is no longer dead, repeat those that died in the same millisecond rather than skip them.
        return int(newer if rank is None else rank + 1)

    def _apply_to_one(self, verb: Script, reference: str) -> str:
        member = self.find(reference)
        reply = self._link.run(verb, self._base, member)
        if reply[0] != OK:
            raise error_for(self.name, reply)
        if reply[1] == 0:
            raise self._unknown(reference)
        if reply[1] < 0:
            raise self._refusal(reply[1])
        return member

    def _apply_to_some(self, verb: Script, after: str | None) -> DeadChunk:
        until_ms, skip = self._start_of_walk(after)
        members = self._link.call("ZRANGEBYSCORE", self._zset, "-inf", until_ms, "LIMIT", skip, CHUNK)
        done = refused = 0
        if members:
            reply = self._link.run(verb, self._base, *members)
            if reply[0] != OK:
                raise error_for(self.name, reply)
            done = sum(code == 1 for code in reply[1:])
            refused = sum(code in (EXISTS, BROKEN, UNMET) for code in reply[1:])
            if FULL in reply[1:] and not done:
                raise self._refusal(FULL)
        left = max(0, int(self._link.call("ZCOUNT", self._zset, "-inf", until_ms)) - skip - refused)
        return DeadChunk(done, refused, left, f"{until_ms}/{skip + refused}" if left else None)

    def _apply_to_many(self, verb: Script, references: Iterable[str] | None) -> DeadChanged:
        named = self._all_dead() if references is None else self._find_many(references)
        done = 0
        refused: dict[str, ForqError] = {}
        chunk: dict[str, str] = {}
        try:
            for reference, member in named:
                if member is None:
                    refused[reference] = self._unknown(reference)
                    continue
                chunk[member] = reference
                if len(chunk) == CHUNK:
                    done += self._apply_to_chunk(verb, chunk, refused)
                    chunk = {}
            done += self._apply_to_chunk(verb, chunk, refused)
        except ForqError as exc:
            raise type(exc)(f"{exc}; done before: {done}") from exc
        return DeadChanged(done, refused)

    def _apply_to_chunk(self, verb: Script, chunk: Mapping[str, str], refused: dict[str, ForqError]) -> int:
        """Returns the number of jobs changed; adds the others to `refused`."""
        members, done = list(chunk), 0
        errors: dict[int, ForqError] = {}
        while members:
            reply = self._link.run(verb, self._base, *members)
            if reply[0] != OK:
                raise error_for(self.name, reply)
            # The script stops early after moving much data.
            for member, code in zip(members, reply[1:], strict=False):
                if code == 1:
                    done += 1
                elif code == 0:
                    refused[chunk[member]] = self._unknown(chunk[member])
                else:
                    errors[code] = errors.get(code) or self._refusal(code)
                    refused[chunk[member]] = errors[code]
            members = members[len(reply) - 1 :]
        return done

    def _all_dead(self) -> Iterator[tuple[str, str]]:
        """All jobs that are dead now, oldest first. A scan, because pages skip jobs if others are removed meanwhile."""
        until_ms, _ = self._start_of_walk(None)
        died = {member: died_ms for member, died_ms in self._scan() if died_ms <= until_ms}
        return ((member, member) for member in sorted(died, key=lambda member: died[member]))

    def _scan(self, pattern: str = "*") -> Iterator[tuple[str, float]]:
        """Every id@fence with its time of death; may repeat some."""
        cursor = b"0"
        while True:
            cursor, flat = self._link.call("ZSCAN", self._zset, cursor, "MATCH", pattern, "COUNT", 1000)
            yield from ((name.decode(), float(died_ms)) for name, died_ms in zip(flat[::2], flat[1::2], strict=True))
            if cursor == b"0":
                return

    def _find_many(self, references: Iterable[str]) -> Iterator[tuple[str, str | None]]:
        """Each reference with its id@fence (None if there is none), with at most one scan."""
        wanted = list(dict.fromkeys(map(_check_reference, references)))
        self.check_exists()
        known = self._link.pipeline([("HEXISTS", self._hash, reference) for reference in wanted]) if wanted else []
        found: dict[str, str] = {name: name for name, exists in zip(wanted, known, strict=True) if exists}
        ids = set(wanted) - set(found)
        for member, _ in self._scan() if ids else ():
            job_id = member.rpartition("@")[0]
            if job_id in ids:
                found[job_id] = max(found.get(job_id, member), member, key=fence_of)
        return ((reference, found.get(reference)) for reference in wanted)

    def _start_of_walk(self, after: str | None) -> tuple[int, int]:
        if after is None:
            self.check_exists()
            seconds, micros = self._link.call("TIME", at=self._base)
            return int(seconds) * 1000 + int(micros) // 1000, 0
        cursor = _CHUNK_CURSOR.fullmatch(after) if isinstance(after, str) else None
        if cursor is None:
            raise UsageError(f"cursor {shown(after)} is not allowed: use `next` of the previous reply")
        return int(cursor[1]), int(cursor[2])

    def _refusal(self, code: int) -> ForqError:
        return error_for(self.name, [code, self._link.call("HGET", f"{self._base}:options", "max_items")])

    def _unknown(self, reference: str) -> UnknownJob:
        return UnknownJob(
            f"queue {self.name!r} has no dead job {reference!r}; `forqctl jobs {self.name} --state dead` lists them"
        )


def _check_reference(reference: object) -> str:
    if not isinstance(reference, str) or not _REFERENCE.match(reference):
        raise InvalidId(f"{shown(reference)} is not allowed: a job's id, or id@fence")
    return reference


def _brief(member: str, died_ms: int, packed: bytes | None) -> DeadBrief:
    job_id = member.rpartition("@")[0]
    packed_record, error, attempts = read_dead(packed or b"")
    try:
        record = unpack(packed_record)
        identifier, job_type = record.identifier, record.type
    except InvalidData:
        identifier = job_type = None
    known = error if isinstance(error, dict) else {"message": error}
    return {
        "id": job_id,
        "fence": fence_of(member),
        "identifier": identifier or job_id,
        "type": job_type,
        "died_at": died_ms / 1000,
        "attempts": len(attempts),
        "error": known.get("name"),
        "message": known.get("message"),
    }


def fence_of(member: str) -> int:
    fence = member.rpartition("@")[2]
    return int(fence) if fence.isdigit() else 0


def _escaped(text: str) -> str:
    """The text with the pattern characters of MATCH escaped."""
    return "".join(f"\\{char}" if char in "*?[]\\^" else char for char in text)
