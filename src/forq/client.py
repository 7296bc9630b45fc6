"""Waits for the end of a job, without polling.

1. It subscribes, then looks (by which it is written down): whatever happens after the look is heard.
2. It looks again when it has heard something, and in half the time for which it is written down.
3. After a broken connection it starts over, with the same job in mind: what ended meanwhile is found by a check.

Getting an item of a queue of the release modes: ask, wait, acknowledge, return.

The item is acknowledged before it is returned, so that it is nobody's but the caller's. Whatever breaks on the way, it
is not lost: an item that was not acknowledged goes back in line when its lease lapses.

The Python API: a producer's (and an operator's) view of the queues. It needs Redis, and no supervisor.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeVar, overload

from forq.broker.dead import DeadChanged, DeadJobs, DeadPage
from forq.broker.enqueue import NewJob, PartlyStored, Producer, Update, jobs_with_tokens, new_job, plain_jobs
from forq.broker.inspect import Inspector, Page, State
from forq.broker.keys import DEFAULT_PRIORITY
from forq.broker.leases import Lease, LeaseReply, Leases
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.registry import Registry
from forq.broker.results import DoneJob, ResultWaiter, WaitTarget
from forq.broker.schedules import Schedules
from forq.errors import (
    BackPressure,
    ForqError,
    JobDead,
    LeaseLapsed,
    NoResult,
    RedisUnavailable,
    UnknownJob,
    UsageError,
    WaitTimeout,
)
from forq.job import new_id
from forq.paths import key_prefix, redis_url
from forq.procs.backoff import Backoff, reconnecting
from forq.schedules import Schedule
from forq.settings import check_mode, parse_options, stored, stored_defaults
from forq.values import check_queue_name, shown

VALID_SECONDS = 60.0


def wait_for_result(
    waiter: ResultWaiter, timeout_seconds: float | None, now: Callable[[], float] = time.monotonic
) -> Any:
    """What the job's handler returned, once it is done."""
    return _Wait(waiter, None if timeout_seconds is None else now() + timeout_seconds, now).result()


class _Wait:
    def __init__(self, waiter: ResultWaiter, deadline: float | None, now: Callable[[], float]) -> None:
        self._waiter = waiter
        self._deadline = deadline
        self._now = now
        self._subscription = waiter.subscription()
        self._job = f"job {waiter.job_id!r} of queue {waiter.queue!r}"
        # Which job is meant, once that was seen.
        self._target: WaitTarget | None = None

    def result(self) -> Any:
        backoff = reconnecting()
        try:
            while True:
                try:
                    if not self._subscription.connected:
                        self._subscription.connect()
                    done = self._listen_until_done()
                    return self._result_of(done)
                except RedisUnavailable as exc:
                    # Who has not seen the job yet is told at once, as by any other call.
                    if self._target is None:
                        raise
                    self._subscription.close()
                    self._pause(backoff.fail(), exc)
        finally:
            self._subscription.close()

    def _listen_until_done(self) -> DoneJob:
        while True:
            status = self._waiter.check(self._target, round(VALID_SECONDS * 1000))
            self._target = status.target
            match status.state:
                case "live":
                    self._hear(status.target)
                case "done" if status.done is not None:
                    if not status.target.mark:
                        # Who comes after the end gets what ended last: a later job of that id may be dead.
                        self._raise_if_dead(self._waiter.error_of_last_dead(status.target, status.done.fence))
                    return status.done
                case "done":
                    raise UnknownJob(f"{self._job} is done, and its result is not kept: {self._waiter.why_not_kept()}")
                case "dead":
                    self._raise_if_dead(self._waiter.error_of_dead(status.fence))
                    raise JobDead(f"{self._job} failed for good, and its error is not kept any more")
                case "gone":
                    self._raise_if_dead(self._waiter.error_of_last_dead(status.target))
                    why = self._waiter.why_not_kept()
                    raise UnknownJob(f"{self._job} is not there: it never was, or has ended and is not kept: {why}")
                case "cancelled":
                    raise UnknownJob(f"{self._job} was cancelled or removed")

    def _hear(self, target: WaitTarget) -> None:
        """Returns when the job may have ended, or it is time to look again."""
        look_again_at = self._now() + VALID_SECONDS / 2
        while self._now() < look_again_at:
            self._check_time()
            wake_at = look_again_at if self._deadline is None else min(look_again_at, self._deadline)
            # The message may be about an earlier job with this id. Earlier releases send no mark.
            if any(mark in (target.mark, "", "-") for mark in _marks_heard(self._subscription, wake_at - self._now())):
                return

    def _raise_if_dead(self, error: Any) -> None:
        if error is not None:
            raise JobDead(f"{self._job} failed for good: {_shown(error)}", error)

    def _result_of(self, done: DoneJob) -> Any:
        if done.result_error is not None:
            raise NoResult(f"{self._job} is done: {done.result_error}")
        return done.result

    def _check_time(self) -> None:
        if self._deadline is not None and self._now() >= self._deadline:
            raise WaitTimeout(f"{self._job} has not ended yet")

    def _pause(self, seconds: float, exc: RedisUnavailable) -> None:
        if self._deadline is not None:
            left = self._deadline - self._now()
            if left <= 0:
                raise WaitTimeout(f"{self._job} has not ended, as far as is known: {exc}") from exc
            seconds = min(seconds, left)
        time.sleep(seconds)


