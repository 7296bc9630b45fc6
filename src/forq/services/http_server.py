"""A small HTTP server for pages that anybody may read: GET and HEAD, one request per connection, one thread.

No client can hold it up. A connection has CONNECTION_SECONDS from its beginning to its end; a request's head has
MAX_HEAD_BYTES; when MAX_CONNECTIONS are open, the oldest that has not asked yet has to go.
"""

import logging
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
CONNECTION_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.5
READ_BYTES = 4096

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 431: "Header Too Large"}
_REASONS |= {500: "Internal Server Error", 503: "Service Unavailable"}

log = logging.getLogger("forq")


@dataclass(frozen=True)
class Page:
    """What is answered."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Asked:
    """A request: its path without the query, and its headers by lower-case name."""

    path: str
    headers: Mapping[str, str]


Answer = Callable[[Asked], Page]


class _Client:
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.head = bytearray()
        # None: it has not asked yet. A page is shared by all who get it.
        self.unsent: list[memoryview] | None = None

    def close(self) -> None:
        self.sock.close()


class HttpServer:
    """Serves who connects to `listener`. `answer` gets one request at a time; what it raises is answered with 500."""

    def __init__(self, listener: socket.socket, answer: Answer, now: Callable[[], float] = time.monotonic) -> None:
        self._listener = listener
        self._answer = answer
        self._now = now
        self._clients: dict[int, _Client] = {}
        self._accept_after = 0.0

    def interest(self) -> dict[int, int]:
        """Which descriptors it waits for, and for what."""
        wanted = {
            fd: select.POLLIN if client.unsent is None else select.POLLOUT for fd, client in self._clients.items()
        }
        if self._now() >= self._accept_after:
            wanted[self._listener.fileno()] = select.POLLIN
        return wanted

    def patience_ms(self) -> float | None:
        """How long nothing is due."""
        now = self._now()
        times = [client.deadline for client in self._clients.values()]
        if self._accept_after > now:
            times.append(self._accept_after)
        return max(0.0, min(times) - now) * 1000 + 1 if times else None

    def ready(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
            return
        client = self._clients.get(fd)
        if client is None:  # another had to make room for it
            return
        try:
            if client.unsent is None:
                self._read(client)
            else:
                self._write(client)
        except BlockingIOError:
            return
        except OSError:  # it has gone
            self._drop(client)

    def tick(self) -> None:
        """Whose time is up has to go."""
        now = self._now()
        for client in [client for client in self._clients.values() if client.deadline <= now]:
            self._drop(client)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as exc:
            log.warning("metrics: no new connections for a while error=%s", exc)
            self._accept_after = self._now() + ACCEPT_PAUSE_SECONDS
            return
        sock.setblocking(False)
        if len(self._clients) >= MAX_CONNECTIONS:
            silent = [client for client in self._clients.values() if client.unsent is None]
            self._drop(min(silent or self._clients.values(), key=lambda client: client.deadline))
        self._clients[sock.fileno()] = _Client(sock, self._now() + CONNECTION_SECONDS)

    def _read(self, client: _Client) -> None:
        received = client.sock.recv(READ_BYTES)
        client.head += received
        ended = b"\r\n\r\n" in client.head or b"\n\n" in client.head
        if ended:
            self._respond(client, *self._page(bytes(client.head)))
        elif len(client.head) > MAX_HEAD_BYTES:
            self._respond(client, Page(b"the request is too long\n", 431), True)
        elif not received:
            self._drop(client)

    def _page(self, head: bytes) -> tuple[Page, bool]:
        """And whether its body is wanted."""
        lines = head.decode("latin-1").splitlines()
        parts = lines[0].split(" ") if lines else []
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return Page(b"not a request\n", 400), True
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return Page(b"only GET and HEAD\n", 405), True
        fields = [line.partition(":") for line in lines[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        try:
            return self._answer(Asked(target.partition("?")[0], headers)), method == "GET"
        except Exception as exc:  # a fault of ours: the next request may still be answered
            log.exception("metrics: a request could not be answered path=%s", target[:100])
            return Page(f"internal error: {type(exc).__name__}\n".encode(), 500), True

    def _respond(self, client: _Client, page: Page, with_body: bool) -> None:
        allow = "Allow: GET, HEAD\r\n" if page.status == 405 else ""
        head = (
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\nCache-Control: no-store\r\n{allow}Connection: close\r\n\r\n"
        )
        client.unsent = [memoryview(head.encode()), *([memoryview(page.body)] if with_body and page.body else [])]
        # It may have taken a while to answer; reading the answer is not the client's fault.
        client.deadline = self._now() + CONNECTION_SECONDS
        self._write(client)

    def _write(self, client: _Client) -> None:
        assert client.unsent is not None
        while client.unsent:
            rest = client.unsent[0][client.sock.send(client.unsent[0]) :]
            client.unsent[:1] = [rest] if rest else []
        self._end(client)

    def _end(self, client: _Client) -> None:
        """With what it has sent beyond its request unread, closing would reset the connection and lose the answer."""
        try:
            client.sock.shutdown(socket.SHUT_WR)
            client.sock.recv(MAX_HEAD_BYTES)
        finally:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock.fileno(), None)
        client.close()
