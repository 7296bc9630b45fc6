"""Looking at a queue: counts, one job, pages of jobs. Nothing here changes anything or scans the keyspace.

Why a job is not running, in one sentence.

What became of a job that a queue does not have any more, as far as its journal tells.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import orjson

from forq.broker.claim import read_progress
from forq.broker.dead import DeadJobs, read_dead
from forq.broker.journal import Event, read_entry
from forq.broker.keys import pending_key, queue_base, suspects_key, swept_key
from forq.broker.link import READ_BYTES, Link
from forq.broker.record import Record, unpack, unpacked_fields
from forq.broker.registry import now_ms
from forq.broker.replies import NO_QUEUE, OK, error_for
from forq.broker.results import read_done, why_not_kept
from forq.broker.scripts import script
from forq.errors import InvalidData, UnknownJob, UsageError
from forq.progress import show_progress
from forq.settings import EXTERNAL, RELEASE_MODES, WORK
from forq.values import check_job_id, check_queue_name, show_duration, show_rate, show_time, shown

State = Literal["waiting", "scheduled", "active", "blocked", "retry", "done", "dead"]
STATES: tuple[State, ...] = get_args(State)
MAX_PAGE = 1000
_CURSOR = re.compile(r"(active|blocked|dead|done|scheduled|retry)/[0-9]{1,20}|waiting/([0-9]|10)\.[0-9]{1,18}")
# In the cursor of the waiting jobs: the suspects come after the last priority.
_SUSPECTS = 10


@dataclass(frozen=True, slots=True)
class Counts:
    """The words of `Queue.status`, `forqctl status`, its --json and the metrics: docs/design/states.md has them all."""

    # Jobs that are in this state now.
    waiting: int
    scheduled: int
    blocked: int
    retry: int
    active: int
    dead: int
    # Done jobs that are kept, and jobs for the fail handler.
    kept: int
    fail_jobs: int
    # Jobs that have ended so since the queue was made.
    done: int
    failed: int
    in_flight: int
    oldest_waiting_seconds: float | None
    paused: bool
    mode: str
    dropped: int
    journal: dict[str, int]
    # Where the journal was at the moment of these counts; the hash is '' if it has no entry.
    epoch: int
    journal_sequence: int
    journal_hash: str
    # Those who await an item of a queue of the release modes.
    awaiters: int
    # Until a scheduled job or a tick is due.
    next_due_seconds: float | None
    # None: it has none. Else its rate and max_active, how many jobs may begin now, how many workers wait for that.
    limits: dict[str, Any] | None
    # Of the scheduled jobs those whose time has come: they are made waiting in a moment.
    overdue: int


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs as {"id", "identifier", "state"}, and where the next page begins (None: there is none)."""

    jobs: list[dict[str, str]]
    next: str | None


class Inspector:
    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self._link = link
        self._base = queue_base(prefix, name)
        self._dead = DeadJobs(link, prefix, name)

    def counts(self) -> Counts:
        reply = self._link.run(script("counts"), self._base)
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return _read_counts(reply)

    def job(self, job_id: str) -> dict[str, Any]:
        """Everything known about one job: the live one of that id, else the one that was done or has died last."""
        check_job_id(job_id)
        packed, owner, due_ms, attempts, blocked, progress, done, epoch = self._link.pipeline(
            [
                ("HGET", f"{self._base}:jobs", job_id),
                ("HGET", f"{self._base}:active", job_id),
                ("ZSCORE", f"{self._base}:scheduled", job_id),
                ("HGET", f"{self._base}:attempts", job_id),
                ("HEXISTS", f"{self._base}:blocked", job_id),
                ("HGET", f"{self._base}:progress", job_id),
                ("HGET", f"{self._base}:done:jobs", job_id),
                ("HGET", f"{self._base}:options", "epoch"),
            ]
        )
        if epoch is None:
            raise error_for(self.name, [NO_QUEUE])
        if packed is not None:
            state = live_state(packed, owner, due_ms)
            tried = [orjson.loads(line) for line in (attempts or b"").splitlines()]
            times = {
                "run_at": None if due_ms is None else float(due_ms) / 1000,
                "attempts": tried,
                "blocked_behind": bool(blocked),
                "progress": read_progress(progress) if state == "active" else None,
            }
            return _job(job_id, state, packed) | times | _ownership(owner)
        try:
            return self._ended(job_id, done) | {"progress": None}
        except UnknownJob:
            why = why_not_kept(self._link, self._base, self.name)
            raise UnknownJob(
                f"queue {self.name!r} has no job {job_id!r}: it never had, or the job has ended and is not kept: {why}"
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
        """One page of jobs, in the order in which they will run; without a state: active, waiting, scheduled.

        Of those that are done the last comes first: what ends between two pages is left out, and nothing else.
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
        if stage == "scheduled":
            return self._scheduled_page(limit, int(position))
        if stage == "retry":
            return self._lane_page(limit, int(position))
        return self._waiting_page(limit, position, follow_with_scheduled=state is None)

    def _active_page(self, limit: int, position: str, *, follow_with_waiting: bool) -> Page:
        cursor, flat = self._link.call("HSCAN", f"{self._base}:active", position, "COUNT", limit)
        jobs = self._named([(job_id, "active") for job_id in flat[::2]])
        if cursor != b"0":
            return Page(jobs, f"active/{cursor.decode()}")
        if follow_with_waiting and len(jobs) < limit:
            waiting = self._waiting_page(limit - len(jobs), "0.0", follow_with_scheduled=True)
            return Page(jobs + waiting.jobs, waiting.next)
        return Page(jobs, "waiting/0.0" if follow_with_waiting else None)

    def _waiting_page(self, limit: int, position: str, *, follow_with_scheduled: bool) -> Page:
        priority, offset = (int(part) for part in position.split("."))
        jobs: list[dict[str, str]] = []
        places = [pending_key(self._base, each) for each in range(_SUSPECTS)]
        suspects = suspects_key(self._base)
        # All at once: far from the server, a round trip for each empty list would take longer than a status may.
        heads = [swept_key(place) for place in places]
        found = self._link.pipeline([*(("LLEN", each) for each in (*heads, *places)), ("ZCARD", suspects)])
        swept, lengths = [*found[:_SUSPECTS], 0], found[_SUSPECTS:]
        while priority <= _SUSPECTS and len(jobs) < limit:
            if offset >= swept[priority] + lengths[priority]:
                priority, offset = priority + 1, 0
                continue
            first = max(0, offset - swept[priority])
            if priority == _SUSPECTS:
                look: tuple[object, ...] = ("ZRANGE", suspects, first)
            elif offset < swept[priority]:
                first = offset
                look = ("LRANGE", heads[priority], first)
            else:
                look = ("LRANGE", places[priority], first)
            hints = self._link.call(*look, first + limit - len(jobs) - 1)
            # A job that was cancelled and enqueued again may have two hints.
            jobs += self._named([(job_id, "waiting") for job_id in dict.fromkeys(hints) if job_id])
            offset = offset + len(hints) if hints else swept[priority] + lengths[priority]
        if priority <= _SUSPECTS:
            return Page(jobs, f"waiting/{priority}.{offset}")
        if not follow_with_scheduled:
            return Page(jobs, None)
        scheduled = self._scheduled_page(max(1, limit - len(jobs)), 0)
        return Page(jobs + scheduled.jobs, scheduled.next)

    def _scheduled_page(self, limit: int, start: int) -> Page:
        ids = self._link.call("ZRANGE", f"{self._base}:scheduled", start, start + limit - 1)
        jobs = self._named([(job_id, "scheduled") for job_id in ids])
        return Page(jobs, f"scheduled/{start + limit}" if len(ids) == limit else None)

    def _lane_page(self, limit: int, start: int) -> Page:
        ids = self._link.call("LRANGE", f"{self._base}:retry", start, start + limit - 1)
        jobs = self._named([(job_id, "retry") for job_id in dict.fromkeys(ids)])
        return Page(jobs, f"retry/{start + limit}" if len(ids) == limit else None)

    def _blocked_page(self, limit: int, start: int) -> Page:
        """By id: there are no more of them than active jobs, each waits for another, and none is before the others."""
        ids = sorted(self._link.call("HKEYS", f"{self._base}:blocked"))[start : start + limit]
        entries = self._link.hash_values(f"{self._base}:blocked", ids)
        jobs = [
            # It has no record yet: its body comes after the line that says how it is to be made a job.
            _brief(job_id.decode(errors="replace"), "blocked", b"p0 0\n" + entry.partition(b"\n")[2])
            for job_id, entry in zip(ids, entries, strict=True)
            if entry is not None
        ]
        return Page(jobs, f"blocked/{start + limit}" if len(ids) == limit else None)

    def _done_page(self, limit: int, start: int) -> Page:
        ids = self._link.call("ZREVRANGE", f"{self._base}:done", start, start + limit - 1)
        packed = self._link.hash_values(f"{self._base}:done:jobs", ids)
        jobs = [
            _brief(job_id.decode(errors="replace"), "done", read_done(kept).record)
            for job_id, kept in zip(ids, packed, strict=True)
            if kept is not None
        ]
        return Page(jobs, f"done/{start + limit}" if len(ids) == limit else None)

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

    def _named(self, found: list[tuple[bytes, str]]) -> list[dict[str, str]]:
        """Drops ids that are in another state by now and hints that point nowhere."""
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


def _read_counts(reply: list[Any]) -> Counts:
    live, active, dead, done, failed, in_flight, oldest, now, paused = reply[1:10]
    return Counts(
        waiting=live - active - reply[15] - reply[17],
        scheduled=reply[15],
        blocked=reply[16],
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


def _read_limits(count: int, period_ms: int, max_active: int, may_begin: int, waiting: int) -> dict[str, Any] | None:
    if not count and not max_active:
        return None
    rate = show_rate(count, period_ms / 1000)
    return {"rate": rate, "max_active": max_active, "may_begin": may_begin, "limited_workers": waiting}


def _job(job_id: str, state: str, packed: bytes) -> dict[str, Any]:
    try:
        fields = unpacked_fields(packed)
    except InvalidData as exc:
        return {"id": job_id, "state": state, "error": str(exc)}
    enqueued_ms = fields.pop("enqueued_ms")
    fields["identifier"] = fields["identifier"] or job_id
    return {"id": job_id, "state": state, **fields, "enqueued_at": enqueued_ms / 1000}


def live_state(packed: bytes, owner: bytes | None, due_ms: bytes | None) -> str:
    """The state of a job, from its record, its entry in `active` and its score in `scheduled`."""
    if owner is not None or due_ms is not None:
        return "active" if owner is not None else "scheduled"
    # In the retry lane the fifth number of the record is greater than 0.
    numbers = packed.partition(b"\n")[0].split(b" ")[1:]
    return "retry" if len(numbers) > 4 and numbers[4] not in (b"0", b"-1") else "waiting"


def _ownership(owner: bytes | None) -> dict[str, Any]:
    if owner is None:
        return {}
    worker, fence, *mark = owner.decode().split(":")
    return {"worker": worker, "fence": int(fence), "removed": bool(mark)}


def _brief(job_id: str, state: str, packed: bytes) -> dict[str, str]:
    try:
        record: Record | None = unpack(packed)
    except InvalidData:
        record = None
    return {"id": job_id, "identifier": (record and record.identifier) or job_id, "state": state}


def _read_cursor(after: object, state: str | None) -> tuple[str, str]:
    if after is None:
        stage = state or "active"
        return stage, "0.0" if stage == "waiting" else "0"
    if not isinstance(after, str) or not _CURSOR.fullmatch(after):
        raise UsageError(f"cursor {shown(after)} is not allowed: use the one that the last page ended with")
    stage, _, position = after.partition("/")
    return stage, position


# How far down its list a job's place is looked for.
LOOKED_AT = 10_000


def why(
    link: Link,
    prefix: str,
    name: str,
    job_id: str,
    *,
    messages: bool = True,
    unresponsive: Mapping[str, int] | None = None,
) -> tuple[str, str]:
    """The job's state and the reason; raises UnknownJob if the queue has no job of that id.

    Without `messages` nothing is told that may quote the job's data: of an error only its name. `unresponsive`: workers
    that run nothing and whose process does not answer, with its pid.
    """
    inspector = Inspector(link, prefix, name)
    job = inspector.job(job_id)
    if not messages:
        _drop_messages(job)
    pid = (unresponsive or {}).get(str(job.get("worker")))
    if job["state"] == "active" and pid is not None:
        return job["state"], (
            f"worker {job['worker']} has claimed it and has not begun it: its process {pid} is unresponsive; "
            "the job goes back in line, uncounted, and the process is replaced"
        )
    return job["state"], _reason(link, prefix, inspector, job)


def _reason(link: Link, prefix: str, inspector: Inspector, job: dict[str, Any]) -> str:
    name, job_id, state = inspector.name, job["id"], job["state"]
    counts = inspector.counts()
    if state == "active" and counts.mode in RELEASE_MODES:
        return f"it was handed to awaiter {job['worker']}, who has not acknowledged it yet"
    if state == "active" and counts.mode == EXTERNAL:
        return _with_worker(link, queue_base(prefix, name), job)
    if state == "active":
        marked = ", and will be forgotten when it ends" if job["removed"] else ""
        far = job["progress"] and show_progress(job["progress"]["fraction"], job["progress"]["text"])
        return f"it is running now (worker {job['worker']}){f': {far}' if far else ''}{marked}"
    if state == "done":
        return f"it is done since {show_time(job['ended_at'])}"
    if state == "dead":
        return f"it failed for good: {_error(job['error'])}; `forqctl dead retry {name} {job_id}` runs it again"
    if counts.paused:
        return "its queue is paused; `forqctl resume` goes on"
    if state == "scheduled":
        return f"it waits for its time, {show_time(job['run_at'])}{_last_attempt(job)}"
    if state == "retry":
        return (
            f"it has used up its retries and gets another chance when nothing else waits ({counts.waiting} jobs wait)"
        )
    return _waiting(link, prefix, name, job, counts)


def _waiting(link: Link, prefix: str, name: str, job: dict[str, Any], counts: Counts) -> str:
    base = queue_base(prefix, name)
    if counts.mode != EXTERNAL and not link.call("ZCOUNT", f"{base}:processors", now_ms(link, base), "+inf"):
        return f"no supervisor serves its queue; `forqctl status {name}` says what to do"
    if job.get("suspect"):
        return _suspect(link, base, job)
    priority = job["priority"]
    own = pending_key(base, priority)
    first = [pending_key(base, before) for before in range(priority)]
    lists = [("LLEN", each) for place in first for each in (place, swept_key(place))]
    places = [("LPOS", each, job["id"], "MAXLEN", LOOKED_AT) for each in (swept_key(own), own)]
    *lengths, swept, ahead, behind = link.pipeline([*lists, ("LLEN", swept_key(own)), *places])
    if ahead is None and behind is not None:
        ahead = swept + behind
    before = sum(lengths) + (LOOKED_AT if ahead is None else ahead)
    at_least = "" if ahead is not None else "at least "
    if counts.mode == EXTERNAL:
        idle = "1 worker is idle" if counts.awaiters == 1 else f"{counts.awaiters} workers are idle"
        return f"it waits for a worker: {at_least}{before} come before it, {idle}"
    if counts.mode in RELEASE_MODES:
        others = "1 awaits an item" if counts.awaiters == 1 else f"{counts.awaiters} await an item"
        return f"it waits to be released: {at_least}{before} come before it, {others} of its queue"
    held_up = _held_up(counts)
    if before == 0:
        return f"it is the next one; its queue runs {counts.active} jobs now{held_up}"
    jobs = "1 job comes" if before == 1 else f"{before} jobs come"
    return f"it waits in line: {at_least}{jobs} before it, {counts.active} run now{held_up}"


def _held_up(counts: Counts) -> str:
    if counts.limits is None or counts.limits["may_begin"] > 0:
        return ""
    if 0 < counts.limits["max_active"] <= counts.active:
        return f", and no more than max_active = {counts.limits['max_active']} may"
    return f", and no more may begin now (rate = {counts.limits['rate']})"


def _with_worker(link: Link, base: str, job: dict[str, Any]) -> str:
    marked = ", and will be forgotten when it ends" if job["removed"] else ""
    if link.call("ZSCORE", f"{base}:accepted", job["id"]) is None:
        return f"it was assigned to worker {job['worker']}, which has not accepted it yet{marked}"
    return f"worker {job['worker']} runs it now{marked}"


def _suspect(link: Link, base: str, job: dict[str, Any]) -> str:
    ahead = link.call("ZRANK", suspects_key(base), job["id"])
    others = {0: "it is the next one", 1: "1 such job comes before it", None: "it is about to begin"}
    before = others.get(ahead, f"{ahead} such jobs come before it")
    return (
        "its process died while several jobs ran there, and nobody knows which of them did it: "
        f"it waits to run alone, in a process of its own; {before}"
    )


def _last_attempt(job: dict[str, Any]) -> str:
    if not job["attempts"]:
        return ""
    last = job["attempts"][-1]
    return f", after attempt {job['retry_count']} {last['outcome']}: {_error(last['error']) or last['cause']}"


def _drop_messages(job: dict[str, Any]) -> None:
    for told in (job, *(attempt for attempt in job.get("attempts", ()) if isinstance(attempt, dict))):
        if isinstance(error := told.get("error"), dict):
            told["error"] = {"name": error.get("name")}


def _error(error: Any) -> str:
    if not isinstance(error, dict):
        return ""
    return f"{error.get('name')}: {error['message']}" if "message" in error else str(error.get("name"))


# How much of the journal is read, the newest first: at most about 0.3 s of the caller, 2 ms of the server per call.
LOOKED_AT_BYTES, LOOKED_AT_ENTRIES = 16 << 20, 20_000
FIRST_ENTRIES, MOST_ENTRIES = 16, 1000

_FORGOTTEN = ("discarded", "forgotten")


@dataclass(frozen=True, slots=True)
class JournalTrace:
    """`end`: the last event about the job; `later`: what became of it when it was dead. `whole`: whether all was seen
    that ever happened in the queue, else what happened since `since_us`."""

    end: Event | None
    later: Event | None
    whole: bool
    since_us: int | None


def unknown_job(link: Link, prefix: str, name: str, job_id: str) -> UnknownJob:
    """The error about a job that the queue does not have: with what the journal knows of it."""
    base = queue_base(prefix, check_queue_name(name))
    options = link.call("HMGET", f"{base}:options", "epoch", "mode", "journal", "keep_done_ms", "done_max")
    if options[0] is None:
        return error_for(name, [NO_QUEUE])  # type: ignore[return-value]
    epoch, mode, journal, keep_ms, most = ((option or b"").decode() for option in options)
    trace = last_trace(link, base, check_job_id(job_id), int(epoch), journal_on=journal == "1")
    advice = _advice(name, int(keep_ms or 0), most) if mode in (WORK, EXTERNAL) else ""
    if trace.end is None and trace.later is None:
        return UnknownJob(f"queue {name!r} {_not_found(trace, job_id, advice, name, journal_on=journal == '1')}")
    return UnknownJob(f"queue {name!r} has no job {job_id!r} any more: {_what_became(trace, advice)}")


def last_trace(link: Link, base: str, job_id: str, epoch: int, *, journal_on: bool) -> JournalTrace:
    """Looks through the journal, from its end back."""
    needle = job_id.encode()
    later: Event | None = None
    expected, since_us = int(link.call("HGET", f"{base}:counts", "journal_sequence") or 0), None
    first, gaps, before, count, looked_at, seen = None, False, "+", FIRST_ENTRIES, 0, 0
    while looked_at < LOOKED_AT_BYTES and seen < LOOKED_AT_ENTRIES:
        entries = link.call("XREVRANGE", f"{base}:events", before, "-", "COUNT", count)
        read = 0
        for _, flat in entries:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            if int(fields.get(b"q", 0)) != epoch:
                return JournalTrace(None, later, first == 1 and not gaps and journal_on, since_us)
            number, since_us = int(fields[b"s"]), int(fields[b"t"])
            # Others go on writing: the newest may be newer than what was counted before.
            gaps = gaps or (number < expected if first is None else number != first - 1)
            first = number
            text = fields[b"e"]
            read += len(text)
            if needle in text:
                for event in reversed(_events_of(fields, job_id)):
                    if event.verb in _FORGOTTEN:
                        later = later or event
                    else:
                        return JournalTrace(event, _of_the_same(later, event), False, since_us)
        if len(entries) < count:
            return JournalTrace(None, later, first == 1 and not gaps and journal_on, since_us)
        before, looked_at, seen = f"({entries[-1][0].decode()}", looked_at + read, seen + count
        count = max(1, min(MOST_ENTRIES, 4 * count, count * (READ_BYTES // 4) // max(read, 1)))
    return JournalTrace(None, later, False, since_us)


def _events_of(fields: dict[bytes, bytes], job_id: str) -> list[Event]:
    try:
        return [event for event in read_entry(fields) if event.job == job_id]
    except InvalidData:
        return []


def _of_the_same(later: Event | None, end: Event) -> Event | None:
    """An earlier job of the id may have been forgotten after the end of the last one."""
    return later if later is not None and later.fence == end.fence else None


def _not_found(trace: JournalTrace, job_id: str, advice: str, name: str, *, journal_on: bool) -> str:
    if trace.whole:
        return f"has never had a job {job_id!r}; `forqctl jobs {name}` lists those that it has"
    if not journal_on:
        known = "its journal is off"
    elif trace.since_us is None:
        known = "its journal is empty"
    else:
        known = f"its journal, as far as it was read (back to {show_time(trace.since_us / 1e6)}), does not mention it"
    return f"has no job {job_id!r}: it never had, or the job has ended{advice}; {known}"


def _what_became(trace: JournalTrace, advice: str) -> str:
    end, later = trace.end, trace.later
    forgotten = later and _forgotten(later)
    if end is None:
        return f"it failed for good, and {forgotten}"
    when = show_time(end.time_us / 1e6)
    match end.verb:
        case "done":
            return f"it was done at {when}{_took(end)}{advice}"
        case "released":
            return f"it was released at {when}"
        case "cancelled" if end.fence:
            return f"it was removed or killed while it ran, and ended at {when}"
        case "cancelled":
            return f"it was cancelled at {when}"
        case "dead" | "failing":
            return f"it failed for good at {when}, and {forgotten or 'is not kept any more (dead_ttl, dead_max)'}"
        case _:
            return f"the last that its journal says of it is {end.verb!r}, at {when}, and there is no record of it now"


def _forgotten(later: Event) -> str:
    how = "was discarded" if later.verb == "discarded" else "is not kept any more (dead_ttl, dead_max)"
    return f"{how} since {show_time(later.time_us / 1e6)}"


def _took(end: Event) -> str:
    if end.micros is None:
        return ""
    milliseconds = end.micros / 1000
    return f" (it ran for {f'{milliseconds:.1f} ms' if milliseconds < 1000 else f'{milliseconds / 1000:.1f} s'})"


def _advice(name: str, keep_ms: int, most: Any) -> str:
    if keep_ms:
        return f" and is not kept any more (keep_done = {show_duration(keep_ms / 1000)}, done_max = {most})"
    return f" and is not kept (`forqctl set {name} keep_done=1h` keeps jobs that end from then on, with results)"
