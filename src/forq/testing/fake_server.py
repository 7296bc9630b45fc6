"""fakeredis in place of a server, in this process, with a clock that tests move. forq's library runs in it; all code
above the connection is the production code.

1. Each server has its own URL; while it is installed, connections of forq to this URL reach it. A later server gets the
   URL again, so that clients that user code made in one test and keeps reach the server of the next test.
2. A connection answers each command before `send` returns, so nothing waits.
3. Commands see the time of the server's clock. Other users of fakeredis see the system's time.
4. Differences between fakeredis and a server are corrected in `_Socket`.
"""

import asyncio
import itertools
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import fakeredis
import redis
from fakeredis._socket import FakeSocket
from redis.exceptions import ResponseError

from forq.broker import link, pubsub
from forq.broker.async_connection import AsyncConnection, wait_for
from forq.broker.connection import pack
from forq.errors import UsageError
from forq.redis_url import Address
from forq.values import shown

_SECOND_US = 1_000_000
# Of the year 3000.
_END_SECONDS = 32_503_680_000


class Clock:
    """Runs with the system's clock, plus what tests have added."""

    def __init__(self) -> None:
        self._ahead_us = 0
        self._last_us = 0
        self._lock = threading.Lock()
        # May refuse that; returns a function that is called afterwards.
        self.before_going_back: Callable[[], Callable[[], None]] | None = None

    def now(self) -> datetime:
        """The time, in UTC."""
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=self._now_us())

    def tick(self, seconds: float | timedelta) -> datetime:
        """Moves the clock ahead; returns the new time. Jobs that become due run with the next `run_all`."""
        ahead = seconds if isinstance(seconds, timedelta) else timedelta(seconds=_seconds(seconds))
        if ahead < timedelta(0):
            raise UsageError(f"tick({shown(seconds)}) is not allowed: seconds from 0; to go back: clock.set(WHEN)")
        return self._move(ahead // timedelta(microseconds=1), seconds)

    def set(self, when: datetime | float) -> datetime:
        """Sets the clock to a time (a datetime with a time zone, or epoch seconds); returns it. It may go back while
        there are no jobs; schedules then start anew."""
        if isinstance(when, datetime):
            if when.tzinfo is None:
                raise UsageError(f"set({when!r}) is not allowed: a datetime needs a time zone, such as tzinfo=UTC")
            wanted_us = (when - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
        else:
            wanted_us = round(_seconds(when) * _SECOND_US)
        ahead_us, back = wanted_us - self._now_us(), None
        if ahead_us < 0 and self.before_going_back is not None:
            back = self.before_going_back()
        self._move(ahead_us, when)
        if back is not None:
            back()
        return self.now()

    def _move(self, ahead_us: int, given: object) -> datetime:
        if not 0 <= self._now_us() + ahead_us < _END_SECONDS * _SECOND_US:
            raise UsageError(f"{shown(given)} is not allowed: the clock would leave the years 1970 to 2999")
        self._ahead_us += ahead_us
        return self.now()

    def _next_us(self) -> int:
        """For one command of the fake server. Grows with each call, because forq distinguishes jobs with the same id by
        their times, also if a test has frozen the system's clock."""
        with self._lock:
            now_us = self._now_us()
            if now_us <= self._last_us < now_us + _SECOND_US:
                now_us = self._last_us + 1
            self._last_us = now_us
            return now_us

    def _now_us(self) -> int:
        # Not time_ns, which libraries that freeze the time may leave alone.
        return round(time.time() * _SECOND_US) + self._ahead_us

    def __repr__(self) -> str:
        return f"<clock {self.now().isoformat(timespec='milliseconds')}>"


def _seconds(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) < _END_SECONDS:
        raise UsageError(f"{shown(given)} is not allowed: a number of seconds")
    return float(given)


class FakeServer:
    def __init__(self, clock: Clock | None = None) -> None:
        # The top-level domain .invalid never resolves: another process that gets this URL fails at once.
        self.url = _take_url()
        self.pid = os.getpid()
        self.clock = clock or Clock()
        self.state = fakeredis.FakeServer(version=(7,))

    def connect(self) -> redis.Redis:
        return fakeredis.FakeRedis(server=self.state)

    def flush(self) -> None:
        self.connect().flushall()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Connections to its URL reach it; all other URLs are unchanged."""
        _install(self)
        try:
            yield
        finally:
            _uninstall(self)


_installed: dict[str, FakeServer] = {}
_taken_urls: set[str] = set()
_installing = threading.Lock()
_connect_to_others = link.connect
_URL = re.compile(r"redis://forq-memory-\d+\.invalid")
_ENDED = (
    "this client was made inside of forq.testing.memory(), which has ended; use it inside of memory() (the fixture "
    "forq_memory), or make it outside and pass it: memory(app, client)"
)


def _take_url() -> str:
    with _installing:
        urls = (f"redis://forq-memory-{number}.invalid" for number in itertools.count(1))
        url = next(url for url in urls if url not in _taken_urls)
        _taken_urls.add(url)
        return url


def _install(server: FakeServer) -> None:
    with _installing:
        if not _installed:
            _replace_connect(_connect)
            _replace_time(time, _time)
        _installed[server.url] = server


def _uninstall(server: FakeServer) -> None:
    with _installing:
        del _installed[server.url]
        _taken_urls.discard(server.url)
        if not _installed:
            _replace_connect(_connect_to_others)
            _replace_time(_time, time)
    for socket in list(server.state.sockets):
        # Clients that are not closed would keep descriptors.
        if isinstance(socket, _Socket):
            socket.close()


def _replace_connect(connect: Any) -> None:
    for module in (link, pubsub):
        vars(module)["connect"] = connect


def _connect(
    address: Address,
    name: str,
    timeout_seconds: float,
    connect_timeout_seconds: float = link.CONNECT_TIMEOUT_SECONDS,
    kind: "type[Any] | None" = None,
) -> Any:
    if not _URL.fullmatch(address.url):
        return _connect_to_others(address, name, timeout_seconds, connect_timeout_seconds, kind)
    server = _server_at(address.url)
    return _Connection(server) if kind is None or not issubclass(kind, AsyncConnection) else _AsyncConnection(server)


def _server_at(url: str) -> FakeServer:
    server = _installed.get(url)
    if server is None:
        raise ConnectionError(_ENDED)
    if server.pid != os.getpid():
        raise ConnectionError(
            f"jobs in memory exist only in process {server.pid}, and this is process {os.getpid()}, forked from it; "
            "use forq.testing.server() (the fixture forq_server)"
        )
    return server


class _Now(threading.local):
    """The time of the command that this thread carries out, in seconds; None: the system's."""

    seconds: float | None = None


_now = _Now()


class _Time:
    """The module `time`, as fakeredis sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return time.time() if _now.seconds is None else _now.seconds


_time = _Time()


def _replace_time(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fakeredis" and vars(module).get("time") is old:
            vars(module)["time"] = new


class _Socket(FakeSocket):
    """`fileno` is readable while answers are pending, like a socket's."""

    def __init__(self, server: FakeServer) -> None:
        self._bell = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clock = server.clock
        # Called when there is an answer to take.
        self.on_answer: Any = None
        super().__init__(server.state, db=0, client_class=redis.Redis, lua_modules=set())

    def _process_command(self, fields: list[bytes]) -> None:
        before, _now.seconds = _now.seconds, self._clock._next_us() / 1e6
        try:
            super()._process_command(fields)
        finally:
            _now.seconds = before

    def sendall(self, data: Any) -> None:
        if self.responses is None:
            raise ConnectionError("the connection is closed")
        super().sendall(data)

    def put_response(self, msg: Any) -> None:
        if self.responses is None:
            return
        super().put_response(msg)
        os.eventfd_write(self._bell, 1)
        if self.on_answer is not None:
            self.on_answer()

    def take(self) -> Any:
        if self.responses is None:
            raise ConnectionError("the connection is closed")
        try:
            answer = self.responses.get_nowait()
        except queue.Empty:
            raise BlockingIOError("nothing to read") from None
        os.eventfd_read(self._bell)
        return answer

    def fileno(self) -> int:
        return self._bell

    def setblocking(self, _: bool) -> None:
        """Nothing here blocks."""

    def settimeout(self, _: float | None) -> None:
        """As above."""

    def close(self) -> None:
        if self.responses is not None:
            super().close()
            os.close(self._bell)

    def _decode_error(self, error: Any) -> ResponseError:
        """Keeps the error code, which fakeredis strips as redis-py does."""
        return ResponseError(error.value)

    def hrandfield(self, key: Any, *args: Any) -> Any:
        """A server returns an empty list if the hash does not exist and a count is given."""
        found = super().hrandfield(key, *args)
        return [] if found is None and args else found


class _Connection:
    """Has the interface of forq.broker.connection.Connection."""

    def __init__(self, server: FakeServer) -> None:
        self.socket = _Socket(server)
        self._url = server.url

    def is_closed(self) -> bool:
        return self.socket.responses is None

    def send(self, command: tuple[Any, ...]) -> None:
        if self.socket.responses is None:
            # Its server is gone. The next one may be there.
            self.socket = _Socket(_server_at(self._url))
        self.socket.sendall(pack(command))

    def send_many(self, commands: Sequence[tuple[Any, ...]]) -> None:
        for command in commands:
            self.send(command)

    def receive(self) -> Any:
        return self.socket.take()

    def close(self) -> None:
        self.socket.close()


class _AsyncConnection(AsyncConnection):
    """The same for code inside `run_blocking`; `receive` waits in the event loop for messages of a subscription."""

    socket: _Socket  # type: ignore[assignment]

    def __init__(self, server: FakeServer) -> None:
        self.socket = _Socket(server)

    def is_closed(self) -> bool:
        return self.socket.responses is None

    def send(self, command: tuple[Any, ...]) -> None:
        self.socket.sendall(pack(command))

    send_now = send

    def send_many(self, commands: Sequence[tuple[Any, ...]]) -> None:
        for command in commands:
            self.send(command)

    def receive(self) -> Any:
        while True:
            try:
                return self.socket.take()
            except BlockingIOError:
                self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def wake() -> None:
            if not answered.done():
                answered.set_result(None)

        def wake_from_any_thread() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wake)

        self.socket.on_answer = wake_from_any_thread
        try:
            # An answer that came before.
            if self.socket.responses is not None and self.socket.responses.empty():
                wait_for(answered)
        finally:
            self.socket.on_answer = None

    def close(self) -> None:
        waiting = self.socket.on_answer
        self.socket.close()
        if waiting is not None:
            waiting()
