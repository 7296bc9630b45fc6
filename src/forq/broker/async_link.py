"""Links of an event loop, and the pool that lends them to the calls of an AsyncClient."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from forq.broker.async_connection import AsyncConnection
from forq.broker.connection import Connection
from forq.broker.link import Link
from forq.errors import RedisUnavailable

# Connections unused for this long are closed when another call ends.
IDLE_SECONDS = 60.0


class AsyncLink(Link):
    """A link for code inside `run_blocking`. `waited_seconds`: the time that the call has waited for a free link, which
    counts against its first request."""

    connection_kind = AsyncConnection
    waited_seconds = 0.0

    def _ready_connection(self, *, ahead: bool = False) -> Connection:
        if self._unanswered and not (ahead and self._may_send_ahead()):
            self._read_unanswered()
        connection = self._connection
        # Missing replies would look like data that no request explains.
        if connection is not None and not self._unanswered and connection.is_closed():
            self.close()
        connection = super()._ready_connection(ahead=ahead)
        limit = self.timeout_seconds
        if self.waited_seconds:
            limit, self.waited_seconds = max(0.001, limit - self.waited_seconds), 0.0
        connection.socket.settimeout(limit)
        return connection


class Lent(Protocol):
    """An object of the pool; it holds a link."""

    def link(self) -> AsyncLink: ...


L = TypeVar("L", bound=Lent)


class Pool(Generic[L]):
    """Lends up to `size` objects, the one returned last first. Each call of a client holds one until it ends."""

    def __init__(self, make: Callable[[], L], size: int, timeout_seconds: float) -> None:
        self._make = make
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._lent = 0
        self._closed = False
        # With the time of their return.
        self._free: deque[tuple[float, L]] = deque()
        self._waiters: deque[asyncio.Future[L]] = deque()

    def take_free(self) -> L | None:
        """One that is free or new; None if `size` are lent. Call `give_back` afterwards."""
        if self._waiters or self._lent >= self._size:
            return None
        one = self._free.pop()[1] if self._free else self._make()
        self._lent += 1
        return one

    async def take(self) -> L:
        """The same, but waits for one. RedisUnavailable if none is free in time."""
        return self.take_free() or await self._wait()

    def give_back(self, one: L) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(one)
                return
        self._lent -= 1
        if self._closed:
            one.link().close()
            return
        now = time.monotonic()
        self._free.append((now, one))
        if self._free[0][0] < now - IDLE_SECONDS:
            self._free.popleft()[1].link().close()

    def close(self) -> None:
        """Closes all that are free; the others when they are given back."""
        self._closed = True
        while self._free:
            self._free.pop()[1].link().close()

    async def _wait(self) -> L:
        began = time.monotonic()
        waiter: asyncio.Future[L] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                one = await waiter
        except BaseException as exc:
            if waiter.done() and not waiter.cancelled():
                # It was lent in the same moment.
                self.give_back(waiter.result())
            waiter.cancel()
            if isinstance(exc, TimeoutError):
                raise RedisUnavailable(
                    f"none of the {self._size} connections to Redis was free within {self._timeout_seconds:g} s; "
                    "raise max_connections"
                ) from None
            raise
        one.link().waited_seconds = time.monotonic() - began
        return one
