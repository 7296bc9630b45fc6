"""Enqueueing: checks jobs, stores them in a queue, and takes waiting jobs out again.

The path of a job starts here: `new_job` checks it, `record.pack_body` packs it, `Producer` sends it to enqueue.lua.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import repeat, zip_longest
from typing import Any, NamedTuple, Unpack

from forq.api_types import After, OwnOptions, When
from forq.broker.chunks import (
    Chunk,
    ChunkSender,
    NewJob,
    PartlyStored,
    chunks,
    data_chunks,
    pack_chunk,
    read_known,
    spell_out,
    stored_ids,
)
from forq.broker.dependencies import pack_after
from forq.broker.keys import DEFAULT_PRIORITY, durable_mark, queue_base
from forq.broker.link import Link
from forq.broker.record import NO_NAMES, join_body, pack_body
from forq.broker.scripts import NO_QUEUE, OK, error_for, script
from forq.errors import ForqError, InvalidData, NoReplica, OutcomeUnknown, UnknownJob, UsageError
from forq.job import TraceContext, current_trace, new_id
from forq.job_options import pack_job_options
from forq.values import check_job_id, check_queue_name, check_type, shown
from forq.version import PROTOCOL

# About 285,000 years: the largest number of milliseconds that a double holds exactly.
MAX_SECONDS = 9_007_199_254_740
REPLICA = "replica"
# A healthy replica acknowledges within a round trip.
WAIT_MS = 1000
_MISSING = object()
# Half of the time of NewJob(…).
_new = tuple.__new__


class JobIdentity(NamedTuple):
    """Tells a job from others with its id: no two of them have the same enqueue time (lua/records.lua).

    `fence`: the last one at the enqueue; later claims have a higher one. `ahead_us`: the enqueue time of the active job
    that the job is blocked behind; '' if it is not.
    """

    epoch: str
    fence: str
    enqueued_us: str
    ahead_us: str = ""

    def pack(self) -> str:
        """The identity as the scripts read it (lua/records.lua, is_meant)."""
        return f"{self.fence} {self.enqueued_us} {self.ahead_us}".rstrip()

    def is_other(self, job: Mapping[str, Any]) -> bool:
        """Whether this job, as `Inspector.job` or `DeadJobs.show` shows it, is another one with the id."""
        if "enqueued_at" not in job:
            return False
        enqueued_us = str(round(job["enqueued_at"] * 1e6))
        if enqueued_us == self.enqueued_us:
            return False
        # The job ahead has taken the changes of this one if it returned, and then was claimed again.
        return enqueued_us != self.ahead_us or (job["state"] in ("done", "dead") and self.is_behind(job["fence"]))

    def is_behind(self, fence: int) -> bool:
        """Whether the job was blocked while the attempt with this fence ran."""
        return self.ahead_us != "" and fence <= int(self.fence)


def new_job(
    data: Any,
    *,
    id: str | None = None,
    identifier: str | None = None,
    priority: int = DEFAULT_PRIORITY,
    type: str | None = None,
    token: str | None = None,
    run_at: datetime | float | None = None,
    run_in: timedelta | float | None = None,
    options: str = "",
    after: After = (),
    when: When = "done",
    with_results: bool = False,
    queue: str | None = None,
    **own: Unpack[OwnOptions],
) -> NewJob:
    """Checks everything that does not need Redis.

    `own`: options that override those of the queue. `options`: the same, packed by `pack_job_options`.
    `queue`: the job's queue; refs in `after` of another one are refused.
    """
    job_id = new_id() if id is None else check_job_id(id)
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 9:
        raise UsageError(f"priority {shown(priority)} is not allowed: 0 (first) to 9 (last)")
    if identifier is not None and not isinstance(identifier, str):
        raise InvalidData(f"identifier {shown(identifier)} is not text")
    if type is not None:
        check_type(type)
    checked_token = "" if token is None else check_job_id(token, "token")
    body = pack_body(data, identifier, type, current_trace())
    at = "" if run_at is run_in is None else _run_at_argument(run_at, run_in)
    waits_for = ""
    if after != () or with_results or when != "done":
        waits_for = pack_after(after, when, with_results, queue=queue)
    return NewJob(job_id, priority, body, checked_token, at, pack_job_options(**own) if own else options, waits_for)


def plain_job(data: Any, names: bytes, trace: TraceContext | None) -> NewJob:
    """A job with a new id and no options. `names`: its identifier and type, packed by `pack_names`."""
    return _new(NewJob, (new_id(), DEFAULT_PRIORITY, join_body(names, data, trace), "", "", "", "", ()))


def plain_jobs(every_data: Iterable[Any], options: str = "") -> Iterator[NewJob]:
    """Jobs with data only. All get the trace context of this call."""
    trace = current_trace()
    for data in every_data:
        yield NewJob(new_id(), DEFAULT_PRIORITY, join_body(NO_NAMES, data, trace), "", "", options)


def jobs_with_options(jobs: Iterable[NewJob], options: str) -> Iterator[NewJob]:
    """These jobs; those without options of their own get these."""
    return (job if job.options else job._replace(options=options) for job in jobs)


def jobs_with_tokens(every_data: Iterable[Any], tokens: Iterable[str], options: str = "") -> Iterator[NewJob]:
    """Jobs with data and one token each, in the same order."""
    trace = current_trace()
    for data, token in zip_longest(every_data, tokens, fillvalue=_MISSING):
        if data is _MISSING or token is _MISSING:
            fewer, more = ("jobs", "tokens") if data is _MISSING else ("tokens", "jobs")
            raise UsageError(f"there are fewer {fewer} than {more}: each job needs its own token")
        checked_token = check_job_id(token, "token")
        yield NewJob(new_id(), DEFAULT_PRIORITY, pack_body(data, None, None, trace), checked_token, "", options)


def _run_at_argument(run_at: datetime | float | None, run_in: timedelta | float | None) -> str:
    if run_at is not None and run_in is not None:
        raise UsageError("give run_at or run_in, not both")
    if run_in is not None:
        seconds = run_in.total_seconds() if isinstance(run_in, timedelta) else run_in
        return f"+{_milliseconds(seconds, 'run_in', run_in)}"
    if isinstance(run_at, datetime):
        if run_at.tzinfo is None:
            raise UsageError(f"run_at {shown(run_at.isoformat())} has no time zone")
        return str(_milliseconds(run_at.timestamp(), "run_at", run_at))
    return "" if run_at is None else str(_milliseconds(run_at, "run_at", run_at))


def _milliseconds(seconds: object, name: str, given: object) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_SECONDS:
        other = "a timedelta" if name == "run_in" else "a datetime with a zone"
        raise UsageError(f"{name} {shown(given)} is not allowed: seconds from 0 to {MAX_SECONDS}, or {other}")
    # Rounds up, so that no job runs before its time. Rounding to microseconds first removes float noise.
    return -(-round(seconds * 1_000_000) // 1000)


class TokenTerms(NamedTuple):
    """How long a queue would remember a token that is stored now. Times in ms, by the server's clock."""

    epoch: str
    now_ms: int
    dedup_ttl_ms: int