def _marks_heard(subscription: Subscription, seconds: float) -> list[str]:
    """Which jobs have ended, of those that end within so long: each message is HOW FENCE MARK."""
    poll = select.poll()
    poll.register(subscription.fileno(), select.POLLIN)
    poll.poll(max(0.0, seconds) * 1000)
    return [(*message.split(" "), "", "")[2] for _, message in subscription.receive()]


def _shown(error: Any) -> str:
    return f"{error.get('name')}: {error.get('message')}" if isinstance(error, dict) else str(error)


# A blocking read never takes longer, so that a connection that is dead is noticed.
SLICE_SECONDS = 5.0
PAUSE_SECONDS = 0.1
# How long Redis may be away before a call gives up; and before an acknowledgement does, which decides about an item.
# With the time that its last call takes that must be less than the minute for which Redis knows that it had been made:
# else an item that has left would be taken for one that has gone back.
PATIENCE_SECONDS = 10.0
ACK_PATIENCE_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Release:
    """An item that has left its queue; with a lease: that will have left it once it is acknowledged."""

    id: str
    identifier: str
    data: Any
    fence: int
    enqueued_at: float
    lease_seconds: float
    _leases: Leases = field(repr=False, compare=False)
    _awaiter: str = field(repr=False, compare=False)

    def ack(self) -> None:
        """The item is done with, and leaves the queue; LeaseLapsed if it has gone back. Repeating it is harmless."""
        _persist(ACK_PATIENCE_SECONDS, lambda: self._leases.ack(self._awaiter, self.id, self.fence))

    def give_back(self) -> bool:
        """The item goes back to the front of the line; False if it had left, or had gone back, already."""
        return _persist(PATIENCE_SECONDS, lambda: self._leases.leave(self._awaiter))


def get_release(
    leases: Leases, job_id: str | None, *, mode: str, wait_seconds: float | None, lease_seconds: float | None = None
) -> Release | None:
    """The next item, or that one; None when time is up (`wait_seconds` None: never).

    With `lease_seconds` the caller acknowledges it.
    """
    deadline = float("inf") if wait_seconds is None else time.monotonic() + wait_seconds
    while True:
        call = _Call(leases, job_id, mode, None if lease_seconds is None else round(lease_seconds * 1000))
        release = call.run(deadline)
        if release is None or lease_seconds is not None:
            return release
        try:
            release.ack()
        except LeaseLapsed:
            continue
        return release


