"""The Python API for producers and operators: Client and Queue. It needs Redis, but no supervisor."""

import os
import threading
import time
from collections.abc import Iterable, Sized
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

from forq.api_types import (
    After,
    CatchUp,
    Durable,
    Duration,
    IfExists,
    JobInfo,
    KillInfo,
    LogRecord,
    Mode,
    Overlap,
    OwnOptions,
    QueueOptions,
    QueueStatus,
    ScheduleInfo,
    StackInfo,
    State,
    SupervisorInfo,
    UpdateRunAt,
    When,
)
from forq.batch import Batch, Children, membership_of, open_batch
from forq.broker.chunks import NewJob, PartlyStored
from forq.broker.dead import DeadChanged, DeadJobs, DeadPage
from forq.broker.enqueue import (
    DEFAULT_UPDATE,
    JobIdentity,
    Producer,
    Update,
    jobs_with_options,
    jobs_with_tokens,
    new_job,
    plain_jobs,
)
from forq.broker.inspect import Counts, Inspector, Page
from forq.broker.keys import DEFAULT_PRIORITY
from forq.broker.leases import Leases
from forq.broker.link import CALL_TIMEOUT_SECONDS, CONNECT_TIMEOUT_SECONDS, Link
from forq.broker.registry import Registry
from forq.broker.results import ResultWaiter
from forq.broker.schedules import Schedules
from forq.broker.supervisors import Supervisors
from forq.broker.targets import IMPORT_SECONDS
from forq.errors import (
    ConfigError,
    UsageError,
    WaitTimeout,
)
from forq.job import Job
from forq.job_options import pack_job_options
from forq.paths import key_prefix, redis_url
from forq.procs.backoff import Backoff
from forq.queue_control import ANSWER_SECONDS, QueueControl
from forq.release_wait import Release, get_release
from forq.result_wait import wait_for_result
from forq.schedules import Schedule
from forq.settings import SECTIONS, check_mode, parse_options, read_service, stored, stored_defaults
from forq.values import check_queue_name, shown

__all__ = ["Client", "DeadChanged", "DeadPage", "NewJob", "Page", "PartlyStored", "Queue", "Release", "new_job"]

DEFAULT_MAX_QUEUES = 1000
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.1, 20.0
# The interval at which `drain` reads the counts grows from the first to the second.
MIN_DRAIN_SECONDS, MAX_DRAIN_SECONDS = 0.05, 1.0
MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 0.1, 86400.0
CONFIG_FILE = "/etc/forq/forq.toml"

T = TypeVar("T")


