"""Connections that wait in an event loop instead of blocking, for the broker's ordinary, blocking code.

1. `run_blocking` runs a function in a greenlet. Where the function would block, the greenlet switches back to the
   coroutine that awaits `run_blocking`, and continues when the event loop has the answer.
2. AsyncConnection is a Connection on such a socket: handshake, parser and errors are the same. redis.asyncio is not
   used: its connections retry and reconnect, and their streams cost more per reply.
3. A connection belongs to the event loop in which it was opened.
"""

import asyncio
import contextvars
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet
from redis.connection import SSLConnection
from redis.exceptions import RedisError

from forq.broker.connection import KEEPALIVE, Connection, _copy, _handshake, _template, _to_os_error, pack

MAX_IDLE_RUNNERS = 50

T = TypeVar("T")


class _Runner(greenlet):
    """Runs one function after another. `running`: the current function has not ended; afterwards its `result`
    or `failure` is set."""

    def __init__(self) -> None:
        super().__init__(_serve)
        self.running = False
        self.result: Any = None
        self.failure: BaseException | None = None


def _serve(function: Callable[[], Any]) -> None:
    while True:
        runner = cast(_Runner, getcurrent())
        try:
            runner.result = function()
        except BaseException as exc:
            runner.failure = exc
        runner.running = False
        # An idle runner that refers to itself would never be freed.
        del function, runner
        function = cast(Any, getcurrent().parent).switch()


class _Idle(threading.local):
    """The idle runners of a thread. A new one costs 8 µs."""

    def __init__(self) -> None:
        self.runners: list[_Runner] = []


_idle = _Idle()


async def run_blocking(function: Callable[[], T]) -> T:
    """Runs a function that waits by `wait_for`. A cancellation is raised where it waits."""
    idle = _idle.runners
    runner = idle.pop() if idle else _Runner()
    runner.parent = getcurrent()
    # A greenlet has a context of its own, which would hide the caller's context variables.
    runner.gr_context = contextvars.copy_context()
    runner.running = True
    value = runner.switch(function)
    while runner.running:
        try:
            reply = await value
        except BaseException as exc:
            # The garbage collector may close this coroutine inside the greenlet of another call. That one continues.
            runner.parent = getcurrent()
            value = runner.throw(exc)
        else:
            value = runner.switch(reply)
    result, failure, runner.result, runner.failure = runner.result, runner.failure, None, None
    runner.gr_context = None
    if len(idle) < MAX_IDLE_RUNNERS:
        idle.append(runner)
    if failure is None:
        return cast(T, result)
    try:
        raise failure
    finally:
        # Its traceback refers to this frame.
        del failure


def wait_for(awaitable: Awaitable[T]) -> T:
    """Inside `run_blocking`: waits without blocking the event loop."""
    runner = getcurrent()
    if not isinstance(runner, _Runner) or runner.parent is None:
        raise RuntimeError("a connection of an AsyncClient was used outside its event loop")
    return cast(T, runner.parent.switch(awaitable))


class LoopSocket(asyncio.Protocol):
    """The part of a socket's interface that Connection and redis-py's parsers use, on a transport of an event loop.

    `timeout_seconds`: limit for one wait; None: no limit.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.timeout_seconds: float | None = None
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._closed = False
        self._error: Exception | None = None
        self._writable = True
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """Also true for data that no request explains: it would be taken for the next reply."""
        return self._closed or bool(self._received)

    def sendall(self, data: bytes) -> None:
        self.write(data)
        while not self._writable and not self._closed:
            unsent = self._transport.get_write_buffer_size()
            try:
                self._wait()
            except TimeoutError:
                # The limit is for a standstill: a long request may take longer.
                if self._transport.get_write_buffer_size() >= unsent:
                    raise

    def write(self, data: bytes) -> None:
        """Sends without waiting."""
        if self._closed:
            raise self._error or ConnectionError("Connection closed by server.")
        self._transport.write(data)

    def recv_into(self, buffer: bytearray) -> int:
        """0 if the server has closed the connection."""
        received = self._received
        while not received:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return 0
            self._wait()
        size = min(len(buffer), len(received))
        buffer[:size] = received[:size]
        del received[:size]
        return size

    def recv(self, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer)])

    def settimeout(self, seconds: float | None) -> None:
        self.timeout_seconds = seconds

    def close(self) -> None:
        """Drops unsent data. The server sees the end at once, also if the event loop has ended."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self.loop.is_closed():
            with suppress(OSError):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            return
        self._transport.abort()

    def _wait(self) -> None:
        """Returns when something has happened."""
        waiter = self._waiter = self.loop.create_future()
        if self.timeout_seconds is not None:
            self._deadline = self.loop.time() + self.timeout_seconds
            # A timer that ends too early is set again then: cheaper than a new one for each wait.
            if self._timer is None or self._timer.when() > self._deadline:
                self._set_timer()
        try:
            wait_for(waiter)
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done() or self.timeout_seconds is None:
            return
        if self.loop.time() < self._deadline:
            self._set_timer()
        else:
            self._waiter.set_exception(TimeoutError("timed out"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # `sendall` waits until everything is sent.
        self._transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._wake()

    def eof_received(self) -> None:
        self._closed = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._error = exc
        self._wake()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._wake()


class AsyncConnection(Connection):
    """A connection for code inside `run_blocking`."""

    socket: LoopSocket  # type: ignore[assignment]  # the part of a socket that is used

    def __init__(self, url: str, *, name: str, connect_timeout_seconds: float, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._redis = _copy(_template(url))
        self._redis.client_name = name
        self._redis.socket_timeout = timeout_seconds
        self.socket = self._redis._sock = wait_for(_open(self._redis, connect_timeout_seconds))
        self.socket.timeout_seconds = timeout_seconds
        try:
            _handshake(self._redis)
        except (RedisError, OSError) as exc:
            self.close()
            raise _to_os_error(exc) from exc
        except BaseException:
            self.close()
            raise
        self._read = self._redis._parser.read_response

    def send_now(self, command: tuple[Any, ...]) -> None:
        """Sends without waiting, also outside `run_blocking`."""
        self.socket.write(pack(command))

    def is_closed(self) -> bool:
        return self.socket.closed

    def close(self) -> None:
        self.socket.close()


async def _open(target: Any, connect_timeout_seconds: float) -> LoopSocket:
    """Connects as redis-py's connection `target` would."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(connect_timeout_seconds):
        if hasattr(target, "path"):
            return (await loop.create_unix_connection(LoopSocket, target.path))[1]
        tls: dict[str, Any] = {}
        if isinstance(target, SSLConnection):
            # In a thread: it reads certificates from disk.
            tls = {"ssl": await asyncio.to_thread(cast(Any, target).tls_context), "server_hostname": target.host}
        transport, opened = await loop.create_connection(LoopSocket, target.host, target.port, **tls)
    connected = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened
