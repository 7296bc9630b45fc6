"""Inspecting a queue: counts, one job, pages of jobs. Read-only, and never scans the keyspace."""

import re
from dataclasses import dataclass
from typing import Any, get_args

import orjson

from forq.api_types import JobBrief, JournalCounts, LimitCounts, Mode, State
from forq.broker.claim import read_progress
from forq.broker.dead import DeadJobs, read_dead
from forq.broker.held import HeldJobs, scan_held
from forq.broker.keys import pending_key, queue_base, suspects_key, swept_key
from forq.broker.link import Link
from forq.broker.record import Record, live_state, unpack, unpacked_fields
from forq.broker.results import read_done, why_not_kept
from forq.broker.scripts import NO_QUEUE, OK, error_for, script
from forq.errors import InvalidData, UnknownJob, UsageError
from forq.values import check_job_id, check_queue_name, show_rate, shown

STATES: tuple[State, ...] = get_args(State)
MAX_PAGE = 1000
# Queues per round trip of find_job.
FIND_QUEUES = 100
_CURSOR = re.compile(
    r"(active|blocked|dead|done|scheduled|retry)/[0-9]{1,20}|waiting/([0-9]|10)\.[0-9]{1,18}|held/[0-9]{1,20}\.[0-9]{1,9}"
)
# The priority of suspects in cursors: they come after the last priority.
_SUSPECTS = 10


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of `Queue.status`, `forqctl status` and the metrics; docs/design/states.md explains them."""

    # Jobs in this state now.
    waiting: int
    scheduled: int
    blocked: int
    held: int
    retry: int
    active: int
    dead: int
    # Done jobs that are kept, and fail jobs.
    kept: int
    fail_jobs: int
    # Jobs that ended this way since the queue was created.
    done: int
    failed: int
    in_flight: int
    oldest_waiting_seconds: float | None
    paused: bool
    mode: Mode
    dropped: int
    journal: JournalCounts
    # The end of the journal at the moment of these counts; the hash is '' if it is empty.
    epoch: int
    journal_sequence: int
    journal_hash: str
    # Awaiters of a queue of the release modes; idle workers of an external one.
    awaiters: int
    # Until a scheduled job or a tick is due.
    next_due_seconds: float | None
    # None without limits. Else rate, max_active, the jobs that may start now, and the workers waiting for that.
    limits: LimitCounts | None
    # Scheduled jobs that are due and not promoted yet.
    overdue: int


@dataclass(frozen=True, slots=True)
class Page:
    """Jobs as {"id", "identifier", "state"}, and the cursor of the next page (None: there is none)."""

    jobs: list[JobBrief]
    next: str | None


class Inspector:
    """Reads the state of one queue."""

    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self._link = link
        self._base = queue_base(prefix, name)
        self._dead = DeadJobs(link, prefix, name)
        self._held = HeldJobs(link, self._base, self.name)

    def counts(self) -> Counts:
        reply = self._link.run(script("counts"), self._base)
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return _read_counts(reply)

    def job(self, job_id: str) -> dict[str, Any]:
        """All fields of one job: the live one with that id, else the one that ended last."""
        check_job_id(job_id)
        hold, held, packed, owner, due_ms, attempts, blocked, progress, done, epoch, groups = self._link.pipeline(
            [
                # Before `jobs`: a job that becomes ready meanwhile is found there.
                ("HGET", f"{self._base}:held", job_id),
                ("HGET", f"{self._base}:held:jobs", job_id),
                ("HGET", f"{self._base}:jobs", job_id),
                ("HGET", f"{self._base}:active", job_id),
                ("ZSCORE", f"{self._base}:scheduled", job_id),
                ("HGET", f"{self._base}:attempts", job_id),
                ("HEXISTS", f"{self._base}:blocked", job_id),
                ("HGET", f"{self._base}:progress", job_id),
                ("HGET", f"{self._base}:done:jobs", job_id),
                ("HGET", f"{self._base}:options", "epoch"),
                ("HGET", f"{self._base}:sources", job_id),
            ]
        )
        if epoch is None:
            raise error_for(self.name, [NO_QUEUE])
        if packed is not None:
            state = live_state(packed, owner, due_ms)
            details = {
                "run_at": None if due_ms is None else float(due_ms) / 1000,
                "attempts": [orjson.loads(line) for line in (attempts or b"").splitlines()],
                "blocked_behind": bool(blocked),
                "progress": read_progress(progress) if state == "active" else None,
            }
            dependants = self._held.dependants(job_id, groups) | self._held.membership(groups)
            return _job(job_id, state, packed) | details | ownership(owner) | dependants
        if hold is not None and held is not None:
            details = {"attempts": [], "blocked_behind": False, "progress": None}
            more = self._held.details(job_id, hold) | self._held.dependants(job_id, groups)
            return _job(job_id, "held", held) | details | more | self._held.membership(groups)
        try:
            return self._ended(job_id, done) | {"progress": None}
        except UnknownJob:
            why = why_not_kept(self._link, self._base, self.name)
            raise UnknownJob(
                f"queue {self.name!r} has no job {job_id!r}: it never existed, or has ended and is not kept: {why}"
            ) from None

    def _ended(self, job_id: str, packed: bytes | None) -> dict[str, Any]:
        if packed is None:
            return self._dead.show(job_id)
        done = read_done(packed)
        try:
            dead = self._dead.show(job_id)
        except UnknownJob:
            return done.show(job_id)
        return dead if dead["fence"] > done.fence else done.show(job_id)

    def jobs(self, state: str | None = None, limit: int = 100, after: str | None = None) -> Page:
        """One page of jobs in the order in which they will run. Without a state: active, waiting, scheduled, held.

        Done jobs are listed newest first, so only jobs that end between two pages are missing.
        """
        if state is not None and state not in STATES:
            raise UsageError(f"state {shown(state)} is not allowed: {', '.join(STATES)}")
        limit = max(1, min(limit, MAX_PAGE))
        stage, position = _read_cursor(after, state)
        if stage == "active":
            return self._active_page(limit, position, follow_with_waiting=state is None)
        if stage == "done":
            return self._done_page(limit, int(position))
        if stage == "dead":
            return self._dead_page(limit, position)
        if stage == "blocked":
            return self._blocked_page(limit, int(position))
        if stage == "held":
            return self._held_page(limit, position)
        if stage == "scheduled":
            return self._scheduled_page(limit, int(position), follow_with_held=state is None)
        if stage == "retry":
            return self._retry_lane_page(limit, int(position))
        return self._waiting_page(limit, position, follow_with_scheduled=state is None)

    def _active_page(self, limit: int, position: str, *, follow_with_waiting: bool) -> Page:
        cursor, flat = self._link.call("HSCAN", f"{self._base}:active", position, "COUNT", limit)
        jobs = self._brief_in_state([(job_id, "active") for job_id in flat[::2]])
        if cursor != b"0":
            return Page(jobs, f"active/{cursor.decode()}")
        if follow_with_waiting and len(jobs) < limit:
            waiting = self._waiting_page(limit - len(jobs), "0.0", follow_with_scheduled=True)
            return Page(jobs + waiting.jobs, waiting.next)
        return Page(jobs, "waiting/0.0" if follow_with_waiting else None)

    def _waiting_page(self, limit: int, position: str, *, follow_with_scheduled: bool) -> Page:
        priority, offset = (int(part) for part in position.split("."))
        jobs: list[JobBrief] = []
        lists = [pending_key(self._base, each) for each in range(_SUSPECTS)]
        suspects = suspects_key(self._base)
        # One round trip: with a distant server, one for each empty list would take too long.
        heads = [swept_key(key) for key in lists]
        found = self._link.pipeline([*(("LLEN", each) for each in (*heads, *lists)), ("ZCARD", suspects)])
        swept, lengths = [*found[:_SUSPECTS], 0], found[_SUSPECTS:]
        while priority <= _SUSPECTS and len(jobs) < limit:
            if offset >= swept[priority] + lengths[priority]:
                priority, offset = priority + 1, 0
                continue
            first = max(0, offset - swept[priority])
            if priority == _SUSPECTS:
                command: tuple[object, ...] = ("ZRANGE", suspects, first)
            elif offset < swept[priority]:
                first = offset
                command = ("LRANGE", heads[priority], first)
            else:
                command = ("LRANGE", lists[priority], first)
            hints = self._link.call(*command, first + limit - len(jobs) - 1)
            # A job that was cancelled and enqueued again may have two hints.
            jobs += self._brief_in_state([(job_id, "waiting") for job_id in dict.fromkeys(hints) if job_id])
            offset = offset + len(hints) if hints else swept[priority] + lengths[priority]
        if priority <= _SUSPECTS:
            return Page(jobs, f"waiting/{priority}.{offset}")
        if not follow_with_scheduled:
            return Page(jobs, None)
        scheduled = self._scheduled_page(max(1, limit - len(jobs)), 0, follow_with_held=True)
        return Page(jobs + scheduled.jobs, scheduled.next)

    def _scheduled_page(self, limit: int, start: int, *, follow_with_held: bool) -> Page:
        ids = self._link.call("ZRANGE", f"{self._base}:scheduled", start, start + limit - 1)
        jobs = self._brief_in_state([(job_id, "scheduled") for job_id in ids])
        if len(ids) == limit:
            return Page(jobs, f"scheduled/{start + limit}")
        if not follow_with_held:
            return Page(jobs, None)
        held = self._held_page(limit - len(ids), "0.0")
        return Page(jobs + held.jobs, held.next)

    def _held_page(self, limit: int, position: str) -> Page:
        ids, following = scan_held(self._link, self._base, position, limit)
        while not ids and following is not None:
            ids, following = scan_held(self._link, self._base, following, limit)
        packed = self._link.hash_values(f"{self._base}:held:jobs", ids)
        jobs = [
            _brief(job_id.decode(errors="replace"), "held", record)
            for job_id, record in zip(ids, packed, strict=True)
            if record is not None
        ]
        return Page(jobs, None if following is None else f"held/{following}")

    def _retry_lane_page(self, limit: int, start: int) -> Page:
        ids = self._link.call("LRANGE", f"{self._base}:retry", start, start + limit - 1)
        jobs = self._brief_in_state([(job_id, "retry") for job_id in dict.fromkeys(ids)])
        return Page(jobs, f"retry/{start + limit}" if len(ids) == limit else None)

    def _blocked_page(self, limit: int, start: int) -> Page:
        """Sorted by id: blocked jobs have no order, and there are no more of them than active jobs."""
        ids = sorted(self._link.call("HKEYS", f"{self._base}:blocked"))[start : start + limit]
        entries = self._link.hash_values(f"{self._base}:blocked", ids)
        jobs = [
            # A blocked job has no record yet: its body follows the line with its enqueue options.
            _brief(job_id.decode(errors="replace"), "blocked", b"p0 0\n" + entry.partition(b"\n")[2])
            for job_id, entry in zip(ids, entries, strict=True)
            if entry is not None
        ]
        return Page(jobs, f"blocked/{start + limit}" if len(ids) == limit else None)

    def _done_page(self, limit: int, start: int) -> Page:
        ids = self._done_ids(limit, start)
        packed = self._link.hash_values(f"{self._base}:done:jobs", ids)
        jobs = [
            _brief(job_id.decode(errors="replace"), "done", read_done(kept).record)
            for job_id, kept in zip(ids, packed, strict=True)
            if kept is not None
        ]
        return Page(jobs, f"done/{start + limit}" if len(ids) == limit else None)

    def _done_ids(self, limit: int, start: int) -> list[bytes]:
        """First the jobs with a keep_done of their own: those that are kept longest, then the others, newest first."""
        own = f"{self._base}:done:own"
        ids, count = self._link.pipeline([("ZREVRANGE", own, start, start + limit - 1), ("ZCARD", own)])
        if len(ids) < limit:
            first = max(0, start - count)
            ids += self._link.call("ZREVRANGE", f"{self._base}:done", first, first + limit - len(ids) - 1)
        return list(ids)

    def _dead_page(self, limit: int, position: str) -> Page:
        start = int(position)
        members = self._link.call("ZRANGE", f"{self._base}:dead", start, start + limit - 1)
        packed = self._link.hash_values(f"{self._base}:dead:jobs", members)
        jobs = [
            _brief(member.decode(errors="replace").rpartition("@")[0], "dead", read_dead(record)[0])
            for member, record in zip(members, packed, strict=True)
            if record is not None
        ]
        return Page(jobs, f"dead/{start + limit}" if len(members) == limit else None)

    def _brief_in_state(self, found: list[tuple[bytes, State]]) -> list[JobBrief]:
        """Drops ids that are in another state by now, and hints without a record."""
        if not found:
            return []
        ids = [job_id for job_id, _ in found]
        owners, due = self._link.pipeline(
            [("HMGET", f"{self._base}:active", *ids), ("ZMSCORE", f"{self._base}:scheduled", *ids)]
        )
        packed = self._link.hash_values(f"{self._base}:jobs", ids)
        return [
            _brief(job_id.decode(errors="replace"), expected, record)
            for (job_id, expected), record, owner, due_ms in zip(found, packed, owners, due, strict=True)
            if record is not None and live_state(record, owner, due_ms) == expected
        ]


def counts_of(link: Link, prefix: str, names: list[str]) -> dict[str, Counts | None]:
    """The counts of many queues in one round trip; None for one that is gone."""
    if not names:
        return {}
    replies = link.run_each(script("counts"), [queue_base(prefix, name) for name in names])
    return {name: _read_counts(reply) if reply[0] == OK else None for name, reply in zip(names, replies, strict=True)}


def find_job(link: Link, prefix: str, names: list[str], job_id: str) -> list[tuple[str, str]]:
    """The queues that have a job of this id, live or kept as done, with its state. Direct lookups, no scan."""
    check_job_id(job_id)
    bases = [queue_base(prefix, name) for name in names]
    commands: list[tuple[Any, ...]] = []
    for base in bases:
        commands += [
            # Before `jobs`: a job that becomes ready meanwhile is found there.
            ("HEXISTS", f"{base}:held", job_id),
            ("HGET", f"{base}:jobs", job_id),
            ("HGET", f"{base}:active", job_id),
            ("ZSCORE", f"{base}:scheduled", job_id),
            ("HEXISTS", f"{base}:done:jobs", job_id),
        ]
    width = len(commands) // max(1, len(bases))
    found: list[tuple[str, str]] = []
    for at in range(0, len(commands), width * FIND_QUEUES):
        replies = link.pipeline(commands[at : at + width * FIND_QUEUES])
        for number in range(len(replies) // width):
            held, packed, owner, due_ms, done = replies[width * number : width * (number + 1)]
            name = names[at // width + number]
            if packed is not None:
                found.append((name, live_state(packed, owner, due_ms)))
            elif held:
                found.append((name, "held"))
            elif done:
                found.append((name, "done"))
    return found


def _read_counts(reply: list[Any]) -> Counts:
    live, active, dead, done, failed, in_flight, oldest, now, paused = reply[1:10]
    return Counts(
        waiting=live - active - reply[15] - reply[17],
        scheduled=reply[15],
        blocked=reply[16],
        held=reply[32],
        retry=reply[17],
        active=active,
        dead=dead,
        kept=reply[24],
        fail_jobs=reply[18],
        done=done,
        failed=failed,
        in_flight=in_flight,
        oldest_waiting_seconds=(now - oldest) / 1000 if oldest else None,
        paused=bool(paused),
        mode=reply[10].decode(),
        dropped=reply[11],
        journal={"entries": reply[12], "bytes": reply[13], "trimmed": reply[14], "lost": reply[19]},
        epoch=reply[20],
        journal_sequence=reply[21],
        journal_hash=reply[22].decode(),
        awaiters=reply[23],
        next_due_seconds=reply[25] / 1000 if reply[25] >= 0 else None,
        limits=_read_limits(*reply[26:31]),
        overdue=reply[31],
    )


def _read_limits(count: int, period_ms: int, max_active: int, may_begin: int, waiting: int) -> LimitCounts | None:
    if not count and not max_active:
        return None
    rate = show_rate(count, period_ms / 1000)
    return {"rate": rate, "max_active": max_active, "may_begin": may_begin, "limited_workers": waiting}


def _job(job_id: str, state: str, packed: bytes) -> dict[str, Any]:
    try:
        fields = unpacked_fields(packed, expiry_begun=state != "held")
    except InvalidData as exc:
        return {"id": job_id, "state": state, "error": str(exc)}
    enqueued_us = fields.pop("enqueued_us")
    fields["identifier"] = fields["identifier"] or job_id
    return {"id": job_id, "state": state, **fields, "enqueued_at": enqueued_us / 1e6}


def ownership(owner: bytes | None) -> dict[str, Any]:
    if owner is None:
        return {}
    worker, fence, *mark = owner.decode().split(":")
    return {"worker": worker, "fence": int(fence), "removed": bool(mark)}


def _brief(job_id: str, state: State, packed: bytes) -> JobBrief:
    try:
        record: Record | None = unpack(packed)
    except InvalidData:
        record = None
    return {"id": job_id, "identifier": (record and record.identifier) or job_id, "state": state}


def _read_cursor(after: object, state: str | None) -> tuple[str, str]:
    if after is None:
        stage = state or "active"
        return stage, "0.0" if stage in ("waiting", "held") else "0"
    if not isinstance(after, str) or not _CURSOR.fullmatch(after):
        raise UsageError(f"cursor {shown(after)} is not allowed: use `next` of the previous page")
    stage, _, position = after.partition("/")
    return stage, position