class Client:
    """Connects to `url`, else FORQ_REDIS, else the embedded server of the local state directory. `prefix`: the prefix
    of all keys; default: FORQ_PREFIX, else "forq:".

    `timeout`: how long a call waits for a reply of Redis; `connect_timeout`: for a connection (seconds, 0.1 to 20).

    Safe to share between threads and across a fork: each thread has its own connection, opened at its first call.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str | None = None,
        timeout: float | timedelta = CALL_TIMEOUT_SECONDS,
        connect_timeout: float | timedelta = CONNECT_TIMEOUT_SECONDS,
    ) -> None:
        self.url = url or redis_url()
        self.prefix = key_prefix() if prefix is None else prefix
        self.timeout_seconds = check_timeout("timeout", timeout)
        self.connect_timeout_seconds = check_timeout("connect_timeout", connect_timeout)
        self._local = threading.local()

    @classmethod
    def from_config(
        cls,
        file: str | os.PathLike[str] | None = None,
        *,
        timeout: float | timedelta = CALL_TIMEOUT_SECONDS,
        connect_timeout: float | timedelta = CONNECT_TIMEOUT_SECONDS,
    ) -> Self:
        """Connects to the Redis of a supervisor with this config file: its `redis` and `prefix`, unless FORQ_REDIS and
        FORQ_PREFIX are set. `file`: default FORQ_CONFIG, else /etc/forq/forq.toml if it exists."""
        url, prefix = read_config(file)
        return cls(url, prefix=prefix, timeout=timeout, connect_timeout=connect_timeout)

    def queue(self, name: str) -> "Queue":
        return Queue(self, check_queue_name(name))

    def create_queue(
        self, name: str, *, mode: Mode = "work", max_queues: int = DEFAULT_MAX_QUEUES, **options: Unpack[QueueOptions]
    ) -> "Queue":
        """Creates the queue in Redis, or uses the existing one.

        The jobs of a queue of mode "work" run once a supervisor serves a queue of that name. A queue of mode
        "auto_release" or "on_request" is served by every supervisor. QueueExists if the queue exists with another mode,
        or with another value of an option that is fixed.
        """
        where = f"queue {name!r}"
        given = stored(parse_options(options, where, check_mode(mode, where)))
        Registry(self.link(), self.prefix).create(name, mode, max_queues, stored_defaults(mode), given)
        return self.queue(name)

    def delete_queue(self, name: str, *, force: bool = False) -> int:
        """Deletes the queue and returns the number of jobs dropped. QueueNotEmpty if it holds jobs (dead ones count),
        unless `force`.

        Every supervisor that serves the queue kills its processes and running jobs. Dropped jobs stay in Redis until a
        supervisor has written them to its failed log: about a minute later, or after the next one starts. Until then
        the name cannot be used again (BeingDeleted); the name of an empty queue is free at once.
        """
        registry = Registry(self.link(), self.prefix)
        dropped = registry.delete(name, force=force)
        try:
            while registry.purge(name, _leave_to_supervisor):
                pass
        except _LeftToSupervisor:
            pass
        return dropped

    def batch(
        self,
        queue: str,
        *,
        id: str | None = None,
        on_done: NewJob | None = None,
        on_end: NewJob | None = None,
        on_dead: NewJob | None = None,
        results: bool = False,
    ) -> Batch:
        """Opens a batch: jobs of any queues, added in a `with` block, and jobs of `queue` that run when all of them are
        done, when all have ended, or when the first one is dead. An exception in the block cancels it.

        Callbacks are made with `forq.client.new_job`. `results`: the batch keeps the results of its members, for
        `batch.results()`. With an `id` the call may be repeated until the batch is sealed.
        """
        callbacks = {"on_done": on_done, "on_end": on_end, "on_dead": on_dead}
        return open_batch(self.link, self.prefix, queue, id, callbacks=callbacks, results=results)

    def find_batch(self, queue: str, id: str) -> Batch:
        """A batch of this queue, by its id. In a callback: `client.find_batch(job.queue, job.batch)`."""
        return Batch(self.link, self.prefix, queue, id)

    def batch_of(self, job: Job) -> Batch:
        """The batch of a running member, which may add others to it in a `with` block, also after it was sealed.

        The ids of those are derived from the member's: a next attempt that adds the same jobs in the same order adds
        none of them twice.
        """
        queue, id, number = membership_of(job)
        keeps_results = self.find_batch(queue, id).keeps_results()
        if job._children is None:
            job._children = Children()
        return Batch(
            self.link,
            self.prefix,
            queue,
            id,
            keeps_results=keeps_results,
            parent=number,
            parent_id=job.id,
            children=job._children,
        )

    def queues(self) -> dict[str, Mode]:
        """Every queue with its mode."""
        return cast(dict[str, Mode], Registry(self.link(), self.prefix).names())

    def supervisors(self) -> list[SupervisorInfo]:
        """Every supervisor of this Redis with a current heartbeat, by host."""
        return Supervisors(self.link(), self.prefix).all()

    def close(self) -> None:
        """Closes this thread's connection; the next call opens another."""
        self.link().close()

    def link(self) -> Link:
        """This thread's connection. A forked process opens a new one."""
        try:
            return self._local.link  # type: ignore[no-any-return]  # attributes of a thread-local have no type
        except AttributeError:
            link = self._local.link = Link(
                self.url,
                name="forq-client",
                timeout_seconds=self.timeout_seconds,
                connect_timeout_seconds=self.connect_timeout_seconds,
            )
            return link


