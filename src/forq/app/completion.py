"""as_completed: waits for many jobs and yields each when it ends.

1. Subscribes to the channels of all jobs, then checks the jobs in batches. A check registers a waiter in Redis.
2. Yields the jobs that have ended, by the time of their end; then each job whose message arrives.
3. Checks the other jobs again before their registrations expire, and after a broken connection.

There is one subscription per Redis server. asyncio shares that of the app's AsyncClient.
"""

import asyncio
import select
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forq.app.app import App
from forq.app.tasks import JobRef
from forq.broker.dead import DeadJobs
from forq.broker.keys import ended_channel, queue_base
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.results import AwaitedJob, WaitTarget, check_jobs, is_ahead
from forq.client import to_seconds
from forq.errors import RedisUnavailable, UnknownQueue, UsageError, WaitTimeout
from forq.procs.backoff import reconnecting
from forq.redis_url import database_of
from forq.result_wait import REGISTRATION_SECONDS
from forq.values import shown

if TYPE_CHECKING:
    # It imports greenlet, which only asyncio needs.
    from forq.broker.async_subscription import Listener

# Jobs per round trip. The replies for ended jobs contain their results, which may be long.
CHECK_BATCH = 100
# The order of jobs whose end a message has announced: after those that a check has found.
_JUST_NOW = float("inf")

T = TypeVar("T")


def as_completed(refs: Iterable[JobRef[T]], timeout: float | timedelta | None = None) -> "Completion[T]":
    """Yields refs when their jobs end, in the order of their ends, for `for` and `async for`.

        for ref in forq.as_completed(refs, timeout=60):
            print(ref.result())

    Jobs that had ended come first. A job that is dead, cancelled or unknown has ended, too: its `result()` raises the
    error. Refs to the same job come once. WaitTimeout if jobs are left `timeout` seconds after the start of the loop;
    UsageError if a queue keeps no results. The wait survives outages of Redis.
    """
    return Completion(refs, timeout)


class Completion(Generic[T]):
    """The iterable that `as_completed` returns. Each loop over it starts anew."""

    def __init__(self, refs: Iterable[JobRef[T]], timeout: float | timedelta | None) -> None:
        self._refs = list(refs)
        self._timeout_seconds = to_seconds(timeout)
        for ref in self._refs:
            if not isinstance(ref, JobRef):
                raise UsageError(
                    f"as_completed takes JobRefs, as `enqueue` of a task returns them; {shown(ref)} is not allowed"
                )

    def __iter__(self) -> Iterator[JobRef[T]]:
        wait = _Wait(self._refs, self._timeout_seconds)
        subscriptions = {server: Subscription(server.url, name="forq-waiter", exact=True) for server in wait.servers}
        try:
            while wait.servers:
                for server in wait.due():
                    with wait.retrying(server):
                        _refresh(server, subscriptions[server])
                yield from wait.take_ended()
                for server in subscriptions.keys() - set(wait.servers):
                    subscriptions.pop(server).close()
                if wait.servers:
                    _wait_for_messages(wait, subscriptions)
                    wait.check_deadline()
        finally:
            for subscription in subscriptions.values():
                subscription.close()

    async def __aiter__(self) -> AsyncIterator[JobRef[T]]:
        wait = _Wait(self._refs, self._timeout_seconds)
        arrived = asyncio.Event()
        listeners: dict[_Server, Listener] = {}
        try:
            while wait.servers:
                for server in wait.due():
                    with wait.retrying(server):
                        await _async_refresh(server, listeners, arrived)
                for ref in wait.take_ended():
                    yield ref
                for server in listeners.keys() - set(wait.servers):
                    listeners.pop(server).close()
                if wait.servers:
                    await _async_wait_for_messages(wait, listeners, arrived)
                    wait.check_deadline()
        finally:
            for listener in listeners.values():
                listener.close()


class _Job:
    __slots__ = ("channel", "ended_ms", "ref", "target")

    def __init__(self, ref: JobRef[Any], channel: str) -> None:
        self.ref = ref
        self.channel = channel
        # None until a check has found the job.
        self.target: WaitTarget | None = None
        self.ended_ms = _JUST_NOW

    def awaited(self) -> AwaitedJob:
        return AwaitedJob(self.ref.id, self.target, self.ref._identity, self.ref._keeps)


