"""Connections by unix socket, TCP, password and database number, and broken connections."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from forq.broker.connection import KEEPALIVE, Connection
from forq.broker.inspect import counts_of
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.scripts import script
from forq.errors import ForqError, OutcomeUnknown, RedisUnavailable
from tests.support.drive.one_queue import one_queue
from tests.support.drive.server import Server
from tests.support.faults.proxy import Proxy


@pytest.mark.one_server
def test_a_unix_socket_and_a_tcp_port_reach_the_same_data(server: Server, redis_url: str) -> None:
    Link(redis_url).call("SET", "a", "1")
    with Proxy(server.socket) as proxy:
        assert Link(proxy.url).call("GET", "a") == b"1"
        assert Link(f"{proxy.url}/3").call("GET", "a") is None


def test_a_password_is_sent_and_never_shown(server: Server, redis_url: str) -> None:
    with server.connect() as redis:
        redis.execute_command("ACL", "SETUSER", "someone", "on", ">se cret", "~*", "+@all")
    with Proxy(server.socket) as proxy:
        assert Link(f"redis://someone:se%20cret@127.0.0.1:{proxy.port}").call("ACL", "WHOAMI") == b"someone"
        wrong = Link(f"redis://someone:wrong@127.0.0.1:{proxy.port}")
        with pytest.raises(RedisUnavailable) as refused:
            wrong.call("PING")
    assert "wrong" not in str(refused.value).replace("WRONGPASS", "")
    with server.connect() as redis:
        redis.execute_command("ACL", "DELUSER", "someone")


def test_a_call_with_a_lost_reply_is_reported_and_never_repeated(server: Server, redis_url: str) -> None:
    with Proxy(server.socket) as proxy:
        proxy.drop_reply(text=b"+PONG")
        link = Link(proxy.url)
        link.call("SET", "x", "1")
        with pytest.raises(OutcomeUnknown):
            link.call("PING")
        assert link.call("INCR", "x") == 2


@pytest.mark.one_server
def test_a_restarted_server_is_detected_before_anything_is_sent(server: Server, redis_url: str) -> None:
    link = Link(redis_url)
    link.call("PING")
    server.restart()
    link._used_at = 0.0
    assert link.call("SET", "a", "1") in (b"OK", "OK")


def test_an_unreachable_server_is_reported_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(RedisUnavailable, match=f"unix://{tmp_path}/none"):
        Link(f"unix://{tmp_path}/none").call("PING")


@pytest.mark.one_server
def test_an_absent_embedded_server_is_reported_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORQ_REDIS", raising=False)
    advice = r"; is a supervisor \(forq run\) running with this state directory\? If not: .* set FORQ_STATE_DIR$"
    with pytest.raises(RedisUnavailable, match=advice):
        Link(f"unix://{tmp_path}/redis.sock").call("PING")
    (tmp_path / "redis.sock").touch()
    for socket_name in ("redis.sock", "other.sock"):
        with pytest.raises(RedisUnavailable) as caught:
            Link(f"unix://{tmp_path}/{socket_name}").call("PING")
        assert "supervisor" not in str(caught.value)


def test_a_connection_is_not_shared_with_a_forked_process(redis_url: str) -> None:
    link = Link(redis_url)
    link.fetch_client_id(at="")
    before = link.client_id
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


def test_a_script_runs_for_several_queues_at_once_even_if_the_server_has_forgotten_it(server: Server) -> None:
    link = Link(server.url)
    with server.connect() as client:
        client.function_flush()
        client.set("queue:{b}:options", "not a hash")

    answers = link.run_batch(script("counts"), [("queue:{a}",), ("queue:{b}",), ("queue:{a}",)])

    assert [type(answer) for answer in answers] == [list, ForqError, list]
    assert "WRONGTYPE" in str(answers[1])
    assert answers[0] == answers[2]


NO_FUNCTIONS = {
    "the server has no functions": 'rename-command FUNCTION ""\nrename-command FCALL ""\n',
    "the user may not load any": "user default on nopass ~* &* +@all -function\n",
    "the user may not call any": "user default on nopass ~* &* +@all -function -fcall\n",
}


@pytest.mark.parametrize("why", NO_FUNCTIONS)
def test_where_functions_are_refused_the_library_runs_through_eval(tmp_path: Path, why: str) -> None:
    conf = tmp_path / "redis.conf"
    conf.write_text(NO_FUNCTIONS[why])
    server = Server(include=conf)
    server.start()
    try:
        with one_queue(server.url) as queue:
            queue.link.load_library(script("turn"))
            worker = queue.worker()
            assert queue.enqueue("a", "b") == ["a", "b"]
            assert worker.turn(want=2) == ["a", "b"]
            worker.turn(done="a", keep=1)
            queue.registry.pause(queue.name, paused=True)
            assert counts_of(queue.link, DEFAULT_PREFIX, [queue.name])[queue.name] == queue.inspector.counts()
            queue.enqueue("c")
            # A turn sent along with a BLMOVE is not repeated; the next turn is an ordinary one.
            assert worker.consumer.wait_for_turn(worker.number + 1, 1) is None
            assert queue.registry.delete(queue.name, force=True) == 2
            assert queue.link.library_reloads() == 0
    finally:
        server.remove()


def test_functions_are_used_again_as_soon_as_a_server_accepts_them() -> None:
    server = Server()
    server.start()
    try:
        with one_queue(server.url) as queue:
            before = queue.link.library_reloads()
            queue.redis.function_flush()
            queue.redis.execute_command("ACL", "SETUSER", "default", "-function")
            assert queue.enqueue("a") == ["a"]
            queue.redis.execute_command("ACL", "SETUSER", "default", "+function")
            assert queue.redis.function_list() == []
            queue.link._eval_until = 0.0
            assert queue.enqueue("b") == ["b"]
            assert len(queue.redis.function_list()) == 1
            assert queue.link.library_reloads() == before + 1
    finally:
        server.remove()


def test_a_tcp_connection_detects_that_the_other_machine_is_gone(server: Server) -> None:
    with Proxy(server.socket) as proxy:
        connection = Connection(proxy.url, name="test", connect_timeout_seconds=5, timeout_seconds=5)
        given = {option: connection.socket.getsockopt(socket.IPPROTO_TCP, option) for option in KEEPALIVE}
        assert given == KEEPALIVE
        assert connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        connection.close()
