"""Every kind of address: unix socket, TCP, password, database number, TLS; and connections that break."""

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from forq.broker.link import Link
from forq.errors import OutcomeUnknown, RedisUnavailable
from tests.support.server import Server


@contextmanager
def relay(server: Server, *, context: ssl.SSLContext | None = None, drop_answers: bool = False) -> Iterator[int]:
    """A TCP port on loopback that passes everything to the server, through TLS if a context is given."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=pass_on, args=(client,), daemon=True).start()

    def pass_on(client: socket.socket) -> None:
        try:
            near: socket.socket = context.wrap_socket(client, server_side=True) if context else client
        except OSError:
            client.close()
            return
        far = socket.socket(socket.AF_UNIX)
        far.connect(str(server.socket))
        answers = threading.Thread(target=copy, args=(far, near, drop_answers), daemon=True)
        answers.start()
        copy(near, far, False)

    def copy(source: socket.socket, target: socket.socket, drop: bool) -> None:
        try:
            while data := source.recv(65536):
                if drop and b"+PONG" in data:
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            # The other direction's thread is reading: closing alone would not end the connection.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def test_a_unix_socket_and_a_tcp_port_reach_the_same_data(server: Server, redis_url: str) -> None:
    Link(redis_url).call("SET", "a", "1")
    with relay(server) as port:
        assert Link(f"redis://127.0.0.1:{port}").call("GET", "a") == b"1"
        assert Link(f"redis://127.0.0.1:{port}/3").call("GET", "a") is None


def test_a_password_is_sent_and_never_shown(server: Server, redis_url: str) -> None:
    with server.connect() as redis:
        redis.execute_command("ACL", "SETUSER", "someone", "on", ">se cret", "~*", "+@all")
    with relay(server) as port:
        assert Link(f"redis://someone:se%20cret@127.0.0.1:{port}").call("ACL", "WHOAMI") == b"someone"
        wrong = Link(f"redis://someone:wrong@127.0.0.1:{port}")
        with pytest.raises(RedisUnavailable) as refused:
            wrong.call("PING")
    assert "wrong" not in str(refused.value).replace("WRONGPASS", "")
    with server.connect() as redis:
        redis.execute_command("ACL", "DELUSER", "someone")


def test_tls_checks_the_certificate(server: Server, redis_url: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(trusted))
    with relay(server, context=context) as port:
        url = f"rediss://127.0.0.1:{port}"
        assert Link(f"{url}?ssl_ca_certs={trusted}").call("PING") in (b"PONG", "PONG")
        with pytest.raises(RedisUnavailable, match="certificate"):
            Link(url).call("PING")
        assert Link(f"{url}?ssl_cert_reqs=none").call("PING") in (b"PONG", "PONG")


def test_a_lost_answer_is_reported_and_never_repeated(server: Server, redis_url: str) -> None:
    with relay(server, drop_answers=True) as port:
        link = Link(f"redis://127.0.0.1:{port}")
        link.call("SET", "x", "1")
        with pytest.raises(OutcomeUnknown):
            link.call("PING")
        assert link.call("INCR", "x") == 2


def test_a_server_that_restarted_is_noticed_before_anything_is_sent(server: Server, redis_url: str) -> None:
    link = Link(redis_url)
    link.call("PING")
    server.restart()
    link._used_at = 0.0
    assert link.call("SET", "a", "1") in (b"OK", "OK")


def test_no_server_is_said_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(RedisUnavailable, match=f"unix://{tmp_path}/none"):
        Link(f"unix://{tmp_path}/none").call("PING")


def test_a_connection_is_not_shared_with_a_forked_process(redis_url: str) -> None:
    link = Link(redis_url)
    link.learn_client_id()
    before = link.known_client_id
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: Any = b"?"
        try:
            answer = str(link.call("CLIENT", "ID")).encode()
        finally:
            os.write(write, answer)
            os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 64)) != before
    assert link.call("CLIENT", "ID") == before
    os.close(read)
    os.close(write)