class _Server:
    """The jobs on one Redis server: `jobs`, by channel, have not ended; `ended` were not yielded yet."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.url = app.client.url
        # Several jobs may have the same id.
        self.jobs: dict[str, list[_Job]] = {}
        self.ended: list[_Job] = []
        # Jobs to check now, besides the regular checks of all.
        self.unsure: list[_Job] = []
        # Times of the next and of the last successful check, on the monotonic clock; 0: there was none.
        self.check_at = self.checked_at = 0.0
        self.backoff = reconnecting()
        self._db = database_of(self.url)

    def add(self, ref: JobRef[Any]) -> None:
        base = queue_base(ref.app.client.prefix, ref.queue)
        channel = ended_channel(base, self._db, ref.id)
        same_id = self.jobs.setdefault(channel, [])
        if all(job.ref._identity != ref._identity for job in same_id):
            same_id.append(_Job(ref, channel))

    def pending(self) -> list[_Job]:
        return [job for same_id in self.jobs.values() for job in same_id]

    def all_are_due(self) -> bool:
        return self.check_at <= time.monotonic()

    def some_are_due(self) -> bool:
        """Not while Redis is unavailable: then the next check is one of all."""
        return bool(self.unsure) and not self.backoff.failures

    def check_all(self, link: Link) -> None:
        """Registers waiters for all jobs, and moves those that have ended."""
        self._check(link, self.pending())

    def check_reported(self, link: Link, messages: Iterable[tuple[str, str]]) -> None:
        """The jobs whose ends were reported during `check_all` ended among those that it found, so their times are
        needed, too."""
        self._check(link, [job for channel in dict(messages) for job in self.jobs.get(channel, ())])

    def check_unsure(self, link: Link) -> None:
        unsure, self.unsure = self.unsure, []
        try:
            self._check(link, [job for job in unsure if job in self.jobs.get(job.channel, ())])
        except RedisUnavailable:
            self.unsure += unsure
            raise

    def plan_next_check(self) -> None:
        self.backoff.reset()
        self.checked_at = time.monotonic()
        self.check_at = self.checked_at + REGISTRATION_SECONDS / 2

    def _check(self, link: Link, checked: list[_Job]) -> None:
        queues: dict[tuple[str, str], list[_Job]] = {}
        for job in checked:
            queues.setdefault((job.ref.app.client.prefix, job.ref.queue), []).append(job)
        for (prefix, queue), of_queue in queues.items():
            without_time: list[_Job] = []
            for start in range(0, len(of_queue), CHECK_BATCH):
                jobs = of_queue[start : start + CHECK_BATCH]
                awaited = [job.awaited() for job in jobs]
                base = queue_base(prefix, queue)
                checks = check_jobs(link, base, queue, awaited, round(REGISTRATION_SECONDS * 1000))
                for job, check in zip(jobs, checks, strict=True):
                    job.target = check.target
                    if check.state != "live":
                        job.ended_ms = check.ended_ms or 0
                        if check.ended_ms is None:
                            without_time.append(job)
                        self._end(job)
                    elif check.target is None:
                        self.unsure.append(job)
            if without_time:
                # Without its queue, no job has a time.
                with suppress(UnknownQueue):
                    died_ms = DeadJobs(link, prefix, queue).died_ms(job.ref.id for job in without_time)
                    for job in without_time:
                        job.ended_ms = died_ms.get(job.ref.id, 0)

    def read(self, messages: Iterable[tuple[str, str]]) -> None:
        """Moves the jobs that have ended. A message is OUTCOME FENCE MARK."""
        for channel, message in messages:
            _, fence, mark, *_ = (*message.split(" "), "", "")
            for job in list(self.jobs.get(channel, ())):
                if job.target is None or mark in ("", "-"):
                    # An earlier release sends no mark: the message may be about an earlier job with this id.
                    self.unsure.append(job)
                elif mark == job.target.mark and is_ahead(job.ref._identity, int(fence)):
                    job.target = None
                    self.unsure.append(job)
                elif mark == job.target.mark:
                    self._end(job)

    def _end(self, job: _Job) -> None:
        same_id = self.jobs[job.channel]
        same_id.remove(job)
        if not same_id:
            del self.jobs[job.channel]
        self.ended.append(job)


class _Wait:
    """One loop over the jobs: `servers` still have jobs to yield."""

    def __init__(self, refs: Iterable[JobRef[Any]], timeout_seconds: float | None) -> None:
        by_url: dict[str, _Server] = {}
        for ref in refs:
            url = ref.app.client.url
            if url not in by_url:
                by_url[url] = _Server(ref.app)
            by_url[url].add(ref)
        self.servers = list(by_url.values())
        self._count = sum(len(server.pending()) for server in self.servers)
        self._timeout_seconds = timeout_seconds
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._failure: RedisUnavailable | None = None

    def due(self) -> list[_Server]:
        return [server for server in self.servers if server.all_are_due() or server.some_are_due()]

    def retrying(self, server: _Server) -> "_Retrying":
        return _Retrying(self, server)

    def fail(self, server: _Server, failure: RedisUnavailable) -> None:
        self._failure = failure
        server.check_at = time.monotonic() + server.backoff.fail()

    def take_ended(self) -> Iterator[JobRef[Any]]:
        """The refs of jobs that have ended, in the order of their ends."""
        ended = sorted((job for server in self.servers for job in server.ended), key=attrgetter("ended_ms"))
        for server in self.servers:
            server.ended = []
        self.servers = [server for server in self.servers if server.jobs]
        for job in ended:
            job.ref._has_ended = True
            yield job.ref

    def seconds_to_wait(self) -> float:
        """How long to wait for messages."""
        until = min(server.check_at for server in self.servers)
        if any(server.some_are_due() for server in self.servers):
            return 0.0
        return max(0.0, (until if self._deadline is None else min(until, self._deadline)) - time.monotonic())

    def check_deadline(self) -> None:
        """WaitTimeout if the time is up. Before that, a last check finds jobs whose messages were not read in time."""
        if self._deadline is None or time.monotonic() < self._deadline or any(server.ended for server in self.servers):
            return
        unchecked = [each for each in self.servers if each.checked_at < self._deadline and not each.backoff.failures]
        if unchecked:
            for server in unchecked:
                server.check_at = 0.0
            return
        left = [job.ref for server in self.servers for job in server.pending()]
        text = f"{len(left)} of {self._count} jobs have not ended within {self._timeout_seconds:g} s"
        text += f"; `forqctl why {left[0].queue} {left[0].id}` explains the first"
        if any(server.backoff.failures for server in self.servers) and self._failure is not None:
            text += f"; Redis is unavailable: {self._failure}"
        raise WaitTimeout(text)


class _Retrying:
    """While Redis is unavailable the check is repeated. Before the first check it fails at once, like any call."""

    def __init__(self, wait: _Wait, server: _Server) -> None:
        self._wait = wait
        self._server = server

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> bool:
        if not isinstance(exc, RedisUnavailable) or not self._server.checked_at:
            return False
        self._wait.fail(self._server, exc)
        return True


def _refresh(server: _Server, subscription: Subscription) -> None:
    if not subscription.connected:
        subscription.patterns = list(server.jobs)
        subscription.connect()
    link = server.app.client.link()
    if server.all_are_due():
        server.check_all(link)
        server.check_reported(link, subscription.receive())
        server.plan_next_check()
    server.check_unsure(link)


def _wait_for_messages(wait: _Wait, subscriptions: dict[_Server, Subscription]) -> None:
    poll = select.poll()
    for subscription in subscriptions.values():
        if subscription.connected:
            poll.register(subscription.fileno(), select.POLLIN)
    poll.poll(wait.seconds_to_wait() * 1000)
    for server, subscription in subscriptions.items():
        if subscription.connected:
            with wait.retrying(server):
                server.read(subscription.receive())


async def _async_refresh(server: _Server, listeners: "dict[_Server, Listener]", arrived: asyncio.Event) -> None:
    client = server.app.async_client
    if server not in listeners:
        listeners[server] = await client._here().subscription.listen_to_many(list(server.jobs), arrived.set)
    listener = listeners[server]
    try:
        if server.all_are_due():
            await client._run(lambda pooled: server.check_all(pooled.link()))
            await client._run(lambda pooled: server.check_reported(pooled.link(), listener.take()))
            server.plan_next_check()
        if server.unsure:
            await client._run(lambda pooled: server.check_unsure(pooled.link()))
    except RedisUnavailable:
        listeners.pop(server).close()
        raise


async def _async_wait_for_messages(wait: _Wait, listeners: "dict[_Server, Listener]", arrived: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(wait.seconds_to_wait()):
            await arrived.wait()
    arrived.clear()
    for server, listener in list(listeners.items()):
        with wait.retrying(server):
            try:
                server.read(listener.take())
            except RedisUnavailable:
                listeners.pop(server).close()
                raise
