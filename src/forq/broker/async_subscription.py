"""One subscription for all coroutines of a client that wait for messages."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

from forq.broker.async_connection import AsyncConnection, run_blocking
from forq.broker.pubsub import connect_subscriber
from forq.errors import ForqError, RedisUnavailable
from forq.redis_url import read_address

# The connection is closed when nobody has waited for this long.
IDLE_SECONDS = 5.0


class Listener:
    """Receives the messages of one channel, or with `text` only those with this text. Close it at the end.

    After the connection broke, `receive` raises RedisUnavailable: messages may be lost, so the owner must listen anew
    and then check the state. After the client was closed, it raises another ForqError.
    """

    def __init__(self, subscription: "SharedSubscription", channel: str, text: str | None) -> None:
        self.channel = channel
        self.text = text
        self._subscription = subscription
        self._messages: list[str] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self, seconds: float) -> list[str]:
        """The messages that have arrived; waits up to this long for the first."""
        if not self._messages and self._error is None and seconds > 0:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(seconds, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        if isinstance(self._error, ForqError):
            raise self._error
        if self._error is not None:
            raise RedisUnavailable(f"subscription broke: {str(self._error) or type(self._error).__name__}")
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        self._subscription.remove(self)

    def add(self, message: str) -> None:
        self._messages.append(message)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            _wake(self._waiter)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class SharedSubscription:
    """Subscribes to channels while they have listeners.

    1. Connects for the first listener; closes the connection some seconds after the last has left.
    2. `listen` returns when the server has confirmed the subscription: messages sent later are received.
    3. When the connection breaks, every listener fails. The next `listen` connects again.
    """

    def __init__(self, url: str, *, name: str, timeout_seconds: float, connect_timeout_seconds: float) -> None:
        self._address = read_address(url)
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        # By channel, then by text (None: all texts).
        self._listeners: dict[str, dict[str | None, set[Listener]]] = {}
        self._connection: AsyncConnection | None = None
        self._connecting: asyncio.Task[AsyncConnection] | None = None
        self._reader: asyncio.Task[None] | None = None
        # Done when the server has confirmed the channel.
        self._confirmed: dict[str, asyncio.Future[None]] = {}
        # The commands that the server has not answered; None: UNSUBSCRIBE.
        self._sent: deque[asyncio.Future[None] | None] = deque()
        self._idle_timer: asyncio.TimerHandle | None = None

    async def listen(self, channel: str, text: str | None = None) -> Listener:
        """RedisUnavailable if the server does not confirm it in time."""
        listener = Listener(self, channel, text)
        self._listeners.setdefault(channel, {}).setdefault(text, set()).add(listener)
        try:
            await self._subscribe(channel)
        except BaseException:
            listener.close()
            raise
        return listener

    async def _subscribe(self, channel: str) -> None:
        if self._connection is None:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect(channel))
                self._connecting.add_done_callback(_retrieve)
            await self._join(self._connecting)
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            confirmed = self._confirmed[channel] = asyncio.get_running_loop().create_future()
            confirmed.add_done_callback(_retrieve)
            self._send("SUBSCRIBE", channel, confirmed)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await asyncio.shield(confirmed)
        except TimeoutError:
            self._lose(TimeoutError("timed out"))
            raise RedisUnavailable("cannot subscribe: timed out") from None

    async def _join(self, connecting: "asyncio.Task[AsyncConnection]") -> None:
        """Waits for a connection that others may wait for, too: a cancelled caller does not cancel it."""
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not connecting.cancelled() or (task is not None and task.cancelling()):
                raise
            raise _closed() from None

    async def _connect(self, channel: str) -> AsyncConnection:
        try:
            connection = await run_blocking(
                lambda: connect_subscriber(
                    self._address, self._name, channel, self._connect_timeout_seconds, AsyncConnection
                )
            )
        except OSError as exc:
            raise RedisUnavailable(f"cannot subscribe: {str(exc) or type(exc).__name__}") from exc
        finally:
            self._connecting = None
        assert isinstance(connection, AsyncConnection)
        connection.socket.settimeout(None)
        self._connection = connection
        self._reader = asyncio.create_task(self._read(connection))
        self._close_when_idle()
        return connection

    async def _read(self, connection: AsyncConnection) -> None:
        def receive() -> None:
            while True:
                self._dispatch(connection.receive())

        try:
            await run_blocking(receive)
        except OSError as exc:
            if connection is self._connection:
                self._lose(exc)
        finally:
            if connection is self._connection:
                self._lose(ConnectionError("the event loop has ended"))
            connection.close()

    def _dispatch(self, message: Any) -> None:
        if isinstance(message, Exception):
            # The ACL refused a command. After a refused UNSUBSCRIBE the messages go to nobody.
            refused = self._sent.popleft() if self._sent else None
            if refused is not None and not refused.done():
                refused.set_exception(RedisUnavailable(f"cannot subscribe: {message}"))
            return
        kind, channel = message[0], message[1]
        if kind == b"message":
            self._deliver(channel.decode(errors="replace"), message[2].decode(errors="replace"))
        elif kind in (b"subscribe", b"unsubscribe") and self._sent:
            confirmed = self._sent.popleft()
            if confirmed is not None and not confirmed.done():
                confirmed.set_result(None)

    def _deliver(self, channel: str, text: str) -> None:
        by_text = self._listeners.get(channel, {})
        for wanted in (None, text):
            for listener in by_text.get(wanted, ()):
                listener.add(text)

    def remove(self, listener: Listener) -> None:
        """Unsubscribes from a channel that has lost its last listener."""
        by_text = self._listeners.get(listener.channel, {})
        with_text = by_text.get(listener.text, set())
        with_text.discard(listener)
        if with_text:
            return
        by_text.pop(listener.text, None)
        if by_text:
            return
        self._listeners.pop(listener.channel, None)
        if self._confirmed.pop(listener.channel, None) is not None and self._connection is not None:
            with suppress(OSError):
                self._send("UNSUBSCRIBE", listener.channel, None)
        self._close_when_idle()

    def _send(self, command: str, channel: str, confirmed: "asyncio.Future[None] | None") -> None:
        connection = self._connection
        try:
            if connection is None:
                raise ConnectionError("the connection was closed")
            connection.send_now((command, channel))
        except OSError as exc:
            if connection is not None:
                self._lose(exc)
            if confirmed is not None:
                raise RedisUnavailable(f"cannot subscribe: {exc}") from exc
            return
        self._sent.append(confirmed)

    def _close_when_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if not self._listeners and self._connection is not None:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._listeners:
            self.close()

    def close(self) -> None:
        """Every listener fails with a ForqError that is not RedisUnavailable."""
        self._lose(_closed())
        if self._connecting is not None:
            self._connecting.cancel()

    def _lose(self, error: Exception) -> None:
        """Closes the connection. The listeners of its channels fail."""
        connection, self._connection = self._connection, None
        confirmed, self._confirmed = self._confirmed, {}
        self._sent.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if connection is not None:
            connection.close()
        for channel, future in confirmed.items():
            if not future.done():
                text = f"cannot subscribe: {str(error) or type(error).__name__}"
                future.set_exception(error if isinstance(error, ForqError) else RedisUnavailable(text))
            for listeners in self._listeners.get(channel, {}).values():
                for listener in listeners:
                    listener.fail(error)


def _closed() -> ForqError:
    return ForqError("the client was closed during this call")


def _retrieve(future: "asyncio.Future[Any]") -> None:
    """asyncio logs exceptions that nobody has retrieved."""
    if not future.cancelled():
        future.exception()
