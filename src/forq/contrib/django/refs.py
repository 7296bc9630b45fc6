"""Refs of jobs that are sent when a transaction commits. Their ids are known at once."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from asgiref.sync import sync_to_async

from forq.api_types import RefState
from forq.app.tasks import JobRef, Task
from forq.broker.enqueue import JobIdentity
from forq.errors import ForqError, UsageError

if TYPE_CHECKING:
    from forq.contrib.django.outbox import Outbox

T = TypeVar("T", covariant=True)


class NotSent(ForqError):
    """A job was not sent, or nobody knows whether it was, although its transaction has committed."""

    code = "not_sent"


class CommitRef(JobRef[T]):
    """The ref of a job that is sent when the transaction of `alias` commits. From then on it means this job alone."""

    __slots__ = ("_alias", "_is_open", "_sent", "_sent_identity")

    def __init__(
        self, task: Task[..., T], queue: str, id: str, alias: str, *, keeps: bool | None, is_open: Callable[[], bool]
    ) -> None:
        self._sent = False
        self._alias = alias
        # Whether the transaction may still commit.
        self._is_open = is_open
        super().__init__(task, queue, id, None, keeps=keeps)

    # `as_completed` reads it before it asks Redis about the job.
    @property
    def _identity(self) -> JobIdentity | None:
        self._need_sent("as_completed()")
        return self._sent_identity

    @_identity.setter
    def _identity(self, identity: JobIdentity | None) -> None:
        self._sent_identity = identity

    def _set_sent(self, id: str, identity: JobIdentity | None) -> None:
        """`id`: another one if the job's token was known."""
        self.id, self._sent_identity, self._sent = id, identity, True

    def _need_sent(self, call: str) -> None:
        if not self._sent:
            raise self._too_early(call)

    def _too_early(self, call: str) -> UsageError:
        job = f"job {self.id!r} of task {self._task.name!r}"
        if self._is_open():
            return UsageError(
                f"{call} of {job} inside its transaction: the job is sent when the transaction of database "
                f"{self._alias!r} commits, so nothing is known about it before; call {call} after the atomic() block"
            )
        return UsageError(
            f"{call} of {job}: it was not sent, because the transaction of database {self._alias!r} was rolled back, "
            "or an earlier on_commit callback of it failed"
        )

    def state(self) -> RefState:
        self._need_sent("state()")
        return super().state()

    def cancel(self) -> bool:
        self._need_sent("cancel()")
        return super().cancel()

    def result(self, timeout: float | timedelta | None = None) -> T:
        self._need_sent("result()")
        return super().result(timeout)

    async def aresult(self, timeout: float | timedelta | None = None) -> T:
        await self._aneed_sent("aresult()")
        return await super().aresult(timeout)

    async def _aneed_sent(self, call: str) -> None:
        self._need_sent(call)


class OutboxRef(CommitRef[T]):
    """The ref of a job in an outbox. Calls that need the job in Redis deliver its row first, if nobody else has."""

    __slots__ = ("_committed", "_outbox", "key")

    def __init__(
        self,
        task: Task[..., T],
        queue: str,
        id: str,
        outbox: "Outbox",
        key: str,
        *,
        keeps: bool | None,
        is_open: Callable[[], bool],
    ) -> None:
        self._outbox = outbox
        self._committed = False
        self.key = key
        super().__init__(task, queue, id, outbox.alias, keeps=keeps, is_open=is_open)

    def _set_committed(self) -> None:
        self._committed = True

    def _need_sent(self, call: str) -> None:
        if self._sent:
            return
        if _in_event_loop():
            raise UsageError(
                f"{call} of job {self.id!r}: its row in the outbox may have to be delivered first, which an event loop "
                "cannot wait for; use `await ref.aresult()`, or sync_to_async"
            )
        self._need_committed(call)
        self._deliver()

    def _need_committed(self, call: str) -> None:
        """An exception of another on_commit callback may have kept ours from being called."""
        if not self._committed:
            if self._is_open() or self._outbox.find(self.key) is None:
                raise self._too_early(call)
            self._committed = True

    async def _aneed_sent(self, call: str) -> None:
        if not self._sent:
            await sync_to_async(self._need_sent)(call)

    def _deliver(self) -> None:
        row = self._outbox.find(self.key)
        if row is not None and row.state == row.WAITING:
            delivery = self._outbox.deliver_one(self.key, self.queue)
            if self.key in delivery.stored:
                self._set_sent(*delivery.stored[self.key])
                return
            row = self._outbox.find(self.key)
        if row is not None:
            why = row.error or "its queue takes no jobs now"
            raise NotSent(f"job {self.id!r} of task {self._task.name!r} is in the outbox, {row.state}: {why}")
        # Another process has delivered it.
        self._set_sent(self.id, None)

    def state(self) -> RefState:
        """As for other jobs; undelivered while its row is in the outbox."""
        if not self._sent:
            self._need_committed("state()")
            if self._outbox.find(self.key) is not None:
                return "undelivered"
            self._set_sent(self.id, None)
        return super().state()

    def cancel(self) -> bool:
        """Removes the job if it has not started, or its row if nobody has tried to send it."""
        if self._committed and not self._sent and self._outbox.withdraw(self.key):
            return True
        return super().cancel()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