class Repeatable(NamedTuple):
    """Limits of a call whose jobs all have tokens, so that it can be repeated without storing a job twice.

    The server refuses the call (TooLate) after `until_ms` and in another epoch of the queue, however late it arrives;
    and it remembers the tokens beyond `keep_until_ms`, whatever dedup_ttl is.
    """

    epoch: str
    until_ms: int
    keep_until_ms: int


class Update(NamedTuple):
    """What happens to a job whose id is already in the queue; and until when the call may be repeated."""

    if_exists: str = "update"
    update_data: bool = True
    update_run_at: bool | str = True
    reset_counts: bool | None = None
    repeatable: Repeatable | None = None

    def policy(self) -> str:
        """The policy as enqueue.lua reads it."""
        if self.if_exists not in ("update", "skip", "refuse"):
            raise UsageError(f"if_exists {shown(self.if_exists)} is not allowed: 'update', 'skip' or 'refuse'")
        if self.update_run_at not in (True, False, "if_later", "if_earlier"):
            raise UsageError(
                f"update_run_at {shown(self.update_run_at)} is not allowed: True, False, 'if_later' or 'if_earlier'"
            )
        run_at = self.update_run_at if isinstance(self.update_run_at, str) else str(self.update_run_at).lower()
        reset = self.update_data if self.reset_counts is None else self.reset_counts
        policy = f"{self.if_exists} {self.update_data:d} {run_at} {reset:d}"
        if self.repeatable is None:
            return policy
        epoch, until_ms, keep_until_ms = self.repeatable
        return f"{policy} {until_ms} {keep_until_ms} {epoch}"


DEFAULT_UPDATE = Update()
_DEFAULT_POLICY = DEFAULT_UPDATE.policy()
# Leaves out jobs with a known id.
_LEAVE_POLICY = "leave 0 false 0"


class Restored(NamedTuple):
    """Counts of a restore: jobs stored now, jobs stored earlier (by their tokens), and the indexes of skipped jobs."""

    stored: int
    known: int
    skipped: list[int]


