"""Connections to one Redis server, based on redis-py's connection classes; and the discovery of a master by sentinels.

1. `send` and `receive` use the socket and redis-py's parser directly. A broken connection stays broken: redis-py would
   reconnect silently, and its retries would repeat a BLMOVE or an enqueue whose reply was lost.
2. `receive` returns an error reply as an exception with its code. redis-py's parser removes the code, and closes the
   connection for some (LOADING).
3. Every other failure is an OSError; BlockingIOError if nothing arrived in time.

Importing this module imports redis-py, which takes 0.15 s: other modules import it when they connect.
"""

import os
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import redis.connection
from redis.event import EventDispatcher
from redis.exceptions import RedisError, ResponseError

from forq.procs import liveness
from forq.redis_url import Address, read_address

# The read buffer of each connection. Replies are seldom longer, and there may be a hundred processes.
READ_BYTES = 16 * 1024
# A subscription only notices a dead server machine by these: after 10 s of silence, three probes 3 s apart.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}
# Per sentinel, tried one after another: one that does not reply must not use up the time of all.
SENTINEL_TIMEOUT_SECONDS = 1.0

# Shared: otherwise each connection would create its own, 0.1 MB per process.
_events = EventDispatcher()
_TIMEVAL = struct.Struct("ll")
# Do not send redis-py's version: newer releases read it from package metadata for each connection.
_NO_LIBRARY_NAME: dict[str, Any] = (
    {"driver_info": None} if find_spec("redis.driver_info") else {"lib_name": None, "lib_version": None}
)

try:
    # Called directly because redis-py copies the arguments first: 2 µs per enqueue.
    from hiredis import pack_command as _pack
except ImportError:
    _packer = redis.connection.Connection(**_NO_LIBRARY_NAME)

    def _pack(command: tuple[Any, ...]) -> bytes:  # type: ignore[misc]  # hiredis names other types
        return b"".join(_packer.pack_command(*command))


def pack(command: tuple[Any, ...]) -> bytes:
    """The command as it is sent."""
    packed: bytes = _pack(command)
    return packed


class Connection:
    """A connection that is connected, authenticated and named on creation, and never reconnects."""

    def __init__(self, url: str, *, name: str, connect_timeout_seconds: float, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        liveness.expect_busy(connect_timeout_seconds + (0.0 if url.startswith("unix:") else liveness.LOOKUP_SECONDS))
        self._redis = _copy(_template(url))
        self._redis.client_name = name
        self._redis.socket_connect_timeout, self._redis.socket_timeout = connect_timeout_seconds, timeout_seconds
        try:
            self._redis.connect()
        except (RedisError, OSError) as exc:
            # redis-py only disconnects for its own errors.
            self._redis.disconnect()
            raise _to_os_error(exc) from exc
        self.socket: socket.socket = self._redis._sock
        _set_timeout(self.socket, timeout_seconds)
        self._read = self._redis._parser.read_response

    def send(self, command: tuple[Any, ...]) -> None:
        self.socket.sendall(_pack(command))

    def send_many(self, commands: Sequence[tuple[Any, ...]]) -> None:
        self.socket.sendall(b"".join(map(_pack, commands)))

    def receive(self) -> Any:
        """The next reply; an error reply is returned as an exception with the server's text."""
        if liveness.watched:
            liveness.expect_busy(self._timeout_seconds)
        try:
            return self._read()
        except RedisError as exc:
            raise _to_os_error(exc) from exc

    def is_closed(self) -> bool:
        """Whether the server has closed it: an idle connection is readable only then."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._redis.disconnect()


class _Parser(redis.connection.DefaultParser):  # type: ignore[misc,valid-type]  # without hiredis it is another
    @classmethod
    def parse_error(cls, response: str) -> ResponseError:
        return ResponseError(response)

    def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:
        # A long reply takes several reads, each with the full timeout.
        if liveness.watched:
            liveness.expect_busy(self._socket_timeout)
        return super().read_from_socket(*args, **kwargs)


class _TlsConnection(redis.connection.SSLConnection):
    def tls_context(self) -> ssl.SSLContext:
        """Trusts only the CAs of the URL, if it names any. redis-py would add them to the system's CAs, which also take
        37 ms to load for each connection."""
        context = ssl.create_default_context(cafile=self.ca_certs, capath=self.ca_path, cadata=self.ca_data)
        context.check_hostname = self.check_hostname
        context.verify_mode = self.cert_reqs
        if self.certfile:
            context.load_cert_chain(self.certfile, self.keyfile, self.certificate_password)
        if self.ssl_min_version is not None:
            context.minimum_version = ssl.TLSVersion(int(self.ssl_min_version))
        if self.ssl_ciphers:
            context.set_ciphers(self.ssl_ciphers)
        return context

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        sock.settimeout(self.socket_connect_timeout)
        return self.tls_context().wrap_socket(sock, server_hostname=self.host)


@cache
def _options(url: str) -> tuple[Any, dict[str, Any]]:
    """redis-py's connection class for this URL and its arguments, without name and timeouts."""
    # Validates the URL; its errors do not show the password. redis-py would read `/abc` as database 0.
    read_address(url)
    options: dict[str, Any] = redis.connection.parse_url(url)
    kind = options.pop("connection_class", redis.connection.Connection)
    if kind is not redis.connection.UnixDomainSocketConnection:
        options |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    options |= _NO_LIBRARY_NAME | {
        "protocol": 2,
        "decode_responses": False,
        "health_check_interval": 0,
        # None means no retries; any other value is copied for each connection.
        "retry": None,
        "event_dispatcher": _events,
        "parser_class": _Parser,
        "redis_connect_func": _handshake,
        "socket_read_size": READ_BYTES,
    }
    return _TlsConnection if kind is redis.connection.SSLConnection else kind, options


def _handshake(connection: Any) -> None:
    """Sends AUTH, SELECT and CLIENT SETNAME in one round trip. redis-py's own handshake takes one each, and unshares
    0.2 MB more of the memory of forked processes."""
    connection._parser.on_connect(connection)
    commands: list[tuple[Any, ...]] = []
    if connection.username or connection.password:
        user = (connection.username,) if connection.username else ()
        commands.append(("AUTH", *user, connection.password or ""))
    if connection.db:
        commands.append(("SELECT", connection.db))
    commands.append(("CLIENT", "SETNAME", connection.client_name or ""))
    connection._sock.sendall(b"".join(map(_pack, commands)))
    for command in commands:
        answer = connection._parser.read_response()
        if isinstance(answer, Exception):
            raise redis.ConnectionError(f"{command[0]} was refused: {answer}")


@cache
def _template(url: str) -> Any:
    kind, options = _options(url)
    return kind(**options)


def _copy(template: Any) -> Any:
    """A copy of a connection that was never connected. Creating one instead would unshare 0.6 MB of the memory of
    forked processes. The state that the copies share never changes."""
    made = object.__new__(type(template))
    vars(made).update(vars(template), pid=os.getpid())
    made.set_parser(_Parser)
    return made


def open_master(
    kind: type[Connection], address: Address, name: str, connect_timeout_seconds: float, timeout_seconds: float
) -> Connection:
    """Connects to the current master. Nothing is cached: each new connection queries the sentinels.

    A sentinel that has not noticed a failover yet names the old master. So the role of the named server is checked,
    and the next sentinel is tried if it is not a master. The OSError lists the failure of each sentinel.
    """
    errors: list[str] = []
    for host, port in address.hosts:
        named = ""
        try:
            master = _query_sentinel(kind, address, host, port, name)
            named = f"it names {master[0]}:{master[1]}, "
            return _open_if_master(kind, address.server_url(*master), name, connect_timeout_seconds, timeout_seconds)
        except OSError as exc:
            errors.append(f"{host}:{port}: {named}{exc}")
    raise ConnectionError(f"no sentinel found a working master {address.master!r} ({'; '.join(errors)})")


def _query_sentinel(kind: type[Connection], address: Address, host: str, port: int, name: str) -> tuple[str, int]:
    """The host and port of the master, according to this sentinel."""
    url = address.sentinel_url(host, port)
    limits = {"connect_timeout_seconds": SENTINEL_TIMEOUT_SECONDS, "timeout_seconds": SENTINEL_TIMEOUT_SECONDS}
    connection = kind(url, name=name, **limits)
    try:
        connection.send(("SENTINEL", "MASTERS"))
        masters = connection.receive()
    finally:
        connection.close()
    if isinstance(masters, Exception):
        raise ConnectionError(str(masters))
    for flat in masters:
        master = dict(zip(flat[::2], flat[1::2], strict=True))
        flags = set(master[b"flags"].split(b","))
        if master[b"name"] == address.master.encode() and b"master" in flags and not flags & {b"s_down", b"o_down"}:
            return master[b"ip"].decode(), int(master[b"port"])
    raise ConnectionError("it knows no master with that name, or the master is down")


def _open_if_master(
    kind: type[Connection], url: str, name: str, connect_timeout_seconds: float, timeout_seconds: float
) -> Connection:
    connection = kind(url, name=name, connect_timeout_seconds=connect_timeout_seconds, timeout_seconds=timeout_seconds)
    try:
        connection.send(("INFO", "replication"))
        answer = connection.receive()
        if isinstance(answer, Exception):
            raise ConnectionError(str(answer))
        if b"role:master" not in answer:
            raise ConnectionError("which is not a master")
    except BaseException:
        connection.close()
        raise
    return connection


def warm(url: str) -> None:
    """Runs the code of a new connection once before the supervisor forks, so that its children share the memory."""
    address = read_address(url)
    connection = _copy(_template(address.server_url(*address.hosts[0]) if address.hosts else url))
    connection._sock, server = socket.socketpair()
    with server:
        # Replies for AUTH, SELECT and CLIENT.
        server.sendall(b"+OK\r\n" * 3)
        _handshake(connection)
        connection.disconnect()


def _set_timeout(connection: socket.socket, seconds: float) -> None:
    """Sets a kernel timeout. Python's own timeout adds a poll before each call."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1_000_000))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _to_os_error(exc: RedisError | OSError) -> OSError:
    """Maps redis-py's errors to OSError, with one text for all timeouts.

    redis-py reports a kernel timeout as "Resource temporarily unavailable"; up to 6.4 its parser raises Python's
    TimeoutError with another text.
    """
    if isinstance(exc.__context__, BlockingIOError | ssl.SSLWantReadError):
        return BlockingIOError("timed out")
    timed_out = isinstance(exc, redis.TimeoutError | TimeoutError)
    return TimeoutError("timed out") if timed_out else ConnectionError(str(exc))
