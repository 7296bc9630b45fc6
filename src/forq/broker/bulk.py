"""Bulk requests: cancel jobs, and revive or discard dead ones, by a list of ids or by a filter.

A request by filter scans a limited number of jobs and returns a cursor. Its walks skip no job although the set shrinks
under them: live jobs are scanned with HSCAN and ZSCAN, dead ones by their time of death. Jobs that are enqueued
or die after the first request are left out. A request may be repeated: what it has done already is gone.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from forq.api_types import State
from forq.broker.dead import DeadChanged
from forq.broker.filters import FoundJob, JobFilter
from forq.broker.keys import queue_base
from forq.broker.link import READ_BYTES, Link
from forq.broker.scripts import OK, error_for, script
from forq.broker.search import CHUNK, Allowance, JobSearch, chunked
from forq.errors import ForqError, QueueFull, UsageError
from forq.values import check_job_id, check_queue_name, shown

MAX_IDS = 1000
CANCELLED_STATES = ("waiting", "scheduled", "retry", "held")
# Calls of cancel that are sent at once.
_CANCELS = 100
# NOW_MS of the first request '/' position.
_LIVE_CURSOR = re.compile(r"([0-9]{1,16})/([0-9]{1,20})")
_DEAD_CURSOR = re.compile(r"([0-9]{1,16})/([0-9]{1,16})/([!-~]{1,160})")


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The number of cancelled jobs, and the ids of the others: they run, have ended, or are other jobs by now."""

    cancelled: int
    left: list[str]


@dataclass(frozen=True, slots=True)
class CancelledPart(Cancelled):
    """The same, of one request by filter. `next`: the cursor of the next one (None: finished)."""

    scanned: int
    next: str | None


@dataclass(frozen=True, slots=True)
class DeadPart:
    """The result of one request by filter: the number of jobs changed, and the messages of the others by id@fence."""

    done: int
    refused: dict[str, str]
    scanned: int
    next: str | None


