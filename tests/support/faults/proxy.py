"""A proxy between clients and a server that loses replies, delays requests, freezes, and cuts connections.

One thread serves all connections. The protocol is not parsed: data that arrives from the server in one read counts as
one reply, data that arrives from a client in one read as one request. The proxy knows each connection by the name that
forq gives it (CLIENT SETNAME, its first request).
"""

import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

_READ_BYTES = 1 << 16
_RETRY_SECONDS = 0.002
_BACKLOG = 512
_ORDER_SECONDS = 30.0
_NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

T = TypeVar("T")


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    name: bytes = b""


@dataclass(eq=False)
class _Direction:
    """One direction of a connection: its pieces in transit, with the time at which each may be sent."""

    connection: _Connection
    source: socket.socket
    sink: socket.socket
    pieces: deque[tuple[float, bytes]] = field(default_factory=deque)

    @property
    def is_reply(self) -> bool:
        return self.source is self.connection.server


@dataclass(eq=False)
class _Drop:
    """The number-th reply to this client that contains this text is lost."""

    number: int
    client: bytes
    text: bytes


@dataclass(frozen=True)
class _Hold:
    """The next request that contains this text is delivered late."""

    text: bytes
    seconds: float


@dataclass(eq=False)
class _Late:
    """A request whose client was disconnected, and the time at which the server gets it."""

    server: socket.socket
    request: bytes
    due: float
    delivered: bool = False
    answer: bytes = b""


