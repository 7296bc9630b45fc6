"""redis-py as the client: behavior that forq depends on, and where forq's connections differ from redis-py's."""

import errno
import importlib.metadata
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
from redis.connection import parse_url

from forq import Client
from forq.broker.connection import Connection, _options
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.errors import OutcomeUnknown, RedisUnavailable, UsageError
from forq.procs import liveness
from tests.support.drive.server import Server
from tests.support.faults.proxy import Proxy


def connected(url: str, timeout_seconds: float = 5) -> Connection:
    return Connection(url, name="test", connect_timeout_seconds=5, timeout_seconds=timeout_seconds)


@contextmanager
def answering(directory: Path, *answers: bytes) -> Iterator[str]:
    """A fake server that sends these replies, one per request of each connection. Yields its URL."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "fake.sock"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                for answer in answers:
                    if not client.recv(65536):
                        break
                    client.sendall(answer)
                while client.recv(65536):
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"unix://{directory}/fake.sock"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def connections(server: Server) -> int:
    with server.connect() as client:
        return int(client.info("stats")["total_connections_received"])


def test_a_send_does_not_reopen_a_closed_connection(server: Server) -> None:
    connection = connected(server.url)
    connection.close()
    before = connections(server)
    with pytest.raises(OSError, match="Bad file descriptor"):
        connection.send(("SET", "sent", "twice"))
    with server.connect() as client:
        assert client.get("sent") is None
    # Only this connection and the two that count are open.
    assert connections(server) == before + 2
    # redis-py's own send reconnects.
    connection._redis.send_command("PING")
    assert connection._redis.read_response() == b"PONG"
    connection.close()


@pytest.mark.parametrize("code", ["LOADING", "READONLY", "NOPERM", "OOM", "ASK", "CLUSTERDOWN", "WRONGTYPE"])
def test_an_error_reply_keeps_its_code_and_the_connection_open(code: str, tmp_path: Path) -> None:
    with answering(tmp_path, b"+OK\r\n", b"-%s said the server\r\n" % code.encode(), b"+PONG\r\n") as url:
        connection = connected(url)
        connection.send(("GET", "a"))
        assert str(connection.receive()) == f"{code} said the server"
        connection.send(("PING",))
        assert connection.receive() == b"PONG"
        connection.close()


def test_redis_py_itself_strips_error_codes_and_closes_the_connection_for_one() -> None:
    parser: Any = redis.connection.DefaultParser
    loading = parser.parse_error("LOADING said the server")
    assert isinstance(loading, redis.ConnectionError)
    assert str(loading) == "said the server"
    assert str(parser.parse_error("OOM said the server")) == "said the server"


def test_a_loading_server_is_unavailable_and_has_not_run_the_call(tmp_path: Path) -> None:
    with (
        answering(tmp_path, b"+OK\r\n", b"-LOADING Redis is loading the dataset in memory\r\n") as url,
        pytest.raises(RedisUnavailable, match="cannot serve requests now: LOADING") as caught,
    ):
        Link(url).call("GET", "a")
    assert not isinstance(caught.value, OutcomeUnknown)


def test_nested_error_replies_keep_their_codes(server: Server) -> None:
    connection = connected(server.url)
    connection.send_many([("MULTI",), ("SET", "text", "1"), ("LPUSH", "text", "2"), ("EXEC",)])
    *_, answers = [connection.receive() for _ in range(4)]
    assert answers[0] == b"OK"
    assert str(answers[1]).startswith("WRONGTYPE ")
    connection.close()


def test_a_kernel_socket_timeout_is_reported_as_a_timeout(server: Server) -> None:
    connection = connected(server.url, timeout_seconds=0.1)
    assert connection.socket.gettimeout() is None
    connection.send(("BLPOP", "nothing", 1))
    with pytest.raises(BlockingIOError, match="timed out"):
        connection.receive()
    connection.close()


def test_connecting_to_a_server_that_never_replies_times_out(tmp_path: Path) -> None:
    with answering(tmp_path) as url, pytest.raises(TimeoutError, match="timed out"):
        connected(url, timeout_seconds=0.1)


def test_a_new_connection_uses_resp2_and_sends_only_its_name(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_metadata(name: str) -> NoReturn:
        raise AssertionError("package metadata is read for each connection")

    with server.connect() as client:
        client.config_resetstat()
    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", read_metadata)
        connection = connected(f"{server.url}?db=2")
    connection.send(("CLIENT", "INFO"))
    sent = dict(field.split("=", 1) for field in connection.receive().decode().split())
    assert (sent["name"], sent["db"], sent["resp"], sent.get("lib-name", "")) == ("test", "2", "2", "")
    connection.close()
    with server.connect() as client:
        stats = client.info("commandstats")
    calls = {name: stats[f"cmdstat_{name}"]["calls"] for name in ("client|setname", "client|info", "select")}
    assert calls == {"client|setname": 1, "client|info": 1, "select": 1}


@pytest.mark.parametrize("option", ["socket_timeout=1", "retry_on_timeout=1", "protocol=3", "decode_responses=1", "x="])
def test_an_unsupported_url_option_is_refused_with_the_allowed_ones(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(UsageError, match=f"option '{name}' is unknown; allowed options: db, username, password; "):
        Client(f"redis://127.0.0.1?{option}").queues()
    # redis-py passes it on as a keyword.
    assert name in parse_url(f"redis://127.0.0.1?{option}1")


def test_tls_options_are_refused_without_tls() -> None:
    with pytest.raises(UsageError, match=r"option 'ssl_ca_certs' needs TLS \(rediss://...\)"):
        Client("redis://127.0.0.1?ssl_ca_certs=/ca").queues()
    with pytest.raises(UsageError, match="ssl_cert_reqs = 'CERT_NONE'; allowed: none, optional, required"):
        Client("rediss://127.0.0.1?ssl_cert_reqs=CERT_NONE").queues()
    with pytest.raises(UsageError, match="ssl_min_version = 'new'; allowed: 771, 772"):
        Client("rediss://127.0.0.1?ssl_min_version=new").queues()


def test_a_database_that_is_not_a_number_is_refused() -> None:
    assert "db" not in parse_url("redis://127.0.0.1/abc")
    with pytest.raises(UsageError, match="database 'abc' is not a number"):
        Client("redis://127.0.0.1/abc").queues()


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("redis://h", {"host": "h"}),
        ("redis://h:1/2", {"host": "h", "port": 1, "db": 2}),
        (
            "redis://us%40er:p%2Fw@[::1]:7/3",
            {"host": "::1", "port": 7, "username": "us@er", "password": "p/w"},
        ),
        ("redis://h/1?db=4", {"host": "h", "db": 4}),
        ("redis://h?password=a%25b&username=u", {"host": "h", "username": "u", "password": "a%b"}),
        ("unix://user:secret@/run/re%20dis.sock?db=1", {"path": "/run/re dis.sock", "db": 1, "username": "user"}),
    ],
)
def test_redis_py_parses_the_other_parts_of_a_url(url: str, read: dict[str, Any]) -> None:
    kind, options = _options(url)
    assert {name: options.get(name) for name in read} == read
    assert (options["protocol"], options["decode_responses"], options["health_check_interval"]) == (2, False, 0)
    assert kind(**options).retry.get_retries() == 0


class DeadPeer:
    """A socket whose peer is gone, as reported by keepalive."""

    def recv(self, *_: object) -> NoReturn:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    recv_into = recv


def test_a_subscription_distinguishes_a_dead_server_from_a_silent_one(server: Server) -> None:
    with Proxy(server.socket) as proxy:
        subscription = Subscription(proxy.url, "some:*", name="test")
        subscription.connect()
        assert subscription.receive() == []
        assert subscription._connection is not None
        parser = subscription._connection._redis._parser
        # redis-py's own parser reads through a buffer.
        (parser if hasattr(parser, "_reader") else parser._buffer)._sock = DeadPeer()
        with pytest.raises(RedisUnavailable, match="subscription broke"):
            subscription.receive()
        assert not subscription.connected


def test_a_message_in_pieces_is_received_once_it_is_complete(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    subscription = Subscription("unix:///none", "c", name="test", exact=True)
    with answering(tmp_path, b"+OK\r\n") as url:
        subscription._connection = connected(url)
        redis_connection = subscription._connection._redis
        redis_connection._sock = subscription._connection.socket = ours
        redis_connection._parser.on_connect(redis_connection)
        ours.setblocking(False)
        theirs.sendall(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$5\r\nhe")
        assert subscription.receive() == []
        theirs.sendall(b"llo\r\n*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n2\r\n")
        assert subscription.receive() == [("c", "hello"), ("c", "2")]
        subscription.close()
    theirs.close()


def test_each_read_of_a_long_reply_may_take_the_full_timeout(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that reads from a slow network must not look like a hanging one."""
    connection = connected(server.url)
    if not hasattr(connection._redis._parser, "_reader"):
        pytest.skip("redis-py's own parser gives the whole answer one time limit")
    ours, theirs = socket.socketpair()
    connection._redis._parser._sock = ours
    theirs.sendall(b"$4\r\nab")
    busy_seconds: list[float] = []

    def expect_busy(seconds: float) -> None:
        busy_seconds.append(seconds)
        if len(busy_seconds) == 3:
            theirs.sendall(b"cd\r\n")

    monkeypatch.setattr(liveness, "watched", True)
    monkeypatch.setattr(liveness, "expect_busy", expect_busy)
    assert connection.receive() == b"abcd"
    # For the reply, for its first part, and for the second.
    assert busy_seconds == [5, 5, 5]
    connection.close()
    ours.close()
    theirs.close()


