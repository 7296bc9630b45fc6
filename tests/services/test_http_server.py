"""The HTTP server for metrics: its responses, and slow clients that must not block it."""

import select
import socket
from collections.abc import Iterator

import pytest

from forq.procs.loop import Loop
from forq.services import http_server
from forq.services.http_server import HttpServer, Request, Response


class HttpRig:
    """Drives a server step by step, with a fake clock."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.listener.setblocking(False)
        self.time = 1000.0
        self.requests: list[Request] = []
        self.page = Response(b"hello\n")
        self.poller = select.poll()
        self.loop = Loop(lambda: self.time, poller=self.poller)
        self.server = HttpServer(self.loop, self.listener, self._answer)
        self.sockets: list[socket.socket] = []

    def _answer(self, request: Request) -> Response:
        self.requests.append(request)
        if request.path == "/fault":
            raise RuntimeError("oh")
        return self.page

    def connect(self, send: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.listener.getsockname(), timeout=5)
        self.sockets.append(client)
        if send:
            client.sendall(send)
        self.serve()
        return client

    def serve(self) -> None:
        """Runs the loop until it is idle."""
        while self.poller.poll(20):
            self.loop.tick(0)
        self.loop.tick(0)

    def close(self) -> None:
        for each in (*self.sockets, self.listener):
            each.close()


@pytest.fixture
def rig() -> Iterator[HttpRig]:
    rig = HttpRig()
    yield rig
    rig.close()


def read_all(client: socket.socket) -> bytes:
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    return received


def test_a_page_is_sent_and_the_connection_closed(rig: HttpRig) -> None:
    answer = read_all(rig.connect(b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 6" in head
    assert body == b"hello\n"
    assert rig.requests == [Request("/metrics", {"host": "a", "accept": "text/plain"})]


def test_head_gets_the_length_without_the_body(rig: HttpRig) -> None:
    answer = read_all(rig.connect(b"HEAD / HTTP/1.0\r\n\r\n"))
    assert b"Content-Length: 6" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /\r\n\r\n", b"400"),
        (b"GET / HTTP/2\r\n\r\n", b"400"),
        (b"GET " + b"x" * 9000, b"431"),
        (b"GET /fault HTTP/1.1\r\n\r\n", b"500"),
    ],
)
def test_garbage_is_refused_and_the_next_client_is_served(rig: HttpRig, request_: bytes, status: bytes) -> None:
    assert read_all(rig.connect(request_)).startswith(b"HTTP/1.1 " + status)
    assert b"200 OK" in read_all(rig.connect(b"GET / HTTP/1.1\r\n\r\n"))


def test_a_request_may_come_byte_by_byte(rig: HttpRig) -> None:
    client = rig.connect()
    for byte in b"GET / HTTP/1.1\r\n\r\n":
        client.sendall(bytes([byte]))
        rig.serve()
    assert b"200 OK" in read_all(client)


def test_a_silent_client_is_disconnected_after_its_timeout(rig: HttpRig) -> None:
    silent = rig.connect(b"GET / HT")
    rig.time += http_server.CONNECTION_SECONDS - 0.1
    rig.serve()
    assert len(rig.server) == 1
    rig.time += 0.2
    rig.serve()
    assert read_all(silent) == b""
    assert len(rig.server) == 0


def test_a_client_that_does_not_read_is_disconnected_and_others_are_served(rig: HttpRig) -> None:
    rig.page = Response(b"x" * 50_000_000)
    deaf = rig.connect(b"GET / HTTP/1.1\r\n\r\n")
    rig.page = Response(b"small")
    assert read_all(rig.connect(b"GET / HTTP/1.1\r\n\r\n")).endswith(b"small")
    rig.time += http_server.CONNECTION_SECONDS + 0.1
    rig.serve()
    assert len(rig.server) == 0
    try:
        received = len(read_all(deaf))
    except ConnectionResetError:
        received = 0
    assert received < 50_000_000


def test_silent_clients_beyond_the_connection_limit_do_not_lock_out_others(rig: HttpRig) -> None:
    silent = [rig.connect() for _ in range(http_server.MAX_CONNECTIONS + 10)]
    assert len(rig.server) == http_server.MAX_CONNECTIONS
    assert b"200 OK" in read_all(rig.connect(b"GET / HTTP/1.1\r\n\r\n"))
    # The oldest was disconnected.
    assert read_all(silent[0]) == b""
    silent[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    rig.serve()
    assert b"200 OK" in read_all(silent[-1])