class Proxy:
    """Listens from its construction until `close`. Every method may be called from any thread and returns when done.

    `server` and `listen`: a unix socket, or a port on 127.0.0.1 (0: any free one). `tls`: of the clients' side.
    `client`, of methods: how the names of connections begin.
    """

    def __init__(self, server: Path | int, *, listen: Path | int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._server = server
        self._tls = tls
        if isinstance(listen, Path):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(listen))
            self._listener.listen(_BACKLOG)
            self.url = f"unix://{listen}"
        else:
            self._listener = socket.create_server(("127.0.0.1", listen), backlog=_BACKLOG)
            self.port: int = self._listener.getsockname()[1]
            self.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{self.port}"
        self._listener.setblocking(False)
        self.dropped = 0
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[Callable[[], None]] = deque()
        self._directions: dict[socket.socket, _Direction] = {}
        self._delay_seconds = 0.0
        self._frozen = self._closing = False
        self._drops: list[_Drop] = []
        self._holds: deque[_Hold] = deque()
        self._late: dict[socket.socket, _Late] = {}
        self._delivered: list[_Late] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def drop_reply(self, number: int = 1, *, client: bytes = b"", text: bytes = b"") -> None:
        """Loses the number-th matching reply from now on, and cuts its connection. The server has run the command."""
        self._order(lambda: self._drops.append(_Drop(number, client, text)))

    def hold_request(self, text: bytes, seconds: float) -> None:
        """Disconnects the client of the next request with this text; the server gets the request `seconds` later."""
        self._order(lambda: self._holds.append(_Hold(text, seconds)))

    def deliver(self) -> None:
        """Delivers the held requests now."""
        self._order(self._make_due)

    def late_answers(self) -> list[bytes]:
        """What the server has answered so far to each request that it got late."""
        return [late.answer for late in self._delivered]

    def cut(self, client: bytes = b"") -> int:
        """Closes matching connections at both ends; returns their number."""
        return self._order(lambda: self._cut(client))

    def delay(self, seconds: float) -> None:
        """Delays every piece, in both directions."""
        self._order(lambda: setattr(self, "_delay_seconds", seconds))

    def freeze(self) -> None:
        """Nothing passes until `thaw`; connections stay open."""
        self._order(lambda: setattr(self, "_frozen", True))

    def thaw(self) -> None:
        self._order(lambda: setattr(self, "_frozen", False))

    def half_open(self, client: bytes = b"", *, pick: float | None = None) -> int:
        """Matching connections stay open at both ends but pass nothing until they are cut; returns their number.

        `pick`, from 0 to 1: only one of them.
        """
        return self._order(lambda: self._half_open(client, pick))

    def heal(self) -> None:
        """Removes every fault and cuts all connections."""
        self._order(self._heal)

    def connections(self) -> int:
        with self._lock:
            return len(self._directions) // 2

    def close(self) -> None:
        if self._closing:
            return
        self._order(lambda: setattr(self, "_closing", True))
        self._thread.join()
        self._heal()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    def _order(self, order: Callable[[], T]) -> T:
        """Runs `order` in the thread of the proxy."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(order())
            except BaseException as exc:
                done.set_exception(exc)

        self._orders.append(run)
        os.eventfd_write(self._wake, 1)
        return done.result(_ORDER_SECONDS)

    def _heal(self) -> None:
        self._frozen, self._delay_seconds = False, 0.0
        self._drops.clear()
        self._holds.clear()
        for late in list(self._late.values()):
            self._end_late(late)
        self._cut(b"")

    def _run(self) -> None:
        while not self._closing:
            ready = self._wait_for_orders() if self._frozen else self._selector.select(self._timeout())
            # Orders first: one was given before the data that it is meant for arrived.
            self._run_orders()
            if self._frozen:
                continue
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                # An order of this pass may have removed it.
                elif isinstance(key.fileobj, socket.socket) and self._selector.get_map().get(key.fd) == key:
                    if (late := self._late.get(key.fileobj)) is not None:
                        self._read_answer(late)
                    else:
                        self._read(key.fileobj)
            self._send_due()
            self._deliver_late()

    def _wait_for_orders(self) -> list[tuple[selectors.SelectorKey, int]]:
        with selectors.DefaultSelector() as orders:
            orders.register(self._wake, selectors.EVENT_READ)
            orders.select()
        return []

    def _run_orders(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._orders:
            self._orders.popleft()()

    def _timeout(self) -> float | None:
        due = [direction.pieces[0][0] for direction in self._directions.values() if direction.pieces]
        due += [late.due for late in self._late.values() if not late.delivered]
        return max(_RETRY_SECONDS, min(due) - time.monotonic()) if due else None

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            client, _ = self._listener.accept()
            try:
                server = self._connect()
            except OSError:
                # The server is down; the client sees the same as without a proxy.
                client.close()
                return
            client.setblocking(False)
            if self._tls is not None:
                # The first read does the handshake.
                client = self._tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
            connection = _Connection(client, server)
            with self._lock:
                self._directions[client] = _Direction(connection, client, server)
                self._directions[server] = _Direction(connection, server, client)
            for end in (client, server):
                self._selector.register(end, selectors.EVENT_READ)

    def _connect(self) -> socket.socket:
        if isinstance(self._server, int):
            server = socket.create_connection(("127.0.0.1", self._server))
        else:
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._server))
            except OSError:
                server.close()
                raise
        server.setblocking(False)
        return server

    def _read(self, source: socket.socket) -> None:
        direction = self._directions.get(source)
        if direction is None:
            return
        try:
            piece = source.recv(_READ_BYTES)
        except _NOT_READY:
            return
        except OSError:
            piece = b""
        connection = direction.connection
        if not direction.is_reply and not connection.name and b"SETNAME\r\n" in piece:
            connection.name = piece.split(b"SETNAME\r\n", 1)[1].split(b"\r\n")[1]
        if not piece or (direction.is_reply and self._is_dropped(connection.name, piece)):
            self._end(connection)
        elif not direction.is_reply and self._holds and self._holds[0].text in piece:
            self._hold_back(direction, piece, self._holds.popleft().seconds)
        else:
            direction.pieces.append((time.monotonic() + self._delay_seconds, piece))

    def _is_dropped(self, client: bytes, piece: bytes) -> bool:
        for drop in self._drops:
            if client.startswith(drop.client) and drop.text in piece:
                drop.number -= 1
                if drop.number > 0:
                    return False
                self._drops.remove(drop)
                self.dropped += 1
                return True
        return False

    def _hold_back(self, direction: _Direction, piece: bytes, seconds: float) -> None:
        """The client sees its connection closed; the server keeps one on which nothing has arrived yet."""
        client, server = direction.source, direction.sink
        with self._lock:
            del self._directions[client], self._directions[server]
        self._selector.unregister(client)
        client.close()
        request = b"".join(earlier for _, earlier in direction.pieces) + piece
        self._late[server] = _Late(server, request, time.monotonic() + seconds)

    def _make_due(self) -> None:
        for late in self._late.values():
            late.due = 0.0

    def _deliver_late(self) -> None:
        now = time.monotonic()
        for late in [late for late in self._late.values() if not late.delivered and late.due <= now]:
            late.delivered = True
            try:
                late.server.setblocking(True)
                late.server.sendall(late.request)
                late.server.setblocking(False)
            except OSError:
                self._end_late(late)
            else:
                self._delivered.append(late)

    def _read_answer(self, late: _Late) -> None:
        """The answer may come in pieces: the connection stays until the server closes it, or the proxy is healed."""
        try:
            piece = late.server.recv(_READ_BYTES)
        except OSError:
            piece = b""
        if not piece:
            self._end_late(late)
        elif late.delivered:
            late.answer += piece

    def _end_late(self, late: _Late) -> None:
        del self._late[late.server]
        self._unregister(late.server)
        late.server.close()

    def _send_due(self) -> None:
        now = time.monotonic()
        for direction in list(self._directions.values()):
            while direction.pieces and direction.pieces[0][0] <= now:
                due, piece = direction.pieces.popleft()
                try:
                    sent = direction.sink.send(piece)
                except _NOT_READY:
                    sent = 0
                except OSError:
                    self._end(direction.connection)
                    break
                if sent < len(piece):
                    direction.pieces.appendleft((due, piece[sent:]))
                    break

    def _end(self, connection: _Connection) -> None:
        for end in (connection.client, connection.server):
            with self._lock:
                self._directions.pop(end, None)
            self._unregister(end)
            end.close()

    def _matching(self, client: bytes) -> list[_Connection]:
        found = [direction.connection for direction in self._directions.values() if not direction.is_reply]
        return [connection for connection in found if connection.name.startswith(client)]

    def _cut(self, client: bytes) -> int:
        matching = self._matching(client)
        for connection in matching:
            self._end(connection)
        return len(matching)

    def _half_open(self, client: bytes, pick: float | None) -> int:
        """The directions stay, so that a cut ends them, but nothing is read any more."""
        matching = self._matching(client)
        if pick is not None and matching:
            matching = [matching[int(pick * len(matching))]]
        for connection in matching:
            for end in (connection.client, connection.server):
                self._unregister(end)
                self._directions[end].pieces.clear()
        return len(matching)

    def _unregister(self, end: Any) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(end)
