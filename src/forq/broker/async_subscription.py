"""One subscription for all coroutines of a client that wait for messages."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forq.broker.async_connection import AsyncConnection, run_blocking
from forq.broker.pubsub import SUBSCRIBE_BATCH, connect_subscriber
from forq.errors import ForqError, RedisUnavailable
from forq.redis_url import read_address

# The connection is closed when nobody has waited for this long.
IDLE_SECONDS = 5.0


class Listener:
    """Receives the messages of some channels, or with `text` only those with this text. Close it at the end.

    After the connection broke, `take` and `receive` raise RedisUnavailable: messages may be lost, so the owner must
    listen anew and then check the state. After the client was closed, they raise another ForqError.

    `on_message`: called when there is something to take.
    """

    def __init__(
        self,
        subscription: "SharedSubscription",
        channels: Sequence[str],
        text: str | None,
        on_message: Callable[[], object] | None,
    ) -> None:
        self.channels = channels
        self.text = text
        self._subscription = subscription
        self._on_message = on_message
        self._messages: list[tuple[str, str]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self, seconds: float) -> list[str]:
        """The texts of the messages that have arrived; waits up to this long for the first."""
        if not self._messages and self._error is None and seconds > 0:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(seconds, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        return [text for _, text in self.take()]

    def take(self) -> list[tuple[str, str]]:
        """The messages that have arrived, as (channel, text)."""
        if isinstance(self._error, ForqError):
            raise self._error
        if self._error is not None:
            raise RedisUnavailable(f"subscription broke: {str(self._error) or type(self._error).__name__}")
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        self._subscription.remove(self)

    def add(self, channel: str, text: str) -> None:
        self._messages.append((channel, text))
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            _wake(self._waiter)
        if self._on_message is not None:
            self._on_message()


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
        # For each command sent, the channels that the server has not confirmed; None: UNSUBSCRIBE.
        self._sent: deque[deque[asyncio.Future[None] | None]] = deque()
        self._idle_timer: asyncio.TimerHandle | None = None

    async def listen(self, channel: str, text: str | None = None) -> Listener:
        """RedisUnavailable if the server does not confirm it in time."""
        return await self._listen(Listener(self, (channel,), text, None))

    async def listen_to_many(self, channels: Sequence[str], on_message: Callable[[], object]) -> Listener:
        """The same for many channels at once."""
        return await self._listen(Listener(self, channels, None, on_message))

    async def _listen(self, listener: Listener) -> Listener:
        for channel in listener.channels:
            self._listeners.setdefault(channel, {}).setdefault(listener.text, set()).add(listener)
        try:
            await self._subscribe(listener.channels)
        except BaseException:
            listener.close()
            raise
        return listener

    async def _subscribe(self, channels: Sequence[str]) -> None:
        if self._connection is None:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect(channels[0]))
                self._connecting.add_done_callback(_retrieve)
            await self._join(self._connecting)
        loop = asyncio.get_running_loop()
        for some in _batches([channel for channel in channels if channel not in self._confirmed]):
            futures = [loop.create_future() for _ in some]
            for channel, future in zip(some, futures, strict=True):
                future.add_done_callback(_retrieve)
                self._confirmed[channel] = future
            self._send("SUBSCRIBE", some, futures)
        confirmed = [self._confirmed.get(channel) for channel in channels]
        try:
            for each in confirmed:
                if each is None:
                    raise RedisUnavailable("cannot subscribe: the connection was closed")
                if each.done():
                    each.result()
                    continue
                # The limit is for each confirmation: all of many may take longer.
                async with asyncio.timeout(self._timeout_seconds):
                    await asyncio.shield(each)
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
            raise RedisUnavailable(f"cannot subscribe: {str(exc) or type(exc).__name__}") from None
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
            for refused in self._sent.popleft() if self._sent else ():
                if refused is not None and not refused.done():
                    refused.set_exception(RedisUnavailable(f"cannot subscribe: {message}"))
            return
        kind, channel = message[0], message[1]
        if kind == b"message":
            self._deliver(channel.decode(errors="replace"), message[2].decode(errors="replace"))
        elif kind in (b"subscribe", b"unsubscribe") and self._sent:
            confirmed = self._sent[0].popleft()
            if not self._sent[0]:
                self._sent.popleft()
            if confirmed is not None and not confirmed.done():
                confirmed.set_result(None)

    def _deliver(self, channel: str, text: str) -> None:
        by_text = self._listeners.get(channel, {})
        for wanted in (None, text):
            for listener in by_text.get(wanted, ()):
                listener.add(channel, text)

    def remove(self, listener: Listener) -> None:
        """Unsubscribes from the channels that have lost their last listener."""
        unused = [channel for channel in listener.channels if self._remove_from(channel, listener)]
        subscribed = [channel for channel in unused if self._confirmed.pop(channel, None) is not None]
        for some in _batches(subscribed):
            if self._connection is not None:
                self._send("UNSUBSCRIBE", some, [None] * len(some))
        if unused:
            self._close_when_idle()

    def _remove_from(self, channel: str, listener: Listener) -> bool:
        """Whether it was the last listener of this channel."""
        by_text = self._listeners.get(channel)
        if by_text is None or listener not in by_text.get(listener.text, ()):
            return False
        by_text[listener.text].discard(listener)
        if not by_text[listener.text]:
            del by_text[listener.text]
        if by_text:
            return False
        del self._listeners[channel]
        return True

    def _send(self, command: str, channels: Sequence[str], confirmed: "Iterable[asyncio.Future[None] | None]") -> None:
        connection = self._connection
        try:
            if connection is None:
                raise ConnectionError("the connection was closed")
            connection.send_now((command, *channels))
        except OSError as exc:
            if connection is not None:
                self._lose(exc)
            if command == "SUBSCRIBE":
                raise RedisUnavailable(f"cannot subscribe: {exc}") from None
            return
        self._sent.append(deque(confirmed))

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


def _batches(channels: Sequence[str]) -> Iterable[Sequence[str]]:
    return (channels[start : start + SUBSCRIBE_BATCH] for start in range(0, len(channels), SUBSCRIBE_BATCH))


def _closed() -> ForqError:
    return ForqError("the client was closed during this call")


def _retrieve(future: "asyncio.Future[Any]") -> None:
    """asyncio logs exceptions that nobody has retrieved."""
    if not future.cancelled():
        future.exception()
