"""A small HTTP server: GET and HEAD, one request per connection, one thread.

No client can block it. Connections are limited in time (CONNECTION_SECONDS) and in the size of the request
(MAX_HEAD_BYTES). With MAX_CONNECTIONS open, the oldest one without a request is closed.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forq.procs.loop import Loop, Timer

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
CONNECTION_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.5
READ_BYTES = 4096

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 431: "Header Too Large"}
_REASONS |= {500: "Internal Server Error", 503: "Service Unavailable"}

log = logging.getLogger("forq")


@dataclass(frozen=True)
class Response:
    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Request:
    """A request: its path without the query, and its headers by lower-case name."""

    path: str
    headers: Mapping[str, str]


Respond = Callable[[Request], Response]


@dataclass(eq=False)
class _Client:
    """`unsent`: rest of the response; None before the request is complete. Bodies are shared between clients."""

    sock: socket.socket
    timer: Timer
    head: bytearray = field(default_factory=bytearray)
    unsent: list[memoryview] | None = None


class HttpServer:
    """`respond` gets one request at a time; an exception becomes status 500."""

    def __init__(self, loop: Loop, listener: socket.socket, respond: Respond) -> None:
        self._loop = loop
        self._listener = listener
        self._respond_to = respond
        # Oldest first.
        self._clients: dict[_Client, None] = {}
        self._start_accepting()

    def __len__(self) -> int:
        """Open connections."""
        return len(self._clients)

    def _start_accepting(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as exc:
            log.warning("metrics: cannot accept connections; retrying soon error=%s", exc)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._start_accepting)
            return
        sock.setblocking(False)
        if len(self._clients) >= MAX_CONNECTIONS:
            without_request = [client for client in self._clients if client.unsent is None]
            self._drop(min(without_request or self._clients, key=lambda client: client.timer.due))
        client = _Client(sock, self._loop.call_later(CONNECTION_SECONDS, lambda: self._drop(client)))
        self._clients[client] = None
        self._loop.add_reader(sock.fileno(), lambda: self._try(self._read, client))

    def _try(self, step: Callable[[_Client], None], client: _Client) -> None:
        try:
            step(client)
        except BlockingIOError:
            return
        except OSError:  # the client has disconnected
            self._drop(client)

    def _read(self, client: _Client) -> None:
        received = client.sock.recv(READ_BYTES)
        client.head += received
        ended = b"\r\n\r\n" in client.head or b"\n\n" in client.head
        if ended:
            self._respond(client, *self._handle(bytes(client.head)))
        elif len(client.head) > MAX_HEAD_BYTES:
            self._respond(client, Response(b"the request is too long\n", 431), True)
        elif not received:
            self._drop(client)

    def _handle(self, head: bytes) -> tuple[Response, bool]:
        """Returns the response, and whether to send its body."""
        lines = head.decode("latin-1").splitlines()
        parts = lines[0].split(" ") if lines else []
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return Response(b"not a request\n", 400), True
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return Response(b"only GET and HEAD\n", 405), True
        fields = [line.partition(":") for line in lines[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        try:
            return self._respond_to(Request(target.partition("?")[0], headers)), method == "GET"
        except Exception as exc:  # a bug must not affect other requests
            log.exception("metrics: request failed path=%s", target[:100])
            return Response(f"internal error: {type(exc).__name__}\n".encode(), 500), True

    def _respond(self, client: _Client, response: Response, with_body: bool) -> None:
        allow = "Allow: GET, HEAD\r\n" if response.status == 405 else ""
        head = (
            f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\nContent-Type: {response.content_type}\r\n"
            f"Content-Length: {len(response.body)}\r\nCache-Control: no-store\r\n{allow}Connection: close\r\n\r\n"
        )
        client.unsent = [
            memoryview(head.encode()),
            *([memoryview(response.body)] if with_body and response.body else []),
        ]
        # The time that the response took does not count against the client.
        client.timer.cancel()
        client.timer = self._loop.call_later(CONNECTION_SECONDS, lambda: self._drop(client))
        self._loop.remove_reader(client.sock.fileno())
        self._loop.add_writer(client.sock.fileno(), lambda: self._try(self._write, client))
        self._write(client)

    def _write(self, client: _Client) -> None:
        assert client.unsent is not None
        while client.unsent:
            rest = client.unsent[0][client.sock.send(client.unsent[0]) :]
            client.unsent[:1] = [rest] if rest else []
        self._end(client)

    def _end(self, client: _Client) -> None:
        """Reads unread input of the client: otherwise close would reset the connection and lose the response."""
        try:
            client.sock.shutdown(socket.SHUT_WR)
            client.sock.recv(MAX_HEAD_BYTES)
        finally:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            del self._clients[client]
            client.timer.cancel()
            self._loop.remove_reader(client.sock.fileno())
            self._loop.remove_writer(client.sock.fileno())
            client.sock.close()