class Queue:
    """One queue. Every call raises UnknownQueue if it does not exist."""

    def __init__(self, client: Client, name: str) -> None:
        self.name = name
        self._client = client
        # The producer of the thread that enqueued last.
        self._last_producer: Producer | None = None

    def enqueue(
        self,
        data: Any,
        *,
        id: str | None = None,
        identifier: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        run_at: datetime | float | None = None,
        run_in: timedelta | float | None = None,
        type: str | None = None,
        token: str | None = None,
        if_exists: IfExists = "update",
        update_data: bool = True,
        update_run_at: UpdateRunAt = True,
        reset_counts: bool | None = None,
        durable: Durable | None = None,
        after: After = (),
        when: When = "done",
        with_results: bool = False,
        **own: Unpack[OwnOptions],
    ) -> str:
        """Stores a job and returns its id; when it returns, the job is in Redis.

        `run_at` (epoch seconds or a datetime with a zone) or `run_in` (seconds or a timedelta): earliest time to run.

        OutcomeUnknown if the connection breaks during the call: the job may or may not be stored. With a `token` the
        call may be repeated: Redis remembers a token for the queue's dedup_ttl, and the call returns the same id.

        If the queue holds a job with this id, that job is updated: its data (with priority, identifier and type) if
        `update_data`, its time if `update_run_at` (True, False, "if_later", "if_earlier"). Its counts are reset if
        `reset_counts` (default: same as update_data). While that job runs, the new one waits and is applied when it
        ends. if_exists="skip" leaves the existing job unchanged, "refuse" raises Exists.

        durable="replica": the call returns when a replica of Redis has the job, too. NoReplica if there is none
        (nothing was stored); OutcomeUnknown if no replica has acknowledged the job in time: it is stored, but may be
        lost with the master. With a `token` the call may be repeated.

        `timeout`, `max_retries`, `backoff` (a delay, or the delays before the first, second … retry; the last one
        repeats) and `keep_done` override the queue's options for this job. After `expires_in`, counted from the time it
        may run, a job that has not started becomes dead instead of running. Durations: "30s", seconds or a timedelta.

        `after`: the jobs of this queue, by id or ref, that it waits for; until then it is held. It becomes waiting
        `when` all of them are "done" (if one ends otherwise, this job is dead), when all have "ended", however, or
        when one is "dead" (if none dies, this job is cancelled). `with_results`: its handler can read their results,
        which are kept for it. UnknownDependency if the queue does not know one of them: nothing is stored. Exists if
        the queue holds a job with this id: a job gets what it waits for when it is stored, and not later.
        """
        job = new_job(
            data,
            id=id,
            identifier=identifier,
            priority=priority,
            type=type,
            token=token,
            run_at=run_at,
            run_in=run_in,
            after=after,
            when=when,
            with_results=with_results,
            queue=self.name,
            **own,
        )
        update = DEFAULT_UPDATE
        if not (if_exists == "update" and update_data is update_run_at is True and reset_counts is None):
            update = Update(if_exists, update_data, update_run_at, reset_counts)
        return self._producer().enqueue([job], update, durable)[0]

    def enqueue_many(
        self,
        jobs: Iterable[Any],
        *,
        tokens: Iterable[str] | None = None,
        durable: Durable | None = None,
        **own: Unpack[OwnOptions],
    ) -> list[str]:
        """Stores many jobs, each given as its data; returns their ids.

        They are sent in chunks, each stored whole or not at all, two at a time. If one fails, no further one is sent,
        but the next may be stored already: PartlyStored has the ids of the jobs that were stored, that were refused,
        and that may be stored. If none is stored, the error is that of the first chunk. `jobs` may use this client.

        `durable`: as for `enqueue`, for each chunk. `timeout`, `max_retries`, `backoff`, `expires_in`,
        `keep_done`: as for `enqueue`, for each job.

        With `tokens`, one per job in the same order, the whole call may be repeated, also after PartlyStored and
        OutcomeUnknown: a stored job is not stored again, and keeps its id.
        """
        if tokens is None and not own:
            return self._producer().enqueue_data(jobs, durable)
        options = pack_job_options(**own)
        if tokens is None:
            return self._producer().enqueue_many(plain_jobs(jobs, options), durable=durable)
        if isinstance(tokens, str):
            raise UsageError(f"tokens {shown(tokens)} is not allowed: one token per job is needed")
        if isinstance(jobs, Sized) and isinstance(tokens, Sized) and len(jobs) != len(tokens):
            raise UsageError(f"{len(jobs)} jobs and {len(tokens)} tokens: each job needs its own token")
        return self._producer().enqueue_many(jobs_with_tokens(jobs, tokens, options), durable=durable)

    def enqueue_jobs(
        self,
        jobs: Iterable[NewJob],
        *,
        if_exists: IfExists = "update",
        durable: Durable | None = None,
        **own: Unpack[OwnOptions],
    ) -> list[str]:
        """The same for jobs made with `forq.client.new_job(data, id=…, priority=…, token=…, run_at=…, timeout=…)`.

        Options of this call are for jobs that were made without any.
        """
        if own:
            jobs = jobs_with_options(jobs, pack_job_options(**own))
        update = DEFAULT_UPDATE if if_exists == "update" else Update(if_exists)
        return self._producer().enqueue_many(jobs, update, durable)

    def _enqueue_identified(
        self, jobs: Iterable[NewJob], if_exists: IfExists, durable: Durable | None
    ) -> list[tuple[str, JobIdentity | None]]:
        """`enqueue_jobs`, with the identities of the jobs."""
        update = DEFAULT_UPDATE if if_exists == "update" else Update(if_exists)
        return self._producer().enqueue_many_identified(jobs, update, durable)

    def cancel(self, id: str) -> bool:
        """Removes a waiting, scheduled, blocked or held job; False if it runs, has ended or never existed."""
        return self._cancel(id)

    def _cancel(self, id: str, identity: JobIdentity | None = None) -> bool:
        return self._producer().cancel(id, identity)

    def remove(self, id: str) -> bool:
        """Removes a job. A running one is not interrupted, but dropped when it ends, whatever its outcome."""
        return self._producer().remove(id)

    def run_now(self, id: str) -> None:
        """Makes a scheduled job ready before its time: one enqueued with run_at or run_in, or one that waits for its
        retry. Its counts stay. UnknownJob if there is none, UsageError if the job is in another state."""
        self._producer().run_now(id)

    def wait_release(self, id: str, timeout: float | timedelta | None = None) -> Release | None:
        """Waits for the release of this item of a queue of mode auto_release; None after `timeout` (seconds).

        The item may be enqueued later. When the call returns, the item has left the queue.
        """
        return get_release(self._leases(), id, mode="auto_release", wait_seconds=to_seconds(timeout))

    def next_release(self, timeout: float | timedelta | None = None) -> Release | None:
        """The same for the next item released."""
        return get_release(self._leases(), None, mode="auto_release", wait_seconds=to_seconds(timeout))

    def dequeue(
        self,
        id: str | None = None,
        *,
        wait: float | timedelta | None = None,
        lease: float | timedelta | None = None,
    ) -> Release | None:
        """Takes the next item, or this one, out of a queue of mode on_request; None if there is none.

        `wait`: how long to wait for one (seconds; default: not at all). Without a `lease` the item has left the queue
        when the call returns. With a lease, call `ack()` within that time, or the item goes back to the front.
        """
        lease_seconds, wait_seconds = check_lease(lease), to_seconds(wait) or 0.0
        mode = "on_request"
        return get_release(self._leases(), id, mode=mode, wait_seconds=wait_seconds, lease_seconds=lease_seconds)

    def wait(self, id: str, timeout: float | timedelta | None = None) -> Any:
        """Waits until the job is done and returns the handler's result. The queue must keep results (keep_done).

        JobDead if the job failed for good; UnknownJob if it does not exist, was cancelled, or its result is no longer
        kept; NoResult if it is done without a result; WaitTimeout after `timeout` (seconds); UsageError if the queue
        keeps no results. The wait survives outages of Redis.
        """
        return self._wait(id, timeout)

    def _wait(
        self, id: str, timeout: float | timedelta | None, identity: JobIdentity | None = None, *, keeps: bool = False
    ) -> Any:
        """`wait` for a certain job; see ResultWaiter."""
        waiter = ResultWaiter(self._client.link(), self._client.prefix, self.name, id, identity, keeps=keeps)
        return wait_for_result(waiter, to_seconds(timeout))

    def job(self, id: str) -> JobInfo:
        """Everything known about a job; UnknownJob if the queue has no job with this id."""
        return cast(JobInfo, self._inspector().job(id))

    def pause(self) -> None:
        """Stops all supervisors from starting jobs of the queue; running jobs continue. Lasts until `resume`."""
        self._registry().pause(self.name, paused=True)

    def resume(self) -> None:
        """Jobs start again: suspects at the next heartbeat of a supervisor (5 s), all others at once."""
        self._registry().pause(self.name, paused=False)

    def drain(self, timeout: float | timedelta | None = None) -> None:
        """Waits until no job is waiting or active; WaitTimeout, with the counts, after `timeout` (seconds).

        Scheduled and held jobs, the retry lane and fail jobs do not count: a held job becomes waiting in the step that
        ends what it waits for, so it is waited for, too, unless that is scheduled or ends in another way. The call only
        waits: a queue that is paused or has no supervisor does not drain.
        """
        seconds = to_seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        intervals = Backoff(MIN_DRAIN_SECONDS, MAX_DRAIN_SECONDS)
        while True:
            counts = self._inspector().counts()
            if counts.waiting + counts.active == 0:
                return
            left_seconds = MAX_DRAIN_SECONDS if deadline is None else deadline - time.monotonic()
            if left_seconds <= 0:
                raise self._not_drained(counts)
            time.sleep(min(intervals.fail(), left_seconds))

    def _not_drained(self, counts: Counts) -> WaitTimeout:
        why = ""
        if counts.paused:
            why = "; it is paused"
        elif not self._registry().served(self.name):
            why = "; no supervisor serves it"
        left = f"{counts.waiting} waiting, {counts.active} active"
        return WaitTimeout(f"queue {self.name!r} is not drained yet: {left}{why}")

    def jobs(self, state: State | None = None, limit: int = 100, after: str | None = None) -> Page:
        """A page of jobs (id, identifier, state), in the order they will run; done jobs newest first."""
        return self._inspector().jobs(state, limit, after)

    def dead(self, limit: int = 100, after: str | None = None) -> DeadPage:
        """A page of dead jobs (id, fence, identifier, type, died_at, attempts, error, message), the newest first."""
        return self._dead().page(limit, after)

    @overload
    def retry_dead(self, id: str) -> str: ...  # type: ignore[overload-overlap]  # str is an Iterable[str]
    @overload
    def retry_dead(self, id: Iterable[str]) -> DeadChanged: ...
    @overload
    def retry_dead(self, *, all: Literal[True]) -> DeadChanged: ...
    def retry_dead(self, id: str | Iterable[str] | None = None, *, all: bool = False) -> str | DeadChanged:
        """Revives a dead job: it waits again, with its counts reset. `id`: the id (of the newest), or id@fence.

        Returns its id@fence. UnknownJob if there is none, Exists if a live job has that id, QueueFull.

        With several ids, or with all=True (all jobs dead now), returns the number of jobs revived (`done`) and the
        errors of the others (`refused`, by id), which stay dead. The call may be repeated.
        """
        dead = self._dead()
        return dead.retry(id) if isinstance(id, str) else dead.retry_many(_references(id, all))

    def retry_dead_with_dependants(self, id: str) -> DeadChanged:
        """Revives a dead job, and those that are dead because of it: they wait for it again. Returns the number of jobs
        revived (`done`), and the errors of the others (`refused`)."""
        return self._dead().retry_with_dependants(id)

    @overload
    def discard_dead(self, id: str) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def discard_dead(self, id: Iterable[str]) -> DeadChanged: ...
    @overload
    def discard_dead(self, *, all: Literal[True]) -> DeadChanged: ...
    def discard_dead(self, id: str | Iterable[str] | None = None, *, all: bool = False) -> str | DeadChanged:
        """Discards a dead job and returns its id@fence; UnknownJob if there is none. Several ids, or all: as
        `retry_dead`."""
        dead = self._dead()
        return dead.discard(id) if isinstance(id, str) else dead.discard_many(_references(id, all))

    def schedule(
        self,
        key: str,
        *,
        every: Duration | None = None,
        cron: str | None = None,
        zone: str | None = None,
        data: Any = None,
        priority: int = DEFAULT_PRIORITY,
        type: str | None = None,
        overlap: Overlap = "skip",
        catch_up: CatchUp = "once",
        jitter: Duration = 0,
    ) -> datetime:
        """Enqueues a job at each tick: at the interval `every` (seconds, a timedelta, "5m"), or at the times of a
        5-field `cron` expression in a time `zone` (default UTC). Returns the next tick.

        `overlap`: "skip" a tick while the job of an earlier tick is unfinished, or "queue" its job anyway. `catch_up`:
        after ticks missed because no supervisor ran, enqueue one job ("once"), one per tick ("all") or none ("none").
        `jitter`: each job starts up to this much after its tick, at random. Replaces a schedule with the same key; an
        identical schedule keeps its next tick.
        """
        given = {
            "every": every,
            "cron": cron,
            "zone": zone,
            "data": data,
            "priority": priority,
            "type": type,
            "overlap": overlap,
            "catch_up": catch_up,
            "jitter": jitter,
        }
        next_ms = self._schedules().set(Schedule.from_mapping(key, given))
        return datetime.fromtimestamp(next_ms / 1000, UTC)

    def schedules(self) -> list[ScheduleInfo]:
        """Every schedule of the queue: its definition, its next tick, its counts."""
        return cast(list[ScheduleInfo], self._schedules().all())

    def unschedule(self, key: str) -> bool:
        """Removes a schedule, but not its jobs. False if there is none."""
        return self._schedules().drop(key)

    def pause_schedule(self, key: str) -> bool:
        """Pauses a schedule until it is resumed or removed; its definition and counts stay. False if it was paused."""
        return self._schedules().pause(key)

    def resume_schedule(self, key: str) -> bool:
        """Ends the pause of a schedule; ticks of the pause are not caught up. False if it was not paused."""
        return self._schedules().resume(key)

    def trigger(self, key: str) -> str:
        """Enqueues a job of the schedule now and returns its id; the ticks stay. Exists if that would overlap."""
        return self._schedules().trigger(key)

    def status(self) -> QueueStatus:
        """The number of jobs in each state."""
        return cast(QueueStatus, asdict(self._inspector().counts()))

    def kill(
        self,
        id: str,
        *,
        retry: bool = False,
        on: str | None = None,
        timeout: float | timedelta = ANSWER_SECONDS,
    ) -> KillInfo:
        """Kills a running job: it is cancelled, or with `retry` goes back in line without counting the attempt.

        The request goes through Redis to the supervisor that runs the job. That one must allow it (remote_control =
        "full"), else PermissionRefused, and this client must be allowed to write requests (not forq-producer of
        etc/redis-acl.conf). Only the attempt that runs now is killed: UnknownJob if it has ended. TimedOut after
        `timeout` (seconds) says whether the request may have been carried out. The same holds for `stack`, `logs` and
        `restart`. `on`: the name of a processor, or of a host with one supervisor (see Client.supervisors).
        """
        return self._control(timeout).kill(id, retry=retry, on=on)

    def stack(self, *, on: str | None = None, timeout: float | timedelta = ANSWER_SECONDS) -> list[StackInfo]:
        """The stack of each running job of the queue under one supervisor. Needed if several serve it: `on`."""
        return self._control(timeout).stack(on=on)

    def logs(
        self,
        *,
        lines: int = 100,
        job: str | None = None,
        on: str | None = None,
        timeout: float | timedelta = ANSWER_SECONDS,
    ) -> list[LogRecord]:
        """The last lines of output of the queue's processes under one supervisor, or of one `job`."""
        return self._control(timeout).logs(lines=lines, job=job, on=on)

    def restart(
        self,
        *,
        on: str | None = None,
        wait: float | timedelta = IMPORT_SECONDS,
        timeout: float | timedelta = ANSWER_SECONDS,
    ) -> None:
        """Replaces the queue's processes under one supervisor, for example to load new code. `wait`: seconds that the
        import may take; CannotImport if it fails, and then nothing has changed."""
        self._control(timeout).restart(wait_seconds=to_seconds(wait) or IMPORT_SECONDS, on=on)

    def _control(self, timeout: float | timedelta) -> QueueControl:
        seconds = to_seconds(timeout)
        if not seconds:
            raise UsageError(f"timeout {shown(timeout)} is not allowed: more than 0 seconds")
        return QueueControl(self._client.link(), self._client.prefix, self.name, seconds)

    def _leases(self) -> Leases:
        return Leases(self._client.link(), self._client.prefix, self.name)

    def _producer(self) -> Producer:
        link, producer = self._client.link(), self._last_producer
        if producer is None or producer.link is not link:
            producer = self._last_producer = Producer(link, self._client.prefix, self.name)
        return producer

    def _dead(self) -> DeadJobs:
        return DeadJobs(self._client.link(), self._client.prefix, self.name)

    def _registry(self) -> Registry:
        return Registry(self._client.link(), self._client.prefix)

    def _schedules(self) -> Schedules:
        return Schedules(self._client.link(), self._client.prefix, self.name)

    def _inspector(self) -> Inspector:
        return Inspector(self._client.link(), self._client.prefix, self.name)


