"""Finding jobs: pages of jobs with their details, selected by a filter. Read-only.

A request scans a limited number of jobs and bytes, in chunks, so that it does not delay the server's other clients. Its
answer has the jobs found so far, and a cursor. The data of jobs is neither decoded nor returned.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, cast

import orjson

from forq.api_types import JobDetails, State
from forq.broker.dead import DeadJobs, fence_of, read_dead
from forq.broker.filters import FoundJob, JobFilter
from forq.broker.held import read_hold, scan_held
from forq.broker.inspect import MAX_PAGE, STATES, ownership
from forq.broker.keys import pending_key, queue_base, retry_key, suspects_key, swept_key
from forq.broker.link import Link
from forq.broker.record import brief_fields, live_state
from forq.broker.results import read_done
from forq.errors import InvalidData, UsageError
from forq.values import check_job_id, check_queue_name, shown

# Limits of one request; a single longer record is still read.
SCANNED = 10_000
SCANNED_BYTES = 32 << 20
# Jobs per call of the server.
CHUNK = 500

_CURSOR = re.compile(
    r"((?:active|blocked|done|scheduled|retry)/[0-9]{1,12}|waiting/(?:[0-9]|10)\.[0-9]{1,12}"
    r"|held/[0-9]{1,20}\.[0-9]{1,9}|dead/[0-9]{1,16}/[!-~]{1,160})\Z"
)
_DEAD_CURSOR = re.compile(r"([0-9]{1,16})/([!-~]{1,160})")
# The priority of suspects in cursors: they come after the last priority.
_SUSPECTS = 10
# The states of a list that asks for none.
_IN_LINE: tuple[State, ...] = ("active", "waiting", "scheduled", "held")


class Scanned(NamedTuple):
    """One job of a walk. `job`: None if it has gone or changed its state. `cursor`: where the walk continues."""

    job: FoundJob | None
    cursor: str


@dataclass(frozen=True, slots=True)
class FoundPage:
    """`next`: the cursor of the next page (None: there is none). `scanned`: the number of jobs that were compared."""

    jobs: list[JobDetails]
    next: str | None
    scanned: int


class Allowance:
    """Counts the jobs and bytes that one request has scanned."""

    def __init__(self) -> None:
        self.scanned = self.size = 0

    def count(self, size: int) -> None:
        self.scanned += 1
        self.size += size

    @property
    def is_spent(self) -> bool:
        return self.scanned >= SCANNED or self.size >= SCANNED_BYTES


class JobSearch:
    """Searches one queue."""

    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self.dead = DeadJobs(link, prefix, name)
        self._link = link
        self._base = queue_base(prefix, name)

    def page(
        self, state: str | None = None, limit: int = 100, after: str | None = None, wanted: JobFilter | None = None
    ) -> FoundPage:
        """Jobs in the order in which they will run; dead and done ones newest first, active and blocked ones by id,
        held ones in no order.

        Without a state: active, waiting, scheduled and held ones.
        """
        check_state(state)
        self.dead.check_exists()
        if wanted is not None and wanted.id is not None:
            found = self.by_id(state or "", wanted)
            return FoundPage([job.details for job in found], None, len(found))
        limit = max(1, min(limit, MAX_PAGE))
        stage, position = _read_cursor(after, state)
        stages = (stage,) if state is not None else _IN_LINE[_IN_LINE.index(stage) :]
        jobs: list[JobDetails] = []
        allowance = Allowance()
        for number, each in enumerate(stages):
            chunk = CHUNK if wanted is not None else min(CHUNK, limit - len(jobs))
            for job, cursor in self._walk(each, "" if number else position, wanted, chunk):
                allowance.count(0 if job is None else job.size)
                if job is not None and (wanted is None or wanted.matches(job)):
                    jobs.append(job.details)
                if len(jobs) == limit or allowance.is_spent:
                    return FoundPage(jobs, cursor, allowance.scanned)
        return FoundPage(jobs, None, allowance.scanned)

    def by_id(self, state: str, wanted: JobFilter) -> list[FoundJob]:
        """The jobs in this state with the filter's id that match the rest of it. Scans nothing but names of dead jobs;
        for a dead job the id may be id@fence."""
        if state == "dead":
            found = list(self._dead_jobs(self.dead.members_of(wanted.id or "")))
        else:
            ids = [check_job_id(wanted.id).encode()]
            if state in ("done", "blocked", "held"):
                read = {"done": self._done_jobs, "blocked": self._blocked_jobs, "held": self.held_jobs}[state]
                found = list(read(ids))
            else:
                found = list(self.live_jobs(ids, cast(State, state), with_errors=wanted.error is not None))
        return [job for job in found if job is not None and wanted.for_any_id().matches(job)]

    def _walk(self, state: State, position: str, wanted: JobFilter | None, chunk: int) -> Iterator[Scanned]:
        with_errors = wanted is not None and wanted.error is not None
        match state:
            case "waiting":
                return self._walk_waiting(position or "0.0", chunk)
            case "dead":
                return self._walk_dead(position, wanted, chunk)
            case "held":
                return self._walk_held(position or "0.0", chunk)
            case "active" | "blocked":
                # Sorted by id: they have no order, and there are no more of them than workers hold.
                ids = sorted(self._link.call("HKEYS", f"{self._base}:{state}"))
                return self._walk_ranks(
                    *(state, position, chunk),
                    lambda at, number: ids[at : at + number],
                    self._blocked_jobs if state == "blocked" else lambda part: self.live_jobs(part, "active"),
                )
            case "done":
                return self._walk_ranks(state, position, chunk, self._done_ids, self._done_jobs)
            case "retry":
                lane = retry_key(self._base)
                return self._walk_ranks(
                    *(state, position, chunk),
                    lambda at, number: self._hints(lane, at, number),
                    lambda part: self.live_jobs(part, "retry", with_errors=with_errors),
                )
            case _:
                return self._walk_ranks(
                    *(state, position, chunk),
                    lambda at, number: self._link.call("ZRANGE", f"{self._base}:scheduled", at, at + number - 1),
                    lambda part: self.live_jobs(part, "scheduled", with_errors=with_errors),
                )

    def _walk_ranks(
        self,
        state: State,
        position: str,
        chunk: int,
        ids_at: Callable[[int, int], Sequence[bytes]],
        read: Callable[[Sequence[bytes]], Iterator[FoundJob | None]],
    ) -> Iterator[Scanned]:
        rank = int(position or 0)
        while ids := ids_at(rank, chunk):
            for job in read(ids):
                rank += 1
                yield Scanned(job, f"{state}/{rank}")
            if len(ids) < chunk:
                return

    def _walk_waiting(self, position: str, chunk: int) -> Iterator[Scanned]:
        priority, offset = (int(part) for part in position.split("."))
        lists = [pending_key(self._base, each) for each in range(_SUSPECTS)]
        # One round trip: with a distant server, one for each empty list would take too long.
        found = self._link.pipeline([("EXISTS", name, swept_key(name)) for name in lists])
        # A job that was cancelled and enqueued again may have two hints.
        seen: set[bytes] = set()
        for each in range(priority, _SUSPECTS + 1):
            if each < _SUSPECTS and not found[each]:
                continue
            at = offset if each == priority else 0
            while hints := self._hints(lists[each], at, chunk) if each < _SUSPECTS else self._suspects(at, chunk):
                new = dict.fromkeys(hint for hint in hints if hint and hint not in seen)
                seen.update(new)
                jobs = self.live_jobs(list(new), "waiting")
                for hint in hints:
                    at += 1
                    job = next(jobs) if hint in new else None
                    new.pop(hint, None)
                    yield Scanned(job, f"waiting/{each}.{at}")
                if len(hints) < chunk:
                    break

    def _walk_held(self, position: str, chunk: int) -> Iterator[Scanned]:
        following: str | None = position
        while following is not None:
            cursor, _, offset = following.partition(".")
            ids, following = scan_held(self._link, self._base, following, chunk)
            for number, job in enumerate(self.held_jobs(ids), 1):
                yield Scanned(job, f"held/{cursor}.{int(offset) + number}")

    def _hints(self, name: str, at: int, number: int) -> list[bytes]:
        """Hints of a list, which begins with the swept ones."""
        swept = swept_key(name)
        first, length = self._link.pipeline([("LRANGE", swept, at, at + number - 1), ("LLEN", swept)])
        if len(first) < number:
            start = max(0, at - length)
            first += self._link.call("LRANGE", name, start, start + number - len(first) - 1)
        return list(first)

    def _suspects(self, at: int, number: int) -> list[bytes]:
        return list(self._link.call("ZRANGE", suspects_key(self._base), at, at + number - 1))

    def _walk_dead(self, position: str, wanted: JobFilter | None, chunk: int) -> Iterator[Scanned]:
        after = read_dead_cursor(position or None)
        first_ms = None if wanted is None or wanted.since is None else wanted.since * 1000
        last_ms = None if wanted is None or wanted.until is None else wanted.until * 1000
        walk = self.dead.walk(after, first_ms=first_ms, last_ms=last_ms, newest_first=True)
        for part in chunked(walk, chunk):
            for (died_ms, member), job in zip(part, self.read_dead(part), strict=True):
                yield Scanned(job, f"dead/{died_ms}/{member.decode(errors='replace')}")

    def _dead_jobs(self, members: Sequence[str]) -> Iterator[FoundJob | None]:
        names = [member.encode() for member in members]
        scores = self._link.call("ZMSCORE", f"{self._base}:dead", *names) if names else []
        return self.read_dead([(int(float(ms or 0)), name) for name, ms in zip(names, scores, strict=True)])

    def read_dead(self, entries: Sequence[tuple[int, bytes]]) -> Iterator[FoundJob | None]:
        """Reads dead jobs, given by time of death (ms) and id@fence."""
        packed = self.dead.packed([member for _, member in entries])
        return (_dead_job(*entry, stored) for entry, stored in zip(entries, packed, strict=True))

    def live_jobs(
        self, ids: Sequence[bytes], state: State, packed: Sequence[bytes] | None = None, *, with_errors: bool = False
    ) -> Iterator[FoundJob | None]:
        """Reads jobs, if their records are not `packed` already; None for those that are not in this state.

        `with_errors`: also the error of the last attempt.
        """
        if not ids:
            return
        owners, due = self._link.pipeline(
            [("HMGET", f"{self._base}:active", *ids), ("ZMSCORE", f"{self._base}:scheduled", *ids)]
        )
        stored = iter(packed) if packed is not None else self._link.hash_values(f"{self._base}:jobs", ids)
        attempts = self._link.hash_values(f"{self._base}:attempts", ids) if with_errors else repeat(None)
        for job_id, owner, due_ms, record, tried in zip(ids, owners, due, stored, attempts, strict=False):
            known = record is not None and live_state(record, owner, due_ms) == state
            yield _live_job(job_id, state, record or b"", owner, due_ms, tried) if known else None

    def _blocked_jobs(self, ids: Sequence[bytes]) -> Iterator[FoundJob | None]:
        entries = self._link.hash_values(f"{self._base}:blocked", ids)
        return (
            None if entry is None else _blocked_job(job_id, entry) for job_id, entry in zip(ids, entries, strict=True)
        )

    def held_jobs(self, ids: Sequence[bytes], packed: Sequence[bytes] | None = None) -> Iterator[FoundJob | None]:
        """Reads held jobs, if their records are not `packed` already; None for those that are not held any more."""
        if not ids:
            return
        entries = self._link.call("HMGET", f"{self._base}:held", *ids)
        stored = iter(packed) if packed is not None else self._link.hash_values(f"{self._base}:held:jobs", ids)
        for job_id, entry, record in zip(ids, entries, stored, strict=True):
            yield None if entry is None or record is None else _held_job(job_id, entry, record)

    def _done_ids(self, at: int, number: int) -> list[bytes]:
        """First the jobs with a keep_done of their own: those that are kept longest, then the others, newest first."""
        own = f"{self._base}:done:own"
        ids, count = self._link.pipeline([("ZREVRANGE", own, at, at + number - 1), ("ZCARD", own)])
        if len(ids) < number:
            first = max(0, at - count)
            ids += self._link.call("ZREVRANGE", f"{self._base}:done", first, first + number - len(ids) - 1)
        return list(ids)

    def _done_jobs(self, ids: Sequence[bytes]) -> Iterator[FoundJob | None]:
        stored = self._link.hash_values(f"{self._base}:done:jobs", ids)
        return (
            None if packed is None else _done_job(job_id, packed) for job_id, packed in zip(ids, stored, strict=True)
        )


def check_state(state: object) -> None:
    if state is not None and state not in STATES:
        raise UsageError(f"state {shown(state)} is not allowed: {', '.join(STATES)}")


def chunked(entries: Iterator[tuple[int, bytes]], number: int) -> Iterator[list[tuple[int, bytes]]]:
    part = []
    for entry in entries:
        part.append(entry)
        if len(part) == number:
            yield part
            part = []
    if part:
        yield part


def read_dead_cursor(after: object) -> tuple[int, bytes] | None:
    """A position in a walk through dead jobs, from MS '/' ID@FENCE."""
    if after is None:
        return None
    cursor = _DEAD_CURSOR.fullmatch(after) if isinstance(after, str) else None
    if cursor is None:
        raise UsageError(f"cursor {shown(after)} is not allowed: use `next` of the previous answer")
    return int(cursor[1]), cursor[2].encode()


def _read_cursor(after: object, state: str | None) -> tuple[State, str]:
    if after is None:
        return cast(State, state or _IN_LINE[0]), ""
    stage = after.partition("/")[0] if isinstance(after, str) and _CURSOR.match(after) else ""
    if stage not in ((state,) if state is not None else _IN_LINE):
        raise UsageError(f"cursor {shown(after)} is not allowed: use `next` of the previous page")
    return cast(State, stage), str(after).partition("/")[2]


def _details(job_id: str, state: State, packed: bytes) -> tuple[JobDetails, float | None]:
    """Of a broken record, the reason."""
    try:
        known = brief_fields(packed)
    except InvalidData as exc:
        return cast(JobDetails, {"id": job_id, "identifier": job_id, "state": state, "record_error": str(exc)}), None
    known["identifier"] = known["identifier"] or job_id
    return cast(JobDetails, {"id": job_id, "state": state, **known, "run_at": None}), known["enqueued_at"]


def _live_job(
    job_id: bytes, state: State, packed: bytes, owner: bytes | None, due_ms: bytes | None, tried: bytes | None
) -> FoundJob:
    details, enqueued_at = _details(job_id.decode(errors="replace"), state, packed)
    more: dict[str, Any] = {} if due_ms is None else {"run_at": float(due_ms) / 1000}
    details |= cast(JobDetails, more | ownership(owner))
    enqueued_us = 0 if enqueued_at is None else round(enqueued_at * 1e6)
    size = len(packed) + len(tried or b"")
    return FoundJob(details, enqueued_at, _last_error(tried), enqueued_us, size)


def _last_error(tried: bytes | None) -> tuple[object, ...]:
    """Name and message of the last of some attempts, which are JSON lines."""
    try:
        attempt = orjson.loads((tried or b"null").rpartition(b"\n")[2])
    except ValueError:
        return ()
    error = attempt.get("error") if isinstance(attempt, dict) else None
    return (error.get("name"), error.get("message")) if isinstance(error, dict) else ()


def _blocked_job(job_id: bytes, entry: bytes) -> FoundJob:
    """A blocked job has no record yet: its body follows the line with its enqueue options (lua/enqueue.lua)."""
    head, _, body = entry.partition(b"\n")
    numbers = (head.split(b" ") + [b"0"] * 7)[:7]
    details, enqueued_at = _details(
        job_id.decode(errors="replace"), "blocked", b"p%s %s\n%s" % (numbers[2], numbers[6], body)
    )
    if int(numbers[3]):
        details["run_at"] = int(numbers[3]) / 1000
    return FoundJob(details, enqueued_at, size=len(entry))


def _held_job(job_id: bytes, entry: bytes, packed: bytes) -> FoundJob:
    hold = read_hold(entry)
    details, enqueued_at = _details(job_id.decode(errors="replace"), "held", packed)
    details |= cast(JobDetails, {"run_at": hold.run_at, "waits_for_count": hold.open})
    enqueued_us = 0 if enqueued_at is None else round(enqueued_at * 1e6)
    return FoundJob(details, enqueued_at, enqueued_us=enqueued_us, size=len(packed))


def _done_job(job_id: bytes, packed: bytes) -> FoundJob:
    done = read_done(packed)
    details, _ = _details(job_id.decode(errors="replace"), "done", done.record)
    run_seconds = None if done.micros is None else done.micros / 1e6
    more = {"fence": done.fence, "ended_at": done.ended_ms / 1000, "run_seconds": run_seconds}
    return FoundJob(details | cast(JobDetails, more), done.ended_ms / 1000, size=len(packed))


def _dead_job(died_ms: int, member: bytes, packed: bytes | None) -> FoundJob | None:
    if packed is None:
        return None
    name = member.decode(errors="replace")
    record, error, attempts = read_dead(packed)
    details, _ = _details(name.rpartition("@")[0], "dead", record)
    known = error if isinstance(error, dict) else {"message": error}
    more = {
        "fence": fence_of(name),
        "died_at": died_ms / 1000,
        "error": known.get("name"),
        "message": known.get("message"),
        "attempts": len(attempts),
    }
    errors = (more["error"], more["message"])
    return FoundJob(details | cast(JobDetails, more), died_ms / 1000, errors, size=len(packed))
