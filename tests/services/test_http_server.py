"""The HTTP server of the metrics: what it answers, and clients that cannot hold it up."""

import select
import socket
from collections.abc import Iterator

import pytest

from forq.procs.loop import Loop
from forq.services import http_server
from forq.services.http_server import HttpServer, Request, Response


class Hand:
    """Drives a server step by step, with a clock of its own."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.listener.setblocking(False)
        self.time = 1000.0
        self.asked: list[Request] = []
        self.page = Response(b"hello\n")
        self.poller = select.poll()
        self.loop = Loop(lambda: self.time, poller=self.poller)
        self.server = HttpServer(self.loop, self.listener, self._answer)
        self.sockets: list[socket.socket] = []

    def _answer(self, asked: Request) -> Response:
        self.asked.append(asked)
        if asked.path == "/fault":
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
        """Until nothing happens any more."""
        while self.poller.poll(20):
            self.loop.tick(0)
        self.loop.tick(0)

    def close(self) -> None:
        for each in (*self.sockets, self.listener):
            each.close()


@pytest.fixture
def hand() -> Iterator[Hand]:
    hand = Hand()
    yield hand
    hand.close()


def read_all(client: socket.socket) -> bytes:
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    return received


def test_a_page_is_answered_and_the_connection_ends(hand: Hand) -> None:
    answer = read_all(hand.connect(b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 6" in head
    assert body == b"hello\n"
    assert hand.asked == [Request("/metrics", {"host": "a", "accept": "text/plain"})]


def test_head_gets_the_length_without_the_body(hand: Hand) -> None:
    answer = read_all(hand.connect(b"HEAD / HTTP/1.0\r\n\r\n"))
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
def test_garbage_is_refused_and_the_next_client_is_served(hand: Hand, request_: bytes, status: bytes) -> None:
    assert read_all(hand.connect(request_)).startswith(b"HTTP/1.1 " + status)
    assert b"200 OK" in read_all(hand.connect(b"GET / HTTP/1.1\r\n\r\n"))


def test_a_request_may_come_byte_by_byte(hand: Hand) -> None:
    client = hand.connect()
    for byte in b"GET / HTTP/1.1\r\n\r\n":
        client.sendall(bytes([byte]))
        hand.serve()
    assert b"200 OK" in read_all(client)


def test_whoever_says_nothing_has_to_go_when_its_time_is_up(hand: Hand) -> None:
    silent = hand.connect(b"GET / HT")
    hand.time += http_server.CONNECTION_SECONDS - 0.1
    hand.serve()
    assert len(hand.server) == 1
    hand.time += 0.2
    hand.serve()
    assert read_all(silent) == b""
    assert len(hand.server) == 0


def test_whoever_does_not_read_has_to_go_and_others_are_served_meanwhile(hand: Hand) -> None:
    hand.page = Response(b"x" * 50_000_000)
    deaf = hand.connect(b"GET / HTTP/1.1\r\n\r\n")
    hand.page = Response(b"small")
    assert read_all(hand.connect(b"GET / HTTP/1.1\r\n\r\n")).endswith(b"small")
    hand.time += http_server.CONNECTION_SECONDS + 0.1
    hand.serve()
    assert len(hand.server) == 0
    try:
        received = len(read_all(deaf))
    except ConnectionResetError:
        received = 0
    assert received < 50_000_000


def test_more_silent_clients_than_places_keep_nobody_out(hand: Hand) -> None:
    silent = [hand.connect() for _ in range(http_server.MAX_CONNECTIONS + 10)]
    assert len(hand.server) == http_server.MAX_CONNECTIONS
    assert b"200 OK" in read_all(hand.connect(b"GET / HTTP/1.1\r\n\r\n"))
    # The oldest had to go.
    assert read_all(silent[0]) == b""
    silent[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    hand.serve()
    assert b"200 OK" in read_all(silent[-1])