class BulkChanges:
    """Changes many jobs of one queue."""

    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self._link = link
        self._base = queue_base(prefix, name)
        self._search = JobSearch(link, prefix, name)
        self._dead = self._search.dead

    def cancel_ids(self, ids: object) -> Cancelled:
        return self._cancel([(check_job_id(job_id), "") for job_id in check_ids(ids)])

    def cancel_matching(self, state: object, wanted: JobFilter, after: object = None) -> CancelledPart:
        """Cancels the matching jobs in this state among the next ones. Only those enqueued before the first request."""
        if state not in CANCELLED_STATES:
            raise UsageError(f"state {shown(state)} is not allowed here: {', '.join(CANCELLED_STATES)}")
        of_state = cast(State, state)
        if wanted.id is not None:
            found = self._search.by_id(of_state, wanted)
            done = self._cancel([_meant(job) for job in found])
            return CancelledPart(done.cancelled, done.left, len(found), None)
        started_ms, cursor = self._read_live_cursor(after)
        allowance, cancelled, left = Allowance(), 0, list[str]()
        while True:
            cursor, jobs = self._scan(of_state, cursor, wanted)
            matching = []
            for job in jobs:
                allowance.count(0 if job is None else job.size)
                if job is not None and job.enqueued_us < (started_ms + 1) * 1000 and wanted.matches(job):
                    matching.append(_meant(job))
            done = self._cancel(matching)
            cancelled, left = cancelled + done.cancelled, left + done.left
            if cursor == "0" or allowance.is_spent:
                follows = None if cursor == "0" else f"{started_ms}/{cursor}"
                return CancelledPart(cancelled, left, allowance.scanned, follows)

    def _scan(self, state: State, cursor: str, wanted: JobFilter) -> tuple[str, Iterator[FoundJob | None]]:
        """One step through all jobs that may be in this state. Jobs that are there all the time are not skipped."""
        with_errors = wanted.error is not None
        if state == "scheduled":
            found, flat = self._link.call("ZSCAN", f"{self._base}:scheduled", cursor, "COUNT", CHUNK)
            return found.decode(), self._search.live_jobs(flat[::2], state, with_errors=with_errors)
        # It returns whole records, and none is longer than this. A queue of an earlier release may lack the option.
        largest = int(self._link.call("HGET", f"{self._base}:options", "largest_record") or 0) or READ_BYTES
        count = max(1, min(CHUNK, READ_BYTES // largest))
        name = "held:jobs" if state == "held" else "jobs"
        found, flat = self._link.call("HSCAN", f"{self._base}:{name}", cursor, "COUNT", count)
        if state == "held":
            return found.decode(), self._search.held_jobs(flat[::2], flat[1::2])
        return found.decode(), self._search.live_jobs(flat[::2], state, flat[1::2], with_errors=with_errors)

    def _read_live_cursor(self, after: object) -> tuple[int, str]:
        if after is None:
            return self._dead.now_ms(), "0"
        cursor = _LIVE_CURSOR.fullmatch(after) if isinstance(after, str) else None
        if cursor is None:
            raise UsageError(f"cursor {shown(after)} is not allowed: use `next` of the previous answer")
        return int(cursor[1]), cursor[2]

    def _cancel(self, jobs: Sequence[tuple[str, str]]) -> Cancelled:
        """`jobs`: each id, and which job of it is meant (lua/records.lua, is_meant)."""
        cancelled, left = 0, []
        for at in range(0, len(jobs), _CANCELS):
            part = jobs[at : at + _CANCELS]
            replies = self._link.run_batch(script("cancel"), [(self._base, job_id, 0, meant) for job_id, meant in part])
            for (job_id, _), reply in zip(part, replies, strict=True):
                if isinstance(reply, ForqError):
                    raise type(reply)(f"{reply}; cancelled before: {cancelled}")
                if reply[0] != OK:
                    raise error_for(self.name, reply)
                cancelled += reply[1] == 1
                if reply[1] != 1:
                    left.append(job_id)
        return Cancelled(cancelled, left)

    def retry_matching(self, wanted: JobFilter, after: object = None) -> DeadPart:
        """Revives the matching jobs among the next ones, oldest first. A full queue ends the request."""
        return self._change_dead(self._dead.retry_many, wanted, after)

    def discard_matching(self, wanted: JobFilter, after: object = None) -> DeadPart:
        return self._change_dead(self._dead.discard_many, wanted, after)

    def _change_dead(self, change: Callable[[list[str]], DeadChanged], wanted: JobFilter, after: object) -> DeadPart:
        if wanted.id is not None:
            found = [f"{job.details['id']}@{job.details['fence']}" for job in self._search.by_id("dead", wanted)]
            changed = change(found)
            return DeadPart(changed.done, messages_of(changed), len(found), None)
        started_ms, position = self._read_dead_cursor(after)
        first_ms = None if wanted.since is None else wanted.since * 1000
        last_ms = started_ms if wanted.until is None else min(started_ms, wanted.until * 1000)
        allowance, done, refused = Allowance(), 0, dict[str, str]()
        for part in chunked(self._dead.walk(position, first_ms=first_ms, last_ms=last_ms), CHUNK):
            matching = []
            before = position
            for entry, job in zip(part, self._search.read_dead(part), strict=True):
                allowance.count(0 if job is None else job.size)
                position = entry
                if job is not None and wanted.matches(job):
                    matching.append(entry[1].decode(errors="replace"))
                if allowance.is_spent:
                    break
            changed = change(matching)
            done += changed.done
            full = next((error for error in changed.refused.values() if isinstance(error, QueueFull)), None)
            if full is not None and not done:
                raise full
            refused |= {name: str(error) for name, error in changed.refused.items() if not isinstance(error, QueueFull)}
            if full is not None or allowance.is_spent:
                # Those that found the queue full are tried again.
                follows = _dead_cursor(started_ms, before if full is not None else position)
                return DeadPart(done, refused, allowance.scanned, follows)
        return DeadPart(done, refused, allowance.scanned, None)

    def _read_dead_cursor(self, after: object) -> tuple[int, tuple[int, bytes] | None]:
        if after is None:
            return self._dead.now_ms(), None
        cursor = _DEAD_CURSOR.fullmatch(after) if isinstance(after, str) else None
        if cursor is None:
            raise UsageError(f"cursor {shown(after)} is not allowed: use `next` of the previous answer")
        return int(cursor[1]), (int(cursor[2]), cursor[3].encode())


def _dead_cursor(started_ms: int, position: tuple[int, bytes] | None) -> str:
    # No job died in 1970: None is a position before the first one.
    died_ms, member = position or (0, b"!")
    return f"{started_ms}/{died_ms}/{member.decode(errors='replace')}"


def _meant(job: FoundJob) -> tuple[str, str]:
    """Only this job: another one may have its id by now, or be blocked behind it."""
    return job.details["id"], f"0 {job.enqueued_us}"


def check_ids(ids: object) -> list[Any]:
    if not isinstance(ids, list) or len(ids) > MAX_IDS:
        raise UsageError(f"ids must be a list of at most {MAX_IDS}")
    return ids


def messages_of(changed: DeadChanged) -> dict[str, str]:
    return {reference: str(error) for reference, error in changed.refused.items()}
