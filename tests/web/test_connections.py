"""Slow, silent and numerous clients, and requests that are no HTTP."""

import socket
import time
from collections.abc import Callable

import pytest

from forq.web import connections
from forq.web.guard import HEADERS, MAX_HEAD_BYTES
from tests.support.drive.wait import wait_until
from tests.web.serving import Served, exchange, read_answer, request

Serve = Callable[..., Served]


def ended(sock: socket.socket) -> float:
    """Seconds until the server has closed the connection."""
    began = time.monotonic()
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RECEIVE_SECONDS", 0.5)
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.5)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"POST /pause HTTP/1.1\r\nHost: localhost\r\n"
             b"Sec-Fetch-Site: same-origin\r\nContent-Length: 100\r\n\r\nhalf"],
)  # fmt: skip
def test_a_request_that_does_not_end_is_cut_off(serve: Serve, sent: bytes) -> None:
    served = serve()
    with served.connect() as sock:
        sock.sendall(sent)
        assert 0.3 < ended(sock) < 10
    assert served.site.acted == []
    assert served.get().status == 200


@pytest.mark.usefixtures("short")
def test_bytes_that_trickle_in_do_not_extend_the_time(serve: Serve) -> None:
    served = serve()
    sent = 0
    with served.connect() as sock:
        sock.settimeout(0.05)
        began = time.monotonic()
        while time.monotonic() < began + 10:
            try:
                sock.sendall(b"G" if not sent else b"E")
                sent += 1
                if not sock.recv(1):
                    break
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
        assert 0.3 < time.monotonic() - began < 5
    assert sent > 3


@pytest.mark.usefixtures("short")
def test_the_second_request_of_a_connection_has_the_same_limit(serve: Serve) -> None:
    served = serve()
    first = request("/", {"Host": served.host, "Connection": "keep-alive"})
    with served.connect() as sock:
        assert exchange(sock, first).status == 200
        assert exchange(sock, first).status == 200
        sock.sendall(first[:20])
        assert 0.3 < ended(sock) < 10


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("size", [60_000, 50_000_000])
def test_a_client_that_does_not_read_its_answer_is_cut_off(serve: Serve, connection: str, size: int) -> None:
    served = serve()
    served.site.large = b"x" * size
    with served.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(100 if size < 1_000_000 and connection == "keep-alive" else 1):
            sock.sendall(request("/large", {"Host": served.host, "Connection": connection}))
        # A small answer fits into the buffers of the kernel; then the client may be idle.
        wait_until(lambda: not served.server.server_state.connections, what="the connection is closed")
    assert served.get().status == 200


@pytest.mark.usefixtures("short")
def test_a_client_that_reads_slowly_but_steadily_keeps_its_connection(serve: Serve) -> None:
    served = serve()
    served.site.large = b"x" * 3_000_000
    with served.connect() as sock:
        assert (
            len(exchange(sock, request("/large", {"Host": served.host, "Connection": "keep-alive"})).body) == 3_000_000
        )
        assert exchange(sock, request("/", {"Host": served.host})).status == 200


def test_silent_connections_make_room_for_new_ones(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 5)
    served = serve()
    held = [served.connect() for _ in range(60)]
    try:
        wait_until(lambda: len(served.server.server_state.connections) <= 5, what="few connections")
        assert served.get().status == 200
        # The oldest were closed.
        assert ended(held[0]) < 5
    finally:
        for sock in held:
            sock.close()


def test_headers_that_are_too_large_are_refused(serve: Serve) -> None:
    served = serve()
    with served.connect() as sock:
        # Refused before its end has come.
        sock.sendall(f"GET / HTTP/1.1\r\nHost: {served.host}\r\nX-Large: {'x' * (MAX_HEAD_BYTES + 1000)}".encode())
        answer = read_answer(sock)
        # It comes in one piece.
        whole = served.get(X_Large="x" * (MAX_HEAD_BYTES + 1000))
    assert (answer.status, whole.status, served.get("/?" + "x" * MAX_HEAD_BYTES).status) == (400, 431, 431)
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= answer.headers.items()
    assert served.get().status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX : a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /\r\nX-Injected: 1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_with_the_same_headers(serve: Serve, data: bytes) -> None:
    served = serve()
    with served.connect() as sock:
        sock.sendall(data)
        answer = read_answer(sock)
    assert answer.status == 400
    assert answer.headers["x-frame-options"] == "DENY"
    assert served.get().status == 200


def test_a_websocket_is_not_opened(serve: Serve) -> None:
    served = serve()
    upgrade = {"Host": served.host, "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    with served.connect() as sock:
        assert exchange(sock, request("/", upgrade)).status == 200


def test_pipelined_requests_are_answered_in_order(serve: Serve) -> None:
    served = serve()
    with served.connect() as sock:
        sock.sendall(request("/data", {"Host": served.host, "Connection": "keep-alive"}))
        sock.sendall(request("/nothing", {"Host": served.host}))
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert [line.split()[1] for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1")] == [
        b"200",
        b"404",
    ] or (received.count(b"HTTP/1.1 200") == received.count(b"HTTP/1.1 404") == 1)