WITHOUT_HIREDIS = """
import sys
sys.modules["hiredis"] = None
from redis.connection import DefaultParser
assert DefaultParser.__name__ == "_RESP2Parser", DefaultParser
from forq import Client
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.errors import ForqError, OutcomeUnknown

url = sys.argv[1]
client = Client(url)
queue = client.create_queue("slow")
subscription = Subscription(url, "forq:*", name="test")
subscription.connect()
assert subscription.receive() == []
ids = queue.enqueue_many([{"n": 1}, "é" * 100_000])
assert [queue.job(id)["data"] for id in ids] == [{"n": 1}, "é" * 100_000]
assert queue.cancel(ids[0]) and queue.status()["waiting"] == 1
link = Link(url, timeout_seconds=0.1)
answers = link.call_batch(("SET", "text", b"1"), ("LPUSH", "text", 2.5), ("GET", "text"))
assert (answers[0], answers[2]) == (b"OK", b"1") and "WRONGTYPE" in str(answers[1]), answers
try:
    link.call("BLPOP", "nothing", 1)
except OutcomeUnknown as exc:
    assert "timed out" in str(exc), exc
else:
    raise AssertionError("BLPOP has an answer")
assert link.call("GET", "text") == b"1"
print("works")
"""


def test_a_client_works_without_hiredis(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HIREDIS, server.url], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "works\n", done.stderr


def test_redis_py_is_imported_only_by_the_first_connection(server: Server) -> None:
    program = (
        "import sys; from forq import Client; client = Client(sys.argv[1]); queue = client.queue('q'); "
        "assert 'redis' not in sys.modules; client.queues(); assert 'redis' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program, server.url], timeout=60).returncode == 0


def test_each_sentinel_is_queried_once_with_a_one_second_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(RedisUnavailable, match=r"no sentinel found a working master 'main' \([^ ]+: timed out\)$"):
            Link(f"redis+sentinel://127.0.0.1:{silent.getsockname()[1]}/main?sentinel_password=hush").call("PING")
        assert 0.9 < time.monotonic() - began < 3
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
