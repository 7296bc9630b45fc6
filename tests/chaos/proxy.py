"""A proxy between clients and a server, on unix sockets, that can lose the n-th reply, cut, delay, freeze, and
deliver a request late.

One thread serves all connections. Nothing of the protocol is read: what arrives from the server in one piece counts as
one reply, and what arrives from a client in one piece as one request.
"""

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PIECE = 1 << 16
_CLOGGED_SECONDS = 0.002
_BACKLOG = 512


@dataclass(eq=False)
class _Way:
    """One direction of a connection: pieces on their way, with the time at which each may leave."""

    source: socket.socket
    sink: socket.socket
    is_reply: bool
    pieces: deque[tuple[float, bytes]] = field(default_factory=deque)


@dataclass(frozen=True)
class _Hold:
    """The next request with this text is to be delivered so much later."""

    text: bytes
    seconds: float


@dataclass(eq=False)
class _Late:
    """A request whose client has been hung up on, and when the server gets it."""

    server: socket.socket
    request: bytes
    due: float
    delivered: bool = False
    answer: bytes = b""


class Proxy:
    """Listens at `path` from the start until `close`; every method may be called from any thread."""

    def __init__(self, path: Path, server: Path) -> None:
        self.url = f"unix://{path}"
        self.dropped = 0
        self._server = str(server)
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[Callable[[], None]] = deque()
        self._ways: dict[socket.socket, _Way] = {}
        self._delay_seconds = 0.0
        self._frozen = self._closing = False
        self._drop_after = 0
        self._holds: deque[_Hold] = deque()
        self._late: dict[socket.socket, _Late] = {}
        self._delivered: list[_Late] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def drop_reply(self, number: int) -> None:
        """The number-th reply from now on is lost, and its connection is cut."""
        self._order(lambda: setattr(self, "_drop_after", number))

    def hold_request(self, text: bytes, seconds: float) -> None:
        """The next request with this text reaches the server so much later; its connection is closed to the client."""
        self._order(lambda: self._holds.append(_Hold(text, seconds)))

    def deliver(self) -> None:
        """What is held reaches the server now."""
        self._order(self._make_due)

    def late_answers(self) -> list[bytes]:
        """What the server has answered, by now, to each request that it got late."""
        return [late.answer for late in self._delivered]

    def cut(self) -> None:
        """Every connection is closed."""
        self._order(self._cut)

    def delay(self, seconds: float) -> None:
        """Every piece, in both directions, takes so much longer from now on."""
        self._order(lambda: setattr(self, "_delay_seconds", seconds))

    def freeze(self) -> None:
        """Nothing passes until `thaw`; connections stay."""
        self._order(lambda: setattr(self, "_frozen", True))

    def thaw(self) -> None:
        self._order(lambda: setattr(self, "_frozen", False))

    def half_open(self, chance: float) -> None:
        """One connection goes on in appearance only, until it is cut; `chance` (0 to 1) says which."""
        self._order(lambda: self._forget_one(chance))

    def heal(self) -> None:
        """No fault is left; connections that were under one are cut."""
        self._order(self._heal)

    def connections(self) -> int:
        with self._lock:
            return len(self._ways) // 2

    def close(self) -> None:
        self._order(lambda: setattr(self, "_closing", True))
        self._thread.join()
        self._heal()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._wake, 1)

    def _heal(self) -> None:
        self._frozen, self._delay_seconds, self._drop_after = False, 0.0, 0
        self._holds.clear()
        for late in list(self._late.values()):
            self._end_late(late)
        self._cut()

    def _run(self) -> None:
        while not self._closing:
            ready = self._wait_for_orders() if self._frozen else self._selector.select(self._patience())
            # First: an order is given before what it is meant for.
            self._obey()
            if self._frozen:
                continue
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                # An order of this pass may have taken it out.
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

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._orders:
            self._orders.popleft()()

    def _patience(self) -> float | None:
        heads = [way.pieces[0][0] for way in self._ways.values() if way.pieces]
        heads += [late.due for late in self._late.values() if not late.delivered]
        return max(_CLOGGED_SECONDS, min(heads) - time.monotonic()) if heads else None

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.connect(self._server)
            except OSError:
                # The server is down: who connects here sees the same end as there.
                client.close()
                server.close()
                return
            with self._lock:
                self._ways[client] = _Way(client, server, is_reply=False)
                self._ways[server] = _Way(server, client, is_reply=True)
            for end in (client, server):
                end.setblocking(False)
                self._selector.register(end, selectors.EVENT_READ)

    def _read(self, source: socket.socket) -> None:
        way = self._ways.get(source)
        if way is None:
            return
        try:
            piece = source.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece or (way.is_reply and self._is_to_be_dropped()):
            self._end(way)
            return
        if not way.is_reply and self._holds and self._holds[0].text in piece:
            self._hold_back(way, piece, self._holds.popleft().seconds)
            return
        way.pieces.append((time.monotonic() + self._delay_seconds, piece))

    def _is_to_be_dropped(self) -> bool:
        if self._drop_after == 0:
            return False
        self._drop_after -= 1
        if self._drop_after > 0:
            return False
        self.dropped += 1
        return True

    def _hold_back(self, way: _Way, piece: bytes, seconds: float) -> None:
        """The client sees the end of its connection now; the server has one on which nothing has come yet."""
        client, server = way.source, way.sink
        with self._lock:
            del self._ways[client], self._ways[server]
        self._selector.unregister(client)
        client.close()
        request = b"".join(earlier for _, earlier in way.pieces) + piece
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
        """It may come in pieces: the connection stays until the server ends it, or the proxy is healed."""
        try:
            piece = late.server.recv(_PIECE)
        except OSError:
            piece = b""
        if not piece:
            self._end_late(late)
        elif late.delivered:
            late.answer += piece

    def _end_late(self, late: _Late) -> None:
        del self._late[late.server]
        with suppress(KeyError, ValueError):
            self._selector.unregister(late.server)
        late.server.close()

    def _send_due(self) -> None:
        now = time.monotonic()
        for way in list(self._ways.values()):
            while way.pieces and way.pieces[0][0] <= now:
                due, piece = way.pieces.popleft()
                try:
                    sent = way.sink.send(piece)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self._end(way)
                    break
                if sent < len(piece):
                    way.pieces.appendleft((due, piece[sent:]))
                    break

    def _end(self, way: _Way) -> None:
        for end in (way.source, way.sink):
            with self._lock:
                self._ways.pop(end, None)
            with suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()

    def _cut(self) -> None:
        for way in list(self._ways.values()):
            self._end(way)

    def _forget_one(self, chance: float) -> None:
        """Its ways stay, so that a cut ends them; nothing is read from them any more."""
        ways = [way for way in self._ways.values() if not way.is_reply]
        if ways:
            way = ways[int(chance * len(ways))]
            for end in (way.source, way.sink):
                with suppress(KeyError, ValueError):
                    self._selector.unregister(end)
                self._ways[end].pieces.clear()