class _Call:
    """One awaiter: a name, from the first question to the item."""

    def __init__(self, leases: Leases, job_id: str | None, mode: str, lease_ms: int | None) -> None:
        self._leases = leases
        self._job_id = job_id
        self._mode = mode
        self._lease_ms = lease_ms
        self._awaiter = new_id()

    def run(self, deadline: float) -> Release | None:
        try:
            while True:
                waiting = time.monotonic() < deadline
                answer = _persist(PATIENCE_SECONDS, partial(self._ask, register=waiting))
                if answer.lease is not None:
                    return self._release(answer.lease)
                if answer.valid_ms == 0:
                    continue
                if not waiting:
                    return None
                patience = min(SLICE_SECONDS, answer.valid_ms / 2000, deadline - time.monotonic())
                self._wait(patience)
        except BaseException:
            # Interrupted, or Redis is away: what nobody waits for any more need not wait for its lease.
            with suppress(ForqError):
                self._leases.leave(self._awaiter)
            raise

    def _wait(self, seconds: float) -> None:
        try:
            self._leases.wait(self._awaiter, seconds)
        except RedisUnavailable:
            return
        except BackPressure:
            # Out of memory a blocking read is refused, but a question is not.
            time.sleep(max(0.0, min(seconds, PAUSE_SECONDS)))

    def _ask(self, *, register: bool) -> LeaseReply:
        return self._leases.request(
            self._awaiter, self._job_id, mode=self._mode, register=register, lease_ms=self._lease_ms
        )

    def _release(self, lease: Lease) -> Release:
        record = lease.record
        return Release(
            id=lease.job_id,
            identifier=record.identifier or lease.job_id,
            data=record.data,
            fence=lease.fence,
            enqueued_at=record.enqueued_ms / 1000,
            lease_seconds=lease.lease_ms / 1000,
            _leases=self._leases,
            _awaiter=self._awaiter,
        )


def _persist(patience_seconds: float, call: Callable[[], T]) -> T:
    """Repeats a call that may be repeated while Redis is away, for so long."""
    give_up_at = time.monotonic() + patience_seconds
    while True:
        try:
            return call()
        except RedisUnavailable:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(PAUSE_SECONDS)


__all__ = ["Client", "DeadChanged", "DeadPage", "NewJob", "Page", "PartlyStored", "Queue", "Release", "new_job"]

DEFAULT_MAX_QUEUES = 1000
# How often `drain` looks: more and more seldom.
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.05, 1.0
MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 0.1, 86400.0


class Client:
    """Finds Redis by `url`, else FORQ_REDIS, else the embedded server of the local state directory. `prefix`: what all
    keys there begin with; FORQ_PREFIX if it is not given, else "forq:".

    Safe to share between threads and across a fork: each thread has its own connection, made when first used.
    """

    def __init__(self, url: str | None = None, *, prefix: str | None = None) -> None:
        self.url = url or redis_url()
        self.prefix = key_prefix() if prefix is None else prefix
        self._local = threading.local()

    def queue(self, name: str) -> "Queue":
        return Queue(self, check_queue_name(name))

    def create_queue(
        self, name: str, *, mode: str = "work", max_queues: int = DEFAULT_MAX_QUEUES, **options: Any
    ) -> "Queue":
        """Makes the queue in Redis, or joins it.

        The jobs of a queue of mode "work" run once a supervisor serves a queue of that name. One of mode "auto_release"
        or "on_request" is served by every supervisor. QueueExists if it has another mode, or another value of an option
        that is fixed for its life.
        """
        where = f"queue {name!r}"
        given = stored(parse_options(options, where, check_mode(mode, where)))
        Registry(self.link(), self.prefix).create(name, mode, max_queues, stored_defaults(mode), given)
        return self.queue(name)

    def delete_queue(self, name: str, *, force: bool = False) -> int:
        """Ends the queue at once; how many jobs that dropped. QueueNotEmpty if it holds any, dead ones too, unless
        `force`.

        Every supervisor that serves it ends its processes, with the jobs that run. What was dropped stays in Redis
        until a supervisor has written it to its failed log: about a minute later, or after the next one starts. Before
        that the name cannot be used again (BeingDeleted); that of an empty queue can at once.
        """
        registry = Registry(self.link(), self.prefix)
        dropped = registry.delete(name, force=force)
        try:
            while registry.purge(name, _leave_to_a_supervisor):
                pass
        except _LeftToASupervisor:
            pass
        return dropped

    def queues(self) -> dict[str, str]:
        """Every queue with its mode."""
        return Registry(self.link(), self.prefix).names()

    def close(self) -> None:
        """Closes this thread's connection; the next call makes another."""
        self.link().close()

    def link(self) -> Link:
        """This thread's connection."""
        link: Link | None = getattr(self._local, "link", None)
        if link is None or self._local.pid != os.getpid():
            link = self._local.link = Link(self.url, name="forq-client")
            self._local.pid = os.getpid()
        return link