class Producer:
    """Stores jobs in one queue and removes waiting ones."""

    def __init__(self, link: Link, prefix: str, name: str) -> None:
        self.name = check_queue_name(name)
        self.link = link
        self._base = queue_base(prefix, name)
        self._script = script("enqueue")
        self._has_stored = False

    def enqueue(self, jobs: list[NewJob], update: Update = DEFAULT_UPDATE, durable: str | None = None) -> list[str]:
        """Stores all of `jobs` or none; returns their ids.

        With durable="replica" it returns once a replica has the jobs. Without a replica it sends nothing (NoReplica).
        If no replica acknowledges in time, it raises OutcomeUnknown: the jobs are lost if the master is lost now.
        """
        reply = self._enqueue(jobs, update, durable)
        return stored_ids([job.id for job in jobs], reply)

    def enqueue_identified(
        self, jobs: list[NewJob], update: Update = DEFAULT_UPDATE, durable: str | None = None
    ) -> list[tuple[str, JobIdentity | None]]:
        """The same; returns ids with identities. A job that an earlier call stored (by its token) has none."""
        reply = self._enqueue(jobs, update, durable)
        return _read_identities([job.id for job in jobs], reply) if reply else []

    def token_terms(self) -> TokenTerms:
        """What a call that may be repeated needs to know. UnknownQueue if there is no queue."""
        (epoch, dedup_ttl_ms), (seconds, micros) = self.link.pipeline(
            [("HMGET", f"{self._base}:options", "epoch", "dedup_ttl_ms"), ("TIME",)], at=self._base
        )
        if epoch is None:
            raise error_for(self.name, [NO_QUEUE])
        return TokenTerms(epoch.decode(), int(seconds) * 1000 + int(micros) // 1000, int(dedup_ttl_ms or 0))

    def _enqueue(self, jobs: list[NewJob], update: Update, durable: str | None) -> list[Any]:
        policy = _DEFAULT_POLICY if update is DEFAULT_UPDATE else update.policy()
        on_replica = durable is not None and check_durable(durable)
        if not jobs:
            return []
        if on_replica:
            _check_has_replica(self.link, self._base)
        reply = self._store(jobs, policy)
        if on_replica:
            _wait_for_replica(self.link, self._base)
        return reply

    def enqueue_many(
        self, jobs: Iterable[NewJob], update: Update = DEFAULT_UPDATE, durable: str | None = None
    ) -> list[str]:
        """Stores jobs in chunks; see `_store_chunks`."""
        if type(jobs) is list and len(jobs) == 1:
            return self.enqueue(jobs, update, durable)
        stored = self._store_chunks(_packed(jobs, update), durable)
        return [job_id for (ids, _, _), reply in stored for job_id in stored_ids(ids, reply)]

    def enqueue_data(self, every_data: Iterable[Any], durable: str | None = None) -> list[str]:
        """The same for jobs with data only. All get the trace context of this call."""
        packed = data_chunks(every_data, NO_NAMES, current_trace())
        return [job_id for (ids, _, _), _ in self._store_chunks(packed, durable) for job_id in ids]

    def enqueue_many_identified(
        self, jobs: Iterable[NewJob], update: Update = DEFAULT_UPDATE, durable: str | None = None
    ) -> list[tuple[str, JobIdentity | None]]:
        """The same as `enqueue_many`; returns ids with identities."""
        if type(jobs) is list and len(jobs) == 1:
            return self.enqueue_identified(jobs, update, durable)
        stored = self._store_chunks(_packed(jobs, update), durable)
        return [found for (ids, _, _), reply in stored for found in _read_identities(ids, reply)]

    def _store_chunks(self, packed: Iterable[Chunk], durable: str | None) -> list[tuple[Chunk, list[Any]]]:
        """Stores chunks, each whole or not at all. While the server stores one, the next is packed and sent.

        Some wait for the reply to the one before: with `durable`; if their jobs wait for others; and until this
        producer has stored one, since the queue or the library may be missing. After an error no further one is sent.
        It is raised as a PartlyStored, unless all jobs that were sent have the same fate: none is stored, or any may
        be.
        """
        on_replica = durable is not None and check_durable(durable)
        sender = ChunkSender(self.link, self._script, self._base, self.name)
        try:
            for chunk in packed:
                if on_replica:
                    _check_has_replica(self.link, self._base)
                sender.send(chunk, alone=on_replica or chunk.linked or not self._has_stored)
                self._has_stored = True
                if on_replica:
                    sender.check_last(lambda: _wait_for_replica(self.link, self._base))
            sender.finish()
        except ForqError as exc:
            first = sender.finish_all() or exc
            if not sender.has_several_fates():
                raise first from first.__cause__
            raise PartlyStored(sender.results, first) from first
        except Exception:
            # Of the iterator. The replies belong to this call.
            sender.finish_all()
            raise
        except BaseException:
            sender.close_if_unanswered()
            raise
        return [(chunk, reply) for chunk, reply in sender.results if not isinstance(reply, ForqError)]

    def restore(self, jobs: Iterable[NewJob]) -> Restored:
        """Stores jobs that had left the queue, each with its own token.

        A job whose id is live is skipped and its token stays unused, so a later call can store it.
        """
        stored, known, skipped, offset = 0, 0, [], 0
        for chunk in chunks(jobs):
            reply = self._store(chunk, _LEAVE_POLICY)
            skipped += [offset + number - 1 for number, stored_id in read_known(reply) if not stored_id]
            known += sum(1 for _, stored_id in read_known(reply) if stored_id)
            offset += len(chunk)
            stored = offset - known - len(skipped)
        return Restored(stored, known, skipped)

    def _store(self, jobs: list[NewJob], policy: str) -> list[Any]:
        reply = self.link.run(self._script, self._base, PROTOCOL, *spell_out(jobs, policy))
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return reply

    def cancel(self, job_id: str, identity: JobIdentity | None = None, edge: str | None = None) -> bool:
        """Removes a job that has not begun; False if there is none. `identity`: only this job of the id. `edge`: only a
        job at which it begins, such as a member of that batch."""
        return self._remove(job_id, mark_active=False, identity=identity, edge=edge) == 1

    def remove(self, job_id: str) -> bool:
        """Removes a job. A running job is only marked: it is forgotten when it ends."""
        return self._remove(job_id, mark_active=True) > 0

    def run_now(self, job_id: str) -> None:
        """Makes a scheduled job ready before its time. UnknownJob if there is none, UsageError in another state."""
        reply = self.link.run(script("run_now"), self._base, check_job_id(job_id))
        if reply[0] != OK:
            raise error_for(self.name, reply)
        if not reply[1]:
            raise UnknownJob(
                f"queue {self.name!r} has no scheduled job {job_id!r}; see: forqctl why {self.name} {job_id}"
            )

    def _remove(
        self, job_id: str, *, mark_active: bool, identity: JobIdentity | None = None, edge: str | None = None
    ) -> int:
        meant = "" if identity is None else identity.pack()
        only = () if edge is None else (edge,)
        reply = self.link.run(script("cancel"), self._base, check_job_id(job_id), int(mark_active), meant, *only)
        if reply[0] != OK:
            raise error_for(self.name, reply)
        return int(reply[1])


def _packed(jobs: Iterable[NewJob], update: Update) -> Iterator[Chunk]:
    policy, repeatable = update.policy(), update.repeatable is not None
    return (pack_chunk(chunk, policy, repeatable=repeatable) for chunk in chunks(jobs))


def _read_identities(ids: list[str], reply: list[Any]) -> list[tuple[str, JobIdentity | None]]:
    epoch, fence, enqueued_us, *others = reply[1].decode().split(" ")
    found: list[tuple[str, JobIdentity | None]] = list(zip(ids, repeat(JobIdentity(epoch, fence, enqueued_us))))
    for other in others:
        number, *times = other.split(":")
        found[int(number) - 1] = (ids[int(number) - 1], JobIdentity(epoch, fence, *times))
    for number, stored_id in read_known(reply):
        found[number - 1] = (stored_id, None)
    return found


def check_durable(durable: object) -> bool:
    """Whether to wait for a replica."""
    if durable not in (None, REPLICA):
        raise UsageError(f"durable {shown(durable)} is not allowed: 'replica', or None for the master alone")
    return durable is not None


def _check_has_replica(link: Link, base: str) -> None:
    info = link.call("INFO", "replication", at=base)
    if b"state=online" not in info:
        raise NoReplica(f"Redis at {link.shown_url} has no replica that is in sync; nothing was stored")


def _wait_for_replica(link: Link, base: str) -> None:
    stored = "the jobs are stored on the master, but no replica has acknowledged them"
    try:
        wait_ms = min(WAIT_MS, round(link.timeout_seconds * 500))
        replicas = link.count_replicas(base, durable_mark(base), wait_ms)
    except OutcomeUnknown as exc:
        raise OutcomeUnknown(f"{stored}: {exc}") from exc
    if replicas < 1:
        raise OutcomeUnknown(f"{stored} within {wait_ms / 1000:g} s")
