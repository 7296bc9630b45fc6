"""Batches for asyncio: the methods of Batch as coroutines.

async with app.abatch(on_done=summary.prepare()) as batch:
    await batch.add(send.prepare("a@b.c"))
"""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from forq.api_types import BatchInfo
from forq.batch import Batch
from forq.broker.chunks import NewJob
from forq.client import Client

if TYPE_CHECKING:
    from forq.app.tasks import JobRef, Prepared
    from forq.async_client import AsyncClient

T = TypeVar("T")


class AsyncBatch:
    """A batch, opened by the `async with` block or by the first call. Calls of several asyncio tasks run one after the
    other."""

    is_batch = True

    def __init__(
        self,
        client: "AsyncClient",
        queue: str,
        id: str,
        open: Callable[[Client], Batch],
        create_queue: Callable[[Client, str], None] | None = None,
    ) -> None:
        self.queue = queue
        self.id = id
        self._client = client
        self._open = open
        self._create_queue = create_queue
        self._batch: Batch | None = None
        # A call of the batch uses the connection that was taken for it, and no other call may change that.
        self._lock = asyncio.Lock()

    async def enqueue(self, queue: str, data: Any, **options: Any) -> str:
        """See Batch.enqueue."""
        return await self._run(lambda batch: batch.enqueue(queue, data, **options))

    async def add(self, prepared: "Prepared[T]") -> "JobRef[T]":
        """See Batch.add."""
        return await self._run(lambda batch: batch.add(prepared))

    async def add_job(self, queue: str, job: NewJob) -> str:
        """See Batch.add_job."""
        return await self._run(lambda batch: batch.add_job(queue, job))

    async def flush(self) -> None:
        """See Batch.flush."""
        await self._run(lambda batch: batch.flush())

    async def seal(self) -> None:
        """See Batch.seal."""
        await self._run(lambda batch: batch.seal())

    async def cancel(self) -> int:
        """See Batch.cancel."""
        return await self._run(lambda batch: batch.cancel())

    async def info(self) -> BatchInfo:
        """See Batch.info."""
        return await self._run(lambda batch: batch.info())

    async def results(self) -> list[Any]:
        """See Batch.results."""
        return await self._run(lambda batch: batch.results())

    async def __aenter__(self) -> Self:
        await self._run(lambda batch: None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._run(lambda batch: batch.__exit__(kind, error, traceback))

    async def _run(self, call: Callable[[Batch], T]) -> T:
        async with self._lock:
            return await self._client._run(partial(self._call, call))

    def _call(self, call: Callable[[Batch], T], client: Client) -> T:
        batch = self._batch
        if batch is None:
            batch = self._batch = self._open(client)
        batch._link = client.link
        batch._create_queue = None if self._create_queue is None else partial(self._create_queue, client)
        return call(batch)

    def __repr__(self) -> str:
        return f"AsyncBatch(queue={self.queue!r}, id={self.id!r})"
