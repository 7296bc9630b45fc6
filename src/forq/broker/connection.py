"""A socket to one Redis server that speaks RESP through hiredis.

redis-py's connection does the same and more, at a price that each of many small processes pays: 2 MB of private memory,
and about twice the CPU time of a small call.
"""

import socket
import struct
from collections.abc import Sequence
from typing import Any

import hiredis

from forq.broker.server_url import ServerAddress, read_server_url
from forq.procs import liveness

# From 128 KiB on malloc would get each buffer from the kernel, and give it back: 11 µs per call.
READ_BYTES = 64 * 1024
NOT_YET = object()
# A connection that only listens has no other way to notice that the server's machine is gone and another has taken
# over: after 10 s without a word it is asked every 3 s, and given up on after the third time.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}

_TIMEVAL = struct.Struct("ll")


class Connection:
    """Connected, logged in and named when it is made. Every error is an OSError or a hiredis error; BlockingIOError or
    TimeoutError when time is up."""

    def __init__(self, url: str, *, name: str, connect_timeout_seconds: float, timeout_seconds: float) -> None:
        address = read_server_url(url)
        self._timeout_seconds = timeout_seconds
        liveness.may_take(connect_timeout_seconds + (0.0 if address.path else liveness.LOOKUP_SECONDS))
        self.socket = _connect(address, connect_timeout_seconds)
        _limit(self.socket, timeout_seconds)
        self._reader = hiredis.Reader(notEnoughData=NOT_YET)
        try:
            self._greet(address, name)
        except BaseException:
            self.close()
            raise

    def send(self, command: tuple[Any, ...]) -> None:
        self.socket.sendall(hiredis.pack_command(command))

    def send_many(self, commands: Sequence[tuple[Any, ...]]) -> None:
        self.socket.sendall(b"".join(map(hiredis.pack_command, commands)))

    def receive(self) -> Any:
        """The next answer; a refusal is returned (hiredis.ReplyError), not raised."""
        answer = self._reader.gets()
        while answer is NOT_YET:
            if liveness.watched:
                liveness.may_take(self._timeout_seconds)
            received = self.socket.recv(READ_BYTES)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(received)
            answer = self._reader.gets()
        return answer

    def close(self) -> None:
        self.socket.close()

    def _greet(self, address: ServerAddress, name: str) -> None:
        greeting: list[tuple[Any, ...]] = []
        if address.password or address.username:
            user = (address.username,) if address.username else ()
            greeting.append(("AUTH", *user, address.password or ""))
        if address.db:
            greeting.append(("SELECT", address.db))
        greeting.append(("CLIENT", "SETNAME", name))
        self.send_many(greeting)
        for command in greeting:
            answer = self.receive()
            if isinstance(answer, hiredis.ReplyError):
                raise ConnectionRefusedError(f"{command[0]} was refused: {answer}")


def _limit(connection: socket.socket, seconds: float) -> None:
    """A time limit that the kernel keeps: Python's own asks with poll before each call whether it would block."""
    if type(connection) is not socket.socket:
        connection.settimeout(seconds)  # TLS
        return
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1_000_000))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _connect(address: ServerAddress, timeout_seconds: float) -> socket.socket:
    if address.path is not None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_seconds)
            connection.connect(address.path)
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection((address.host, address.port), timeout_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection if address.tls is None else _encrypted(connection, address.host, address.tls)


def _encrypted(connection: socket.socket, host: str, given: dict[str, str]) -> socket.socket:
    """TLS, with the certificate checked unless the URL says ssl_cert_reqs=none."""
    import ssl

    context = ssl.create_default_context(cafile=given.get("ssl_ca_certs"), capath=given.get("ssl_ca_path"))
    if given.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if given.get("ssl_check_hostname", "").lower() in ("false", "0", "no", "n", "f"):
        context.check_hostname = False
    if certificate := given.get("ssl_certfile"):
        context.load_cert_chain(certificate, given.get("ssl_keyfile"))
    try:
        return context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise
