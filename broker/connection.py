"""A socket to one Redis server that speaks RESP through hiredis.

redis-py's connection does the same and more, at a price that each of many small processes pays: 2 MB of private memory,
and about twice the CPU time of a small call. Its URL rules are used, so that every redis-py URL works here.
"""

import socket
import ssl
import struct
from typing import Any
from urllib.parse import urlsplit

import hiredis
from redis.connection import parse_url

READ_BYTES = 256 * 1024
NOT_YET = object()


class Connection:
    """Connected, logged in and named when it is made. Every error is an OSError or a hiredis error; BlockingIOError or
    TimeoutError when time is up."""

    def __init__(self, url: str, *, name: str, connect_timeout_seconds: float, timeout_seconds: float) -> None:
        options: dict[str, Any] = dict(parse_url(url))
        self.socket = _connect(url, options, connect_timeout_seconds)
        _limit(self.socket, timeout_seconds)
        self._reader = hiredis.Reader(notEnoughData=NOT_YET)
        try:
            self._greet(options, name)
        except BaseException:
            self.close()
            raise

    def send(self, command: tuple[Any, ...]) -> None:
        self.socket.sendall(hiredis.pack_command(command))

    def send_many(self, commands: list[tuple[Any, ...]]) -> None:
        self.socket.sendall(b"".join(map(hiredis.pack_command, commands)))

    def receive(self) -> Any:
        """The next answer; a refusal is returned (hiredis.ReplyError), not raised."""
        answer = self._reader.gets()
        while answer is NOT_YET:
            received = self.socket.recv(READ_BYTES)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(received)
            answer = self._reader.gets()
        return answer

    def close(self) -> None:
        self.socket.close()

    def _greet(self, options: dict[str, Any], name: str) -> None:
        greeting: list[tuple[Any, ...]] = []
        if options.get("password") or options.get("username"):
            user = (options["username"],) if options.get("username") else ()
            greeting.append(("AUTH", *user, options.get("password") or ""))
        if options.get("db"):
            greeting.append(("SELECT", options["db"]))
        greeting.append(("CLIENT", "SETNAME", name))
        self.send_many(greeting)
        for command in greeting:
            answer = self.receive()
            if isinstance(answer, hiredis.ReplyError):
                raise ConnectionRefusedError(f"{command[0]} was refused: {answer}")


def _limit(connection: socket.socket, seconds: float) -> None:
    """A time limit that the kernel keeps: Python's own asks with poll before each call whether it would block."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _connect(url: str, options: dict[str, Any], timeout_seconds: float) -> socket.socket:
    if path := options.get("path"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_seconds)
            connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return connection
    host = options.get("host") or "localhost"
    connection = socket.create_connection((host, options.get("port") or 6379), timeout_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return _encrypted(connection, host, options) if urlsplit(url).scheme == "rediss" else connection


def _encrypted(connection: socket.socket, host: str, options: dict[str, Any]) -> socket.socket:
    """TLS, with the certificate checked unless the URL says ssl_cert_reqs=none."""
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"), capath=options.get("ssl_ca_path"))
    if options.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.get("ssl_check_hostname") in (False, "false", "False", "0"):
        context.check_hostname = False
    if options.get("ssl_certfile"):
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    try:
        return context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise
