"""Every kind of address: unix socket, TCP, password, database number; and connections that break."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from forq.broker.connection import KEEPALIVE, Connection
from forq.broker.link import Link
from forq.broker.scripts import script
from forq.errors import ForqError, OutcomeUnknown, RedisUnavailable
from tests.support.relay import relay
from tests.support.server import Server


@pytest.mark.one_server
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


def test_a_lost_answer_is_reported_and_never_repeated(server: Server, redis_url: str) -> None:
    with relay(server, drop_answers=True) as port:
        link = Link(f"redis://127.0.0.1:{port}")
        link.call("SET", "x", "1")
        with pytest.raises(OutcomeUnknown):
            link.call("PING")
        assert link.call("INCR", "x") == 2


@pytest.mark.one_server
def test_a_server_that_restarted_is_noticed_before_anything_is_sent(server: Server, redis_url: str) -> None:
    link = Link(redis_url)
    link.call("PING")
    server.restart()
    link._used_at = 0.0
    assert link.call("SET", "a", "1") in (b"OK", "OK")


def test_no_server_is_said_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(RedisUnavailable, match=f"unix://{tmp_path}/none"):
        Link(f"unix://{tmp_path}/none").call("PING")


@pytest.mark.one_server
def test_a_connection_is_not_shared_with_a_forked_process(redis_url: str) -> None:
    link = Link(redis_url)
    link.learn_client_id(at="")
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


def test_a_call_that_takes_too_long_has_an_unknown_outcome(server: Server) -> None:
    link = Link(server.url, timeout_seconds=0.2)
    with pytest.raises(OutcomeUnknown, match="timed out"):
        link.call("BLPOP", "nothing", 0.5)


def test_a_script_is_run_for_several_queues_at_once_also_if_the_server_has_forgotten_it(server: Server) -> None:
    link = Link(server.url)
    with server.connect() as client:
        client.function_flush()
        client.set("queue:{b}:options", "not a hash")

    answers = link.run_many(script("counts"), [("queue:{a}",), ("queue:{b}",), ("queue:{a}",)])

    assert [type(answer) for answer in answers] == [list, ForqError, list]
    assert "WRONGTYPE" in str(answers[1])
    assert answers[0] == answers[2]


def test_a_connection_over_tcp_notices_that_the_other_machine_is_gone(server: Server) -> None:
    with relay(server) as port:
        connection = Connection(f"redis://127.0.0.1:{port}", name="test", connect_timeout_seconds=5, timeout_seconds=5)
        given = {option: connection.socket.getsockopt(socket.IPPROTO_TCP, option) for option in KEEPALIVE}
        assert given == KEEPALIVE
        assert connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        connection.close()
