"""Each fault of the proxy, in front of a real server."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.broker.link import Link
from forq.errors import OutcomeUnknown, RedisUnavailable
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until
from tests.support.faults.proxy import Proxy


@pytest.fixture
def proxy(server: Server, redis_url: str, tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(server.socket, listen=tmp_path / "p.sock") as proxy:
        yield proxy


@pytest.fixture
def link(proxy: Proxy) -> Iterator[Link]:
    link = Link(proxy.url, timeout_seconds=0.5)
    link.call("PING")
    yield link
    link.close()


def in_server(server: Server) -> int:
    with server.connect() as client:
        return int(client.get("n") or 0)


def test_the_nth_reply_is_lost_after_its_command_ran(proxy: Proxy, link: Link, server: Server) -> None:
    proxy.drop_reply(3)
    assert [link.call("INCR", "n") for _ in range(2)] == [1, 2]
    with pytest.raises(OutcomeUnknown):
        link.call("INCR", "n")
    assert in_server(server) == 3
    assert proxy.dropped == 1
    assert link.call("INCR", "n") == 4, "the next connection works"


def test_a_held_request_arrives_after_later_requests_of_its_client(proxy: Proxy, link: Link, server: Server) -> None:
    proxy.hold_request(b"early", 0.3)
    assert link.call("RPUSH", "l", "another") == 1
    with pytest.raises(OutcomeUnknown):
        link.call("RPUSH", "l", "early")
    assert link.call("RPUSH", "l", "later") == 2, "the next connection works"
    wait_until(lambda: proxy.late_answers() == [b":3\r\n"], what="the late request is answered")
    assert link.call("LRANGE", "l", 0, -1) == [b"another", b"later", b"early"]
    assert proxy.connections() == 1


def test_a_request_held_when_the_proxy_is_healed_never_arrives(proxy: Proxy, link: Link, server: Server) -> None:
    proxy.hold_request(b"INCR", 3600)
    with pytest.raises(OutcomeUnknown):
        link.call("INCR", "n")
    proxy.heal()
    proxy.hold_request(b"another", 0)
    with pytest.raises(OutcomeUnknown):
        link.call("SET", "another", 1)
    wait_until(lambda: proxy.late_answers() == [b"+OK\r\n"], what="a later one arrives")
    assert in_server(server) == 0


def test_a_cut_ends_connections_and_nothing_else(proxy: Proxy, link: Link) -> None:
    proxy.cut()
    wait_until(lambda: proxy.connections() == 0)
    with pytest.raises(OutcomeUnknown):
        link.call("PING")
    assert link.call("INCR", "n") == 1


def test_requests_held_by_a_frozen_proxy_pass_when_it_thaws(proxy: Proxy, link: Link, server: Server) -> None:
    proxy.freeze()
    with pytest.raises(OutcomeUnknown):
        link.call("INCR", "n")
    assert in_server(server) == 0
    proxy.thaw()
    wait_until(lambda: in_server(server) == 1, what="the late command arrives")


def test_a_delay_is_added_in_both_directions(proxy: Proxy, link: Link) -> None:
    proxy.delay(0.1)
    began = time.monotonic()
    link.call("PING")
    assert time.monotonic() - began >= 0.2


def test_a_half_open_connection_is_silent_until_it_is_cut(proxy: Proxy, link: Link, server: Server) -> None:
    assert proxy.half_open() == 1
    with pytest.raises(OutcomeUnknown):
        link.call("INCR", "n")
    assert in_server(server) == 0
    assert link.call("INCR", "n") == 1, "another connection is not concerned"
    proxy.heal()
    wait_until(lambda: proxy.connections() == 0)


def test_without_a_server_the_proxy_disconnects(tmp_path: Path) -> None:
    with Proxy(tmp_path / "nobody.sock") as proxy, pytest.raises(RedisUnavailable):
        Link(proxy.url, timeout_seconds=0.5).call("PING")


def test_a_large_answer_passes_completely(proxy: Proxy, link: Link, server: Server) -> None:
    with server.connect() as client:
        client.set("big", b"x" * 5_000_000)
    assert link.call("GET", "big") == b"x" * 5_000_000
