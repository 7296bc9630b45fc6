"""The Python API for asyncio: the methods of Client and Queue as coroutines.

1. A call runs the method of Client or Queue in a greenlet (broker/async_connection.py), on a connection from a pool.
   Only the waits are written anew here.
2. All waits of a client share one subscription.
3. Connections and subscription belong to one event loop of one process; in another, the client opens its own.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

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
from forq.async_batch import AsyncBatch
from forq.batch import membership_of
from forq.broker.async_connection import run_blocking
from forq.broker.async_link import AsyncLink, Pool
from forq.broker.async_subscription import Listener, SharedSubscription
from forq.broker.batches import check_batch_id
from forq.broker.chunks import NewJob
from forq.broker.dead import DeadChanged, DeadPage
from forq.broker.enqueue import JobIdentity
from forq.broker.inspect import Page
from forq.broker.keys import DEFAULT_PRIORITY, ended_channel, handed_channel, queue_base
from forq.broker.leases import Lease, LeaseReply, Leases
from forq.broker.link import CALL_TIMEOUT_SECONDS, CONNECT_TIMEOUT_SECONDS
from forq.broker.results import ResultWaiter
from forq.broker.scripts import script
from forq.broker.targets import IMPORT_SECONDS
from forq.client import (
    DEFAULT_MAX_QUEUES,
    MAX_DRAIN_SECONDS,
    MIN_DRAIN_SECONDS,
    Client,
    Queue,
    check_lease,
    check_timeout,
    read_config,
    to_seconds,
)
from forq.errors import ForqError, LeaseLapsed, RedisUnavailable, UsageError
from forq.job import Job, new_id
from forq.paths import key_prefix, redis_url
from forq.procs.backoff import Backoff, reconnecting
from forq.queue_control import ANSWER_SECONDS
from forq.redis_url import database_of
from forq.release_wait import RETRY_PAUSE_SECONDS, RETRY_SECONDS, ack_retry_seconds
from forq.result_wait import REGISTRATION_SECONDS, ResultWait
from forq.values import check_job_id, check_queue_name, shown

__all__ = ["AsyncClient", "AsyncQueue", "AsyncRelease"]

DEFAULT_MAX_CONNECTIONS = 50
MAX_CONNECTIONS = 10_000

T = TypeVar("T")


class AsyncClient:
    """Client for asyncio; see `forq.Client` for `url`, `prefix`, `timeout` and `connect_timeout`.

    `max_connections`: each call uses one connection while it talks to Redis; further calls wait for a free one, which
    counts against their `timeout`. Waits for results and releases share one more connection.

    A cancelled call closes its connection: a cancelled enqueue has stored its job or not. Close the client at the end
    (`async with`, or `aclose`). It may be shared between event loops and across a fork: each opens connections of its
    own.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str | None = None,
        timeout: float | timedelta = CALL_TIMEOUT_SECONDS,
        connect_timeout: float | timedelta = CONNECT_TIMEOUT_SECONDS,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self.url = url or redis_url()
        self.prefix = key_prefix() if prefix is None else prefix
        self.timeout_seconds = check_timeout("timeout", timeout)
        self.connect_timeout_seconds = check_timeout("connect_timeout", connect_timeout)
        if type(max_connections) is not int or not 1 <= max_connections <= MAX_CONNECTIONS:
            raise UsageError(f"max_connections {shown(max_connections)} is not allowed: 1 to {MAX_CONNECTIONS}")
        self.max_connections = max_connections
        self._last: _Loop | None = None
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._pid = os.getpid()
        # The connections of the process that this one was forked from. Kept, because their destructors could change
        # the epoll set that both processes share.
        self._inherited: list[object] = []
        # Reads the scripts from disk here, not in the event loop.
        script("enqueue")

    @classmethod
    def from_config(
        cls,
        file: str | os.PathLike[str] | None = None,
        *,
        timeout: float | timedelta = CALL_TIMEOUT_SECONDS,
        connect_timeout: float | timedelta = CONNECT_TIMEOUT_SECONDS,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> Self:
        """See Client.from_config."""
        url, prefix = read_config(file)
        return cls(
            url, prefix=prefix, timeout=timeout, connect_timeout=connect_timeout, max_connections=max_connections
        )

    def queue(self, name: str) -> "AsyncQueue":
        return AsyncQueue(self, check_queue_name(name))

    async def create_queue(
        self, name: str, *, mode: Mode = "work", max_queues: int = DEFAULT_MAX_QUEUES, **options: Unpack[QueueOptions]
    ) -> "AsyncQueue":
        """See Client.create_queue."""
        await self._run(lambda client: client.create_queue(name, mode=mode, max_queues=max_queues, **options))
        return self.queue(name)

    async def delete_queue(self, name: str, *, force: bool = False) -> int:
        """See Client.delete_queue."""
        return await self._run(lambda client: client.delete_queue(name, force=force))

    def batch(
        self,
        queue: str,
        *,
        id: str | None = None,
        on_done: NewJob | None = None,
        on_end: NewJob | None = None,
        on_dead: NewJob | None = None,
        results: bool = False,
    ) -> AsyncBatch:
        """See Client.batch. It is opened by `async with`, or by the first call."""
        batch_id = new_id() if id is None else id
        return AsyncBatch(
            self,
            check_queue_name(queue),
            check_batch_id(batch_id),
            lambda client: client.batch(
                queue, id=batch_id, on_done=on_done, on_end=on_end, on_dead=on_dead, results=results
            ),
        )

    def find_batch(self, queue: str, id: str) -> AsyncBatch:
        """See Client.find_batch."""
        return AsyncBatch(
            self, check_queue_name(queue), check_batch_id(id), lambda client: client.find_batch(queue, id)
        )

    def batch_of(self, job: Job) -> AsyncBatch:
        """See Client.batch_of."""
        queue, id, _ = membership_of(job)
        return AsyncBatch(self, queue, id, lambda client: client.batch_of(job))

    async def queues(self) -> dict[str, Mode]:
        """See Client.queues."""
        return await self._run(lambda client: client.queues())

    async def supervisors(self) -> list[SupervisorInfo]:
        """See Client.supervisors."""
        return await self._run(lambda client: client.supervisors())

    async def aclose(self) -> None:
        """Closes the connections of this event loop; the next call opens others. Calls that wait for results or
        releases end with a ForqError."""
        loop = asyncio.get_running_loop()
        self._last = None
        if self._pid == os.getpid() and loop in self._loops:
            await self._loops.pop(loop).aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _run(self, call: Callable[["PooledClient"], T]) -> Coroutine[Any, Any, T]:
        return self._here().run(call)

    def _here(self) -> "_Loop":
        """The connections of the running event loop."""
        loop, last = asyncio.get_running_loop(), self._last
        if last is not None and last.loop is loop and self._pid == os.getpid():
            return last
        if self._pid != os.getpid():
            self._inherited.append(self._loops)
            self._loops, self._pid = {}, os.getpid()
        for other in list(self._loops):
            if other.is_closed() and (ended := self._loops.pop(other, None)):
                # Its futures can no longer wake anybody.
                with suppress(RuntimeError):
                    ended.close()
        found = self._last = self._loops.setdefault(loop, _Loop(self, loop))
        return found


class PooledClient(Client):
    """A Client on a link of an event loop."""

    def __init__(self, owner: AsyncClient) -> None:
        super().__init__(
            owner.url,
            prefix=owner.prefix,
            timeout=owner.timeout_seconds,
            connect_timeout=owner.connect_timeout_seconds,
        )
        self._link = AsyncLink(
            self.url,
            name="forq-client",
            timeout_seconds=self.timeout_seconds,
            connect_timeout_seconds=self.connect_timeout_seconds,
        )
        self._last_queue: Queue | None = None

    def link(self) -> AsyncLink:
        return self._link

    def queue(self, name: str) -> Queue:
        queue = self._last_queue
        if queue is None or queue.name != name:
            queue = self._last_queue = super().queue(name)
        return queue


class _Loop:
    """The connections, the subscription and the background tasks of a client in one event loop."""

    def __init__(self, owner: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pool = Pool(partial(PooledClient, owner), owner.max_connections, owner.timeout_seconds)
        self.subscription = SharedSubscription(
            owner.url,
            name="forq-waiter",
            timeout_seconds=owner.timeout_seconds,
            connect_timeout_seconds=owner.connect_timeout_seconds,
        )
        # The name under which awaiters are registered, in place of a clerk's.
        self.clerk = new_id()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, call: Callable[[PooledClient], T]) -> T:
        """Runs methods of Client and Queue on a connection from the pool."""
        client = self.pool.take_free() or await self.pool.take()
        try:
            return await run_blocking(lambda: call(client))
        finally:
            self.pool.give_back(client)

    def spawn(self, cleanup: Coroutine[Any, Any, None]) -> None:
        """Runs the cleanup of a cancelled call, which must not wait for it."""
        if self.loop.is_closed():
            cleanup.close()
            return
        task = self.loop.create_task(cleanup)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        self.subscription.close()
        try:
            # The calls that waited end now, and may have cleaning up to do.
            await asyncio.sleep(0)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=RETRY_SECONDS)
        finally:
            self.close()
        # The event loop closes the sockets in its next pass.
        await asyncio.sleep(0)

    def close(self) -> None:
        self.pool.close()
        self.subscription.close()