class _LeftToSupervisor(Exception):
    pass


def _leave_to_supervisor(dropped: list[dict[str, object]]) -> None:
    """Dropped jobs belong in a failed log, which only a supervisor can write."""
    if dropped:
        raise _LeftToSupervisor


def _references(ids: Iterable[str] | None, everything: bool) -> Iterable[str] | None:
    if (ids is None) != everything:
        raise UsageError("pass an id, several ids, or all=True")
    return ids


def to_seconds(given: float | timedelta | None) -> float | None:
    if given is None:
        return None
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise UsageError(f"{shown(given)} is not allowed: a number of seconds from 0, or a timedelta")
    return float(seconds)


def check_lease(lease: float | timedelta | None) -> float | None:
    """The lease in seconds."""
    lease_seconds = to_seconds(lease)
    if lease_seconds is not None and not MIN_LEASE_SECONDS <= lease_seconds <= MAX_LEASE_SECONDS:
        allowed = f"{MIN_LEASE_SECONDS} to {MAX_LEASE_SECONDS:.0f} seconds"
        raise UsageError(f"lease {shown(lease)} is not allowed: {allowed}")
    return lease_seconds


def check_timeout(name: str, given: float | timedelta) -> float:
    """The timeout in seconds."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (number and MIN_TIMEOUT_SECONDS <= seconds <= MAX_TIMEOUT_SECONDS):
        allowed = f"{MIN_TIMEOUT_SECONDS} to {MAX_TIMEOUT_SECONDS:.0f} seconds, or a timedelta"
        raise UsageError(f"{name} {shown(given)} is not allowed: {allowed}")
    return float(seconds)


def read_config(file: str | os.PathLike[str] | None) -> tuple[str, str]:
    """The URL of Redis and the prefix of a supervisor with this config file."""
    import tomllib

    path = os.path.abspath(file or os.environ.get("FORQ_CONFIG") or CONFIG_FILE)
    table: dict[str, Any] = {}
    if file or os.environ.get("FORQ_CONFIG") or os.path.exists(path):
        try:
            with open(path, "rb") as stream:
                table = tomllib.load(stream)
        except OSError as exc:
            raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    settings, _ = read_service({k: v for k, v in table.items() if k not in SECTIONS}, path, os.environ, {})
    state = settings["state_dir"]
    embedded = f"unix://{os.path.join(state, 'redis.sock')}" if state else redis_url()
    return settings["redis"] or embedded, settings["prefix"]