class Queue:
    """One queue. Every call raises UnknownQueue if it does not exist."""

    def __init__(self, client: Client, name: str) -> None:
        self.name = name
        self._client = client
        # Of the thread that enqueued last.
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
        if_exists: str = "update",
        update_data: bool = True,
        update_run_at: bool | str = True,
        reset_counts: bool | None = None,
        durable: str | None = None,
    ) -> str:
        """Stores a job and returns its id; when it returns, the job is in Redis.

        `run_at` (epoch seconds or a datetime with a zone) or `run_in` (seconds or a timedelta): not before that time.

        If the connection breaks in between, OutcomeUnknown is raised: the job may be stored or not. With a `token` the
        call may be repeated: a token is remembered for the queue's dedup_ttl, and gets the id it got the first time.

        If the queue holds a job of this id, it is updated: its data (with priority, identifier and type) if
        `update_data`, its time if `update_run_at` (True, False, "if_later", "if_earlier"), and its counts start anew if
        `reset_counts` (default: as update_data). While that job runs, this one waits behind it, and does so when it
        ends. if_exists="skip" leaves the other job as it is, "refuse" raises Exists.

        durable="replica": when it returns, the job is on a replica of Redis too. NoReplica if there is none (nothing
        was stored); OutcomeUnknown if no replica has acknowledged the job in time: it is stored, and may still be lost
        with the master. With a `token` the call may be repeated.
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
        )
        update = Update(if_exists, update_data, update_run_at, reset_counts)
        return self._producer().enqueue([job], update, durable)[0]

    def enqueue_many(
        self, jobs: Iterable[Any], *, tokens: Iterable[str] | None = None, durable: str | None = None
    ) -> list[str]:
        """Stores many jobs, each given as its data; returns their ids.

        They are sent in chunks, each stored whole or not at all. PartlyStored tells what was stored before a chunk
        failed, and why it did. `durable`: as for `enqueue`, for each chunk.

        With `tokens`, one for each job in the same order, the whole call may be repeated, after PartlyStored and
        OutcomeUnknown too: what is stored is not stored again, and gets the id it got the first time.
        """
        if tokens is None:
            return self._producer().enqueue_many(plain_jobs(jobs), durable=durable)
        if isinstance(tokens, str):
            raise UsageError(f"tokens {shown(tokens)} is not allowed: a token for each job")
        if isinstance(jobs, Sized) and isinstance(tokens, Sized) and len(jobs) != len(tokens):
            raise UsageError(f"there are {len(jobs)} jobs and {len(tokens)} tokens: each job needs a token of its own")
        return self._producer().enqueue_many(jobs_with_tokens(jobs, tokens), durable=durable)

    def enqueue_jobs(
        self, jobs: Iterable[NewJob], *, if_exists: str = "update", durable: str | None = None
    ) -> list[str]:
        """The same for jobs made with `forq.client.new_job(data, id=…, priority=…, token=…, run_at=…)`."""
        return self._producer().enqueue_many(jobs, Update(if_exists), durable)

    def cancel(self, id: str) -> bool:
        """Takes a waiting, scheduled or blocked job away; False if there is none (it runs, has ended, or never was)."""
        return self._producer().cancel(id)

    def remove(self, id: str) -> bool:
        """Takes a job away. A running one is not interrupted, but forgotten when it ends, whatever its outcome."""
        return self._producer().remove(id)

    def wait_release(self, id: str, timeout: float | timedelta | None = None) -> Release | None:
        """Awaits the release of this item of a queue of mode auto_release; None when `timeout` (seconds) is over.

        It may be awaited before it is enqueued. When the call returns, the item has left the queue.
        """
        return get_release(self._leases(), id, mode="auto_release", wait_seconds=_seconds(timeout))

    def next_release(self, timeout: float | timedelta | None = None) -> Release | None:
        """The same for whatever item is released next."""
        return get_release(self._leases(), None, mode="auto_release", wait_seconds=_seconds(timeout))

    def dequeue(
        self,
        id: str | None = None,
        *,
        wait: float | timedelta | None = None,
        lease: float | timedelta | None = None,
    ) -> Release | None:
        """Takes the next item, or this one, out of a queue of mode on_request; None if there is none.

        `wait`: how long to wait for one (seconds; default: not at all). Without a `lease` the item has left the queue
        when the call returns. With one it has not: `ack()` it within that time, else it goes back to the front.
        """
        lease_seconds = _seconds(lease)
        if lease_seconds is not None and not MIN_LEASE_SECONDS <= lease_seconds <= MAX_LEASE_SECONDS:
            allowed = f"{MIN_LEASE_SECONDS} to {MAX_LEASE_SECONDS:.0f} seconds"
            raise UsageError(f"lease {shown(lease)} is not allowed: {allowed}")
        wait_seconds = _seconds(wait) or 0.0
        mode = "on_request"
        return get_release(self._leases(), id, mode=mode, wait_seconds=wait_seconds, lease_seconds=lease_seconds)

    def wait(self, id: str, timeout: float | timedelta | None = None) -> Any:
        """What the job's handler returned, once it is done; for a queue that keeps results (keep_done).

        JobDead if it failed for good (a retry is no end), UnknownJob if there is none, it was cancelled, or its result
        is not kept any more; NoResult if it is done and has none; WaitTimeout after `timeout` (seconds); UsageError if
        the queue keeps nothing. It goes on when Redis was away meanwhile.
        """
        return wait_for_result(ResultWaiter(self._client.link(), self._client.prefix, self.name, id), _seconds(timeout))

    def job(self, id: str) -> dict[str, Any]:
        """Everything known about a job; UnknownJob if the queue has none of that id."""
        return self._inspector().job(id)

    def pause(self) -> None:
        """No more jobs are begun, by whatever supervisor; what runs goes on. It is kept in Redis until `resume`."""
        self._registry().pause(self.name, paused=True)

    def resume(self) -> None:
        """Jobs are begun again: at once, but suspects, which wait for the next heartbeat of a supervisor (5 s)."""
        self._registry().pause(self.name, paused=False)

    def drain(self, timeout: float | timedelta | None = None) -> None:
        """Returns when nothing waits or runs any more; WaitTimeout, with what is left, after `timeout` (seconds).

        Jobs with a time ahead, those of the retry lane and fail jobs are not waited for. It only waits: while the queue
        is paused, or no supervisor serves it, that lasts until somebody changes it.
        """
        seconds = _seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        looks = Backoff(FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS)
        while True:
            counts = self._inspector().counts()
            if counts.waiting + counts.active == 0:
                return
            left_seconds = LAST_LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left_seconds <= 0:
                paused = "; it is paused" if counts.paused else "" if self._registry().served(self.name) else _UNSERVED
                left = f"{counts.waiting} waiting, {counts.active} active"
                raise WaitTimeout(f"queue {self.name!r} is not drained yet: {left}{paused}")
            time.sleep(min(looks.fail(), left_seconds))

    def jobs(self, state: State | None = None, limit: int = 100, after: str | None = None) -> Page:
        """A page of jobs (id, identifier, state), in the order in which they will run; of done ones the last first."""
        return self._inspector().jobs(state, limit, after)

    def dead(self, limit: int = 100, after: str | None = None) -> DeadPage:
        """A page of dead jobs (id, fence, identifier, died_at, error, message), the newest first."""
        return self._dead().page(limit, after)

    @overload
    def retry_dead(self, id: str) -> str: ...  # type: ignore[overload-overlap]  # a text is an iterable of texts, too
    @overload
    def retry_dead(self, id: Iterable[str]) -> DeadChanged: ...
    @overload
    def retry_dead(self, *, all: Literal[True]) -> DeadChanged: ...
    def retry_dead(self, id: str | Iterable[str] | None = None, *, all: bool = False) -> str | DeadChanged:
        """The dead job waits again with its counts reset. `id`: its id (the newest of that id), or id@fence.

        Returns its id@fence. UnknownJob if there is none, Exists if a live job has that id, QueueFull.

        Of several ids, or with all=True of all that are dead now, it returns how many were retried (`done`), and of the
        others the error (`refused`, by id); they stay dead. The call may be repeated.
        """
        dead = self._dead()
        return dead.retry(id) if isinstance(id, str) else dead.retry_many(_references(id, all))

    @overload
    def discard_dead(self, id: str) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def discard_dead(self, id: Iterable[str]) -> DeadChanged: ...
    @overload
    def discard_dead(self, *, all: Literal[True]) -> DeadChanged: ...
    def discard_dead(self, id: str | Iterable[str] | None = None, *, all: bool = False) -> str | DeadChanged:
        """The dead job is forgotten. Returns its id@fence; UnknownJob if there is none. Of several ids, or of all: as
        `retry_dead`."""
        dead = self._dead()
        return dead.discard(id) if isinstance(id, str) else dead.discard_many(_references(id, all))

    def schedule(
        self,
        key: str,
        *,
        every: float | str | timedelta | None = None,
        cron: str | None = None,
        zone: str | None = None,
        data: Any = None,
        priority: int = DEFAULT_PRIORITY,
        type: str | None = None,
        overlap: str = "skip",
        catch_up: str = "once",
        jitter: float | str | timedelta = 0,
    ) -> datetime:
        """Makes a job at each tick: `every` so often (seconds, a timedelta, "5m"), or at the times of a 5-field `cron`
        expression in a time `zone` (default UTC). Returns the next tick.

        `overlap`: "skip" a tick while the job of an earlier one is unfinished, or "queue" it all the same. `catch_up`:
        make up for ticks that nobody was there for "once", for "all" of them, or for "none". `jitter`: the job does not
        run before its tick plus a random part of this. A schedule of this key is replaced; the same changes nothing.
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

    def schedules(self) -> list[dict[str, Any]]:
        """Every schedule of the queue: its definition, its next tick, its counts."""
        return self._schedules().all()

    def unschedule(self, key: str) -> bool:
        """Ends a schedule; the jobs that it has made stay. False if there is none."""
        return self._schedules().drop(key)

    def trigger(self, key: str) -> str:
        """A schedule makes a job now, and keeps its ticks; the job's id. Exists if that would overlap."""
        return self._schedules().trigger(key)

    def status(self) -> Mapping[str, Any]:
        """How many jobs are in which state."""
        return asdict(self._inspector().counts())

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


_UNSERVED = "; no supervisor serves it"


class _LeftToASupervisor(Exception):
    pass


def _leave_to_a_supervisor(dropped: list[dict[str, object]]) -> None:
    """What a deleted queue held belongs into a failed log, which only supervisors have."""
    if dropped:
        raise _LeftToASupervisor


def _references(ids: Iterable[str] | None, everything: bool) -> Iterable[str] | None:
    if (ids is None) != everything:
        raise UsageError("either an id, several ids, or all=True is needed")
    return ids


def _seconds(given: float | timedelta | None) -> float | None:
    if given is None:
        return None
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise UsageError(f"{shown(given)} is not allowed: a number of seconds from 0, or a timedelta")
    return float(seconds)