@dataclass(frozen=True, slots=True)
class AsyncRelease:
    """An item taken from its queue; see `forq.client.Release`."""

    id: str
    identifier: str
    data: Any
    fence: int
    enqueued_at: float
    lease_seconds: float
    _queue: "AsyncQueue" = field(repr=False, compare=False)
    _awaiter: str = field(repr=False, compare=False)

    async def ack(self) -> None:
        """See Release.ack."""

        def ack(client: PooledClient) -> None:
            self._queue._leases(client).ack(self._awaiter, self.id, self.fence)

        await _retry_while_unavailable(self._queue._ack_retry_seconds, lambda: self._queue._client._run(ack))

    async def give_back(self) -> bool:
        """See Release.give_back."""

        def leave(client: PooledClient) -> bool:
            return self._queue._leases(client).leave(self._awaiter)

        return await _retry_while_unavailable(RETRY_SECONDS, lambda: self._queue._client._run(leave))


class AsyncQueue:
    """One queue. Every call raises UnknownQueue if it does not exist."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.name = name
        self._client = client

    async def enqueue(
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
        """See Queue.enqueue. A call that is cancelled has stored the job or not: use a `token` to repeat it."""
        return await self._run(
            lambda queue: queue.enqueue(
                data,
                id=id,
                identifier=identifier,
                priority=priority,
                run_at=run_at,
                run_in=run_in,
                type=type,
                token=token,
                if_exists=if_exists,
                update_data=update_data,
                update_run_at=update_run_at,
                reset_counts=reset_counts,
                durable=durable,
                after=after,
                when=when,
                with_results=with_results,
                **own,
            )
        )

    async def enqueue_many(
        self,
        jobs: Iterable[Any],
        *,
        tokens: Iterable[str] | None = None,
        durable: Durable | None = None,
        **own: Unpack[OwnOptions],
    ) -> list[str]:
        """See Queue.enqueue_many."""
        return await self._run(lambda queue: queue.enqueue_many(jobs, tokens=tokens, durable=durable, **own))

    async def enqueue_jobs(
        self,
        jobs: Iterable[NewJob],
        *,
        if_exists: IfExists = "update",
        durable: Durable | None = None,
        **own: Unpack[OwnOptions],
    ) -> list[str]:
        """See Queue.enqueue_jobs."""
        return await self._run(lambda queue: queue.enqueue_jobs(jobs, if_exists=if_exists, durable=durable, **own))

    async def cancel(self, id: str) -> bool:
        """See Queue.cancel."""
        return await self._run(lambda queue: queue.cancel(id))

    async def remove(self, id: str) -> bool:
        """See Queue.remove."""
        return await self._run(lambda queue: queue.remove(id))

    async def run_now(self, id: str) -> None:
        """See Queue.run_now."""
        await self._run(lambda queue: queue.run_now(id))

    async def wait_release(self, id: str, timeout: float | timedelta | None = None) -> AsyncRelease | None:
        """See Queue.wait_release."""
        return await self._get_release(id, mode="auto_release", wait_seconds=to_seconds(timeout))

    async def next_release(self, timeout: float | timedelta | None = None) -> AsyncRelease | None:
        """See Queue.next_release."""
        return await self._get_release(None, mode="auto_release", wait_seconds=to_seconds(timeout))

    async def dequeue(
        self,
        id: str | None = None,
        *,
        wait: float | timedelta | None = None,
        lease: float | timedelta | None = None,
    ) -> AsyncRelease | None:
        """See Queue.dequeue. If the call is cancelled, an item that it was handed goes back to the front."""
        lease_seconds, wait_seconds = check_lease(lease), to_seconds(wait) or 0.0
        return await self._get_release(id, mode="on_request", wait_seconds=wait_seconds, lease_seconds=lease_seconds)

    async def wait(self, id: str, timeout: float | timedelta | None = None) -> Any:
        """See Queue.wait."""
        return await self._wait_for_end(id, timeout)

    async def _wait_for_end(
        self,
        id: str,
        timeout: float | timedelta | None = None,
        identity: JobIdentity | None = None,
        *,
        keeps: bool = False,
        has_ended: bool = False,
    ) -> Any:
        """`wait`. With `has_ended` the first check comes before the subscription, which is then not needed."""
        wait = ResultWait(self.name, check_job_id(id), to_seconds(timeout))
        channel = ended_channel(self._base, database_of(self._client.url), id)
        check = partial(self._client._run, lambda client: wait.check(self._waiter(client, id, identity, keeps)))
        if has_ended and (ended := await check()) is not None:
            return wait.result_of(ended)
        backoff = reconnecting()
        while True:
            listener: Listener | None = None
            try:
                listener = await self._client._here().subscription.listen(channel)
                while (done := await check()) is None:
                    await _wait_for_message(wait, listener)
                return wait.result_of(done)
            except RedisUnavailable as exc:
                # Before the first check it fails at once, like any other call.
                if wait.target is None:
                    raise
                pause_seconds = wait.pause_seconds(backoff.fail(), exc)
            finally:
                if listener is not None:
                    listener.close()
            await asyncio.sleep(pause_seconds)

    async def job(self, id: str) -> JobInfo:
        """See Queue.job."""
        return await self._run(lambda queue: queue.job(id))

    async def pause(self) -> None:
        """See Queue.pause."""
        await self._run(lambda queue: queue.pause())

    async def resume(self) -> None:
        """See Queue.resume."""
        await self._run(lambda queue: queue.resume())

    async def drain(self, timeout: float | timedelta | None = None) -> None:
        """See Queue.drain."""
        seconds = to_seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        intervals = Backoff(MIN_DRAIN_SECONDS, MAX_DRAIN_SECONDS)
        while True:
            counts = await self._run(lambda queue: queue._inspector().counts())
            if counts.waiting + counts.active == 0:
                return
            left_seconds = MAX_DRAIN_SECONDS if deadline is None else deadline - time.monotonic()
            if left_seconds <= 0:
                raise await self._run(partial(Queue._not_drained, counts=counts))
            await asyncio.sleep(min(intervals.fail(), left_seconds))

    async def jobs(self, state: State | None = None, limit: int = 100, after: str | None = None) -> Page:
        """See Queue.jobs."""
        return await self._run(lambda queue: queue.jobs(state, limit, after))

    async def dead(self, limit: int = 100, after: str | None = None) -> DeadPage:
        """See Queue.dead."""
        return await self._run(lambda queue: queue.dead(limit, after))

    @overload
    async def retry_dead(self, id: str) -> str: ...  # type: ignore[overload-overlap]  # str is an Iterable[str]
    @overload
    async def retry_dead(self, id: Iterable[str]) -> DeadChanged: ...
    @overload
    async def retry_dead(self, *, all: Literal[True]) -> DeadChanged: ...
    async def retry_dead(self, id: str | Iterable[str] | None = None, *, all: bool = False) -> str | DeadChanged:
        """See Queue.retry_dead."""
        return await self._run(lambda queue: queue.retry_dead(id, all=all))  # type: ignore[call-overload]

    async def retry_dead_with_dependants(self, id: str) -> DeadChanged:
        """See Queue.retry_dead_with_dependants."""
        return await self._run(lambda queue: queue.retry_dead_with_dependants(id))

    @overload
    async def discard_dead(self, id: str) -> str: ...  # type: ignore[overload-overlap]
    @overload
    async def discard_dead(self, id: Iterable[str]) -> DeadChanged: ...
    @overload
    async def discard_dead(self, *, all: Literal[True]) -> DeadChanged: ...
    async def discard_dead(self, id: str | Iterable[str] | None = None, *, all: bool = False) -> str | DeadChanged:
        """See Queue.discard_dead."""
        return await self._run(lambda queue: queue.discard_dead(id, all=all))  # type: ignore[call-overload]

    async def schedule(
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
        """See Queue.schedule."""
        return await self._run(
            lambda queue: queue.schedule(
                key,
                every=every,
                cron=cron,
                zone=zone,
                data=data,
                priority=priority,
                type=type,
                overlap=overlap,
                catch_up=catch_up,
                jitter=jitter,
            )
        )

    async def schedules(self) -> list[ScheduleInfo]:
        """See Queue.schedules."""
        return await self._run(lambda queue: queue.schedules())

    async def unschedule(self, key: str) -> bool:
        """See Queue.unschedule."""
        return await self._run(lambda queue: queue.unschedule(key))

    async def pause_schedule(self, key: str) -> bool:
        """See Queue.pause_schedule."""
        return await self._run(lambda queue: queue.pause_schedule(key))

    async def resume_schedule(self, key: str) -> bool:
        """See Queue.resume_schedule."""
        return await self._run(lambda queue: queue.resume_schedule(key))

    async def trigger(self, key: str) -> str:
        """See Queue.trigger."""
        return await self._run(lambda queue: queue.trigger(key))

    async def status(self) -> QueueStatus:
        """See Queue.status."""
        return await self._run(lambda queue: queue.status())

    async def kill(
        self,
        id: str,
        *,
        retry: bool = False,
        on: str | None = None,
        timeout: float | timedelta = ANSWER_SECONDS,
    ) -> KillInfo:
        """See Queue.kill. A call that is cancelled may still be carried out."""
        return await self._run(lambda queue: queue.kill(id, retry=retry, on=on, timeout=timeout))

    async def stack(self, *, on: str | None = None, timeout: float | timedelta = ANSWER_SECONDS) -> list[StackInfo]:
        """See Queue.stack."""
        return await self._run(lambda queue: queue.stack(on=on, timeout=timeout))

    async def logs(
        self,
        *,
        lines: int = 100,
        job: str | None = None,
        on: str | None = None,
        timeout: float | timedelta = ANSWER_SECONDS,
    ) -> list[LogRecord]:
        """See Queue.logs."""
        return await self._run(lambda queue: queue.logs(lines=lines, job=job, on=on, timeout=timeout))

    async def restart(
        self,
        *,
        on: str | None = None,
        wait: float | timedelta = IMPORT_SECONDS,
        timeout: float | timedelta = ANSWER_SECONDS,
    ) -> None:
        """See Queue.restart. A call that is cancelled may still be carried out."""
        await self._run(lambda queue: queue.restart(on=on, wait=wait, timeout=timeout))

    def _run(self, call: Callable[[Queue], T]) -> Coroutine[Any, Any, T]:
        return self._client._here().run(lambda client: call(client.queue(self.name)))

    @property
    def _base(self) -> str:
        return queue_base(self._client.prefix, self.name)

    @property
    def _ack_retry_seconds(self) -> float:
        return ack_retry_seconds(self._client.timeout_seconds, self._client.connect_timeout_seconds)

    def _leases(self, client: PooledClient) -> Leases:
        return Leases(client.link(), client.prefix, self.name)

    def _waiter(self, client: PooledClient, job_id: str, identity: JobIdentity | None, keeps: bool) -> ResultWaiter:
        return ResultWaiter(client.link(), client.prefix, self.name, job_id, identity, keeps=keeps)

    async def _enqueue_identified(
        self, jobs: Iterable[NewJob], if_exists: IfExists, durable: Durable | None
    ) -> list[tuple[str, JobIdentity | None]]:
        return await self._run(lambda queue: queue._enqueue_identified(jobs, if_exists, durable))

    async def _get_release(
        self, job_id: str | None, *, mode: str, wait_seconds: float | None, lease_seconds: float | None = None
    ) -> AsyncRelease | None:
        """The next item, or the one with this id; None when `wait_seconds` (None: no limit) are over.

        Without `lease_seconds` the item is acknowledged before it is returned.
        """
        here = self._client._here()
        deadline = float("inf") if wait_seconds is None else time.monotonic() + wait_seconds
        lease_ms = None if lease_seconds is None else round(lease_seconds * 1000)
        while True:
            awaiter = new_id()
            try:
                release = await self._request_release(here, awaiter, job_id, mode, lease_ms, deadline)
                if release is None or lease_seconds is not None:
                    return release
                with suppress(LeaseLapsed):
                    await release.ack()
                    return release
            except BaseException:
                # Return an item that was handed out meanwhile now, not when its lease lapses.
                here.spawn(self._leave(here, awaiter))
                raise

    async def _request_release(
        self, here: "_Loop", awaiter: str, job_id: str | None, mode: str, lease_ms: int | None, deadline: float
    ) -> AsyncRelease | None:
        channel = handed_channel(self._base, database_of(self._client.url), here.clerk)

        def request(register: bool, client: PooledClient) -> LeaseReply:
            leases = self._leases(client)
            return leases.request(awaiter, job_id, mode=mode, register=register, lease_ms=lease_ms, via=here.clerk)

        listener: Listener | None = None
        try:
            while True:
                waiting = time.monotonic() < deadline
                # Registers only once it listens: a message sent earlier would be lost.
                call = partial(self._client._run, partial(request, waiting and listener is not None))
                reply = await _retry_while_unavailable(RETRY_SECONDS, call)
                if reply.lease is not None:
                    return self._release(reply.lease, awaiter)
                if not waiting:
                    return None
                if listener is None:
                    listen = partial(here.subscription.listen, channel, awaiter)
                    listener = await _retry_while_unavailable(RETRY_SECONDS, listen)
                elif reply.valid_ms:
                    try:
                        await listener.receive(min(reply.valid_ms / 2000, deadline - time.monotonic()))
                    except RedisUnavailable:
                        listener.close()
                        listener = None
        finally:
            if listener is not None:
                listener.close()

    async def _leave(self, here: "_Loop", awaiter: str) -> None:
        with suppress(ForqError):
            await here.run(lambda client: self._leases(client).leave(awaiter))

    def _release(self, lease: Lease, awaiter: str) -> AsyncRelease:
        record = lease.record
        return AsyncRelease(
            id=lease.job_id,
            identifier=record.identifier or lease.job_id,
            data=record.data,
            fence=lease.fence,
            enqueued_at=record.enqueued_us / 1e6,
            lease_seconds=lease.lease_ms / 1000,
            _queue=self,
            _awaiter=awaiter,
        )


async def _wait_for_message(wait: ResultWait, listener: Listener) -> None:
    """Returns when the job may have ended, or the next check is due."""
    check_at = time.monotonic() + REGISTRATION_SECONDS / 2
    while time.monotonic() < check_at:
        if wait.concerns(await listener.receive(wait.seconds_until(check_at))):
            return


async def _retry_while_unavailable(seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    """Repeats an idempotent call while Redis is unavailable, for this long."""
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except RedisUnavailable:
            if time.monotonic() >= give_up_at:
                raise
            await asyncio.sleep(RETRY_PAUSE_SECONDS)
