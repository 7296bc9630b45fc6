"""Who is at the other end of a connection: real sockets, and a second user."""

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from forq.procs import sock_diag
from forq.procs.sock_diag import owner_of
from forq.web import peers
from forq.web.peers import WebPeer, find_peer, groups_of_user, user_name
from tests.support.drive.wait import wait_until
from tests.web.serving import NOBODY, as_user

LOOPBACK = [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def connected(
    address: str = "127.0.0.1", family: int = socket.AF_INET
) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A client, the server's end, the listener."""
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as exc:
        pytest.skip(f"this machine has no {address}: {exc}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        accepted, _ = listener.accept()
        with accepted:
            yield client, accepted, listener


@pytest.mark.parametrize(("address", "family"), LOOPBACK)
def test_the_user_of_a_loopback_connection_is_known(address: str, family: int) -> None:
    with connected(address, family) as (_, accepted, _):
        assert find_peer(accepted) == WebPeer("tcp", True, os.getuid(), None, address)


def test_an_ipv4_client_of_a_socket_for_both_families_is_known_by_its_ipv4_address() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("::", 0))
        except OSError as exc:
            pytest.skip(f"no IPv6 here: {exc}")
        listener.listen()
        port = listener.getsockname()[1]
        for family, target in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
            with socket.socket(family) as client:
                client.connect((target, port))
                accepted, _ = listener.accept()
                with accepted:
                    assert find_peer(accepted) == WebPeer("tcp", True, os.getuid(), None, "127.0.0.1")


@needs_root
@pytest.mark.parametrize(("address", "family"), LOOPBACK)
def test_another_user_is_told_from_us(address: str, family: int) -> None:
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as exc:
        pytest.skip(f"this machine has no {address}: {exc}")
    with listener:
        found: list[WebPeer] = []

        def connect() -> bytes:
            with socket.create_connection(listener.getsockname()[:2]) as client:
                return client.recv(10)

        reading = as_user_while(connect, listener, found)
        assert reading == b"seen"
    assert found == [WebPeer("tcp", True, NOBODY, None, address)]


def as_user_while(connect: Callable[[], bytes], listener: socket.socket, found: list[WebPeer]) -> bytes:
    """Runs `connect` as another user, and looks at its connection meanwhile."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, connect())
        finally:
            os._exit(0)
    os.close(writing)
    accepted, _ = listener.accept()
    with accepted:
        found.append(find_peer(accepted))
        accepted.sendall(b"seen")
    with os.fdopen(reading, "rb") as answer:
        result = answer.read()
    os.waitpid(pid, 0)
    return result


def test_a_client_that_has_closed_its_socket_is_nobody() -> None:
    # Older kernels report such a socket as root's, and would let anybody act who does not wait for the answer.
    with connected() as (client, accepted, _):
        client.sendall(b"POST / HTTP/1.1\r\n\r\n")
        client.close()
        assert find_peer(accepted) == WebPeer("tcp", True, None, None, "127.0.0.1")


def test_a_client_that_has_only_ended_its_sending_is_known() -> None:
    with connected() as (client, accepted, _):
        client.shutdown(socket.SHUT_WR)
        assert find_peer(accepted).uid == os.getuid()


def test_a_connection_that_was_reset_is_nobodys() -> None:
    with connected() as (client, accepted, _):
        addresses = client.getsockname(), accepted.getsockname()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert owner_of(*addresses) is None
        assert find_peer(accepted).uid is None


def test_the_addresses_of_a_reset_connection_may_belong_to_another_client_by_now() -> None:
    with connected() as (client, accepted, listener):
        source = client.getsockname()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with socket.socket() as later:
            later.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            later.bind(source)
            later.connect(listener.getsockname())
            assert owner_of(source, listener.getsockname()) == os.getuid()
            # The end of the first client asks the same question, and is not its owner.
            assert find_peer(FirstEnd(accepted, source, listener.getsockname())).uid is None


class FirstEnd:
    """Our end of the first connection, with the addresses that it had when it was accepted."""

    family = socket.AF_INET

    def __init__(self, sock: socket.socket, client: tuple[str, int], server: tuple[str, int]) -> None:
        self._sock, self._client, self._server = sock, client, server

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        return self._sock.getsockopt(level, name, size)

    def getpeername(self) -> tuple[str, int]:
        return self._client

    def getsockname(self) -> tuple[str, int]:
        return self._server


def test_a_socket_that_listens_at_the_clients_port_is_not_taken_for_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        assert owner_of(other.getsockname(), listener.getsockname()) is None


def test_a_client_bound_to_the_loopback_device_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        try:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except OSError as exc:
            pytest.skip(f"cannot bind to a device: {exc}")
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert find_peer(accepted).uid == os.getuid()


def test_a_remote_client_has_an_address_and_no_user() -> None:
    with connected() as (_, accepted, _):
        remote = FirstEnd(accepted, ("192.0.2.7", 4321), ("192.0.2.1", 9465))
        assert find_peer(remote) == WebPeer("tcp", False, None, None, "192.0.2.7")


def test_our_own_address_is_no_remote_one() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as exc:
            pytest.skip(f"this machine has no address besides loopback: {exc}")
        own = probe.getsockname()[0]
    with socket.create_server((own, 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert find_peer(accepted) == WebPeer("tcp", True, os.getuid(), None, own)
            client.close()
            # Not even when its user is not known any more.
            assert find_peer(accepted) == WebPeer("tcp", True, None, None, own)


def test_a_kernel_that_cannot_be_asked_leaves_the_user_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(client: object, server: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(peers, "owner_of", fail)
    with connected() as (_, accepted, _):
        assert find_peer(accepted) == WebPeer("tcp", True, None, None, "127.0.0.1")
    assert "cannot ask the kernel" in caplog.text


def test_repeated_questions_have_one_answer_and_leave_no_descriptor() -> None:
    with connected() as (client, accepted, _):
        answers = {owner_of(client.getsockname(), accepted.getsockname()) for _ in range(100)}
        opened = len(os.listdir("/proc/self/fd"))
        answers.add(owner_of(client.getsockname(), accepted.getsockname()))
        assert len(os.listdir("/proc/self/fd")) == opened
    assert answers == {os.getuid()}


def test_a_unix_socket_reports_user_and_groups() -> None:
    first, second = socket.socketpair()
    with closing(first), closing(second):
        assert find_peer(first) == WebPeer("unix", True, os.getuid(), frozenset({os.getgid(), *os.getgroups()}))


@needs_root
def test_the_groups_of_another_user_come_with_the_unix_socket(unix_listener: tuple[str, socket.socket]) -> None:
    path, listener = unix_listener

    def connect() -> bytes:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            return b"connected"

    assert as_user(NOBODY, 1, [2, 54321], connect) == b"connected"
    accepted = wait_until(lambda: _accept(listener), what="a client")
    with accepted:
        assert find_peer(accepted) == WebPeer("unix", True, NOBODY, frozenset({1, 2, 54321}))


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        return listener.accept()[0]
    except BlockingIOError:
        return None


def test_groups_and_name_of_a_user_by_number() -> None:
    assert groups_of_user(0) >= {0}
    assert user_name(0) == "root"
    assert groups_of_user(4_000_000_000) == frozenset()
    assert user_name(4_000_000_000) == "4000000000"


def test_an_address_in_ipv6_form_is_the_ipv4_address() -> None:
    assert str(sock_diag.plain_address("::ffff:10.0.0.5")) == "10.0.0.5"
    assert str(sock_diag.plain_address("fe80::1%eth0")) == "fe80::1"
