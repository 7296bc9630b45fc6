"""Connections to one Redis server: redis-py's own classes, used at connection level.

1. `send` and `receive` go straight to the socket and to redis-py's parser. A connection that broke stays broken:
   redis-py's own send would connect again behind the caller's back, and its retries would repeat a BLMOVE or an enqueue
   whose reply was lost.
2. An answer that is a refusal is returned, with its code: redis-py's parser takes the code off, and makes of some
   (LOADING) the end of the connection.
3. Every other failure is an OSError: BlockingIOError if there is nothing to read in time, or at all.

To import this module takes redis-py's 0.15 s: others import it when they connect.
"""

import os
import socket
import ssl
import struct
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import redis.connection
from redis import ConnectionPool, Redis
from redis.event import EventDispatcher
from redis.exceptions import RedisError, ResponseError
from redis.sentinel import MasterNotFoundError, Sentinel

from forq.procs import liveness
from forq.redis_url import Address, read_address

# Each connection has a buffer of this size: of a hundred processes it is memory, and an answer seldom is longer.
READ_BYTES = 16 * 1024
# A connection that only listens has no other way to notice that the server's machine is gone and another has taken
# over: after 10 s without a word it is asked every 3 s, and given up on after the third time.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}
# Sentinels are asked one after another: one that does not answer must not take the time of all.
ASK_SECONDS = 1.0

# For pools, which there are not: without this one each connection makes its own, which takes 0.1 MB in each process.
_events = EventDispatcher()
_TIMEVAL = struct.Struct("ll")
# Else each connection tells the server redis-py's version, which newer releases read from its metadata every time.
_NO_LIBRARY_NAME: dict[str, Any] = (
    {"driver_info": None} if find_spec("redis.driver_info") else {"lib_name": None, "lib_version": None}
)

try:
    # redis-py would go through the arguments once more before it calls this: 2 µs of an enqueue.
    from hiredis import pack_command as _pack
except ImportError:
    _packer = redis.connection.Connection(**_NO_LIBRARY_NAME)

    def _pack(command: tuple[Any, ...]) -> bytes:  # type: ignore[misc]  # hiredis names other types
        return b"".join(_packer.pack_command(*command))


class Connection:
    """Connected, logged in and named when it is made; never connected again."""

    def __init__(self, url: str, *, name: str, connect_timeout_seconds: float, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        liveness.expect_busy(connect_timeout_seconds + (0.0 if url.startswith("unix:") else liveness.LOOKUP_SECONDS))
        self._redis = _copy(_template(url))
        self._redis.client_name = name
        self._redis.socket_connect_timeout, self._redis.socket_timeout = connect_timeout_seconds, timeout_seconds
        try:
            self._redis.connect()
        except (RedisError, OSError) as exc:
            # redis-py does this only for errors of its own.
            self._redis.disconnect()
            raise _broken(exc) from exc
        self.socket: socket.socket = self._redis._sock
        _limit(self.socket, timeout_seconds)
        self._read = self._redis._parser.read_response

    def send(self, command: tuple[Any, ...]) -> None:
        self.socket.sendall(_pack(command))

    def send_many(self, commands: Sequence[tuple[Any, ...]]) -> None:
        self.socket.sendall(b"".join(map(_pack, commands)))

    def receive(self) -> Any:
        """The next answer; a refusal is returned, as an exception with what the server said."""
        if liveness.watched:
            liveness.expect_busy(self._timeout_seconds)
        try:
            return self._read()
        except RedisError as exc:
            raise _broken(exc) from exc

    def close(self) -> None:
        self._redis.disconnect()


class _Parser(redis.connection.DefaultParser):  # type: ignore[misc,valid-type]  # without hiredis it is another
    @classmethod
    def parse_error(cls, response: str) -> ResponseError:
        return ResponseError(response)

    def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:
        # A long answer takes several reads, and each has the whole time limit.
        if liveness.watched:
            liveness.expect_busy(self._socket_timeout)
        return super().read_from_socket(*args, **kwargs)


class _TlsConnection(redis.connection.SSLConnection):
    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        """redis-py's own adds the authorities of the URL to those of the system: it believes more than the URL says,
        and takes 37 ms to load them all, each time."""
        context = ssl.create_default_context(cafile=self.ca_certs, capath=self.ca_path, cadata=self.ca_data)
        context.check_hostname = self.check_hostname
        context.verify_mode = self.cert_reqs
        if self.certfile:
            context.load_cert_chain(self.certfile, self.keyfile, self.certificate_password)
        if self.ssl_min_version is not None:
            context.minimum_version = ssl.TLSVersion(int(self.ssl_min_version))
        if self.ssl_ciphers:
            context.set_ciphers(self.ssl_ciphers)
        sock.settimeout(self.socket_connect_timeout)
        return context.wrap_socket(sock, server_hostname=self.host)


@cache
def _options(url: str) -> tuple[Any, dict[str, Any]]:
    """redis-py's class for the one server of this URL, and what it is made with but for its name and time limits."""
    # This says what is wrong, without the password. redis-py would take `/abc` for database 0.
    read_address(url)
    options: dict[str, Any] = redis.connection.parse_url(url)
    kind = options.pop("connection_class", redis.connection.Connection)
    if kind is not redis.connection.UnixDomainSocketConnection:
        options |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    options |= _NO_LIBRARY_NAME | {
        "protocol": 2,
        "decode_responses": False,
        "health_check_interval": 0,
        # None repeats nothing; any other is copied for each connection.
        "retry": None,
        "event_dispatcher": _events,
        "parser_class": _Parser,
        "redis_connect_func": _greet,
        "socket_read_size": READ_BYTES,
    }
    return _TlsConnection if kind is redis.connection.SSLConnection else kind, options


def _greet(connection: Any) -> None:
    """Logs in, selects the database and gives the connection its name, all in one round trip. redis-py's own way takes
    one for each, and 0.2 MB more of the memory that forked processes share."""
    connection._parser.on_connect(connection)
    greeting: list[tuple[Any, ...]] = []
    if connection.username or connection.password:
        user = (connection.username,) if connection.username else ()
        greeting.append(("AUTH", *user, connection.password or ""))
    if connection.db:
        greeting.append(("SELECT", connection.db))
    greeting.append(("CLIENT", "SETNAME", connection.client_name or ""))
    connection._sock.sendall(b"".join(map(_pack, greeting)))
    for command in greeting:
        answer = connection._parser.read_response()
        if isinstance(answer, Exception):
            raise redis.ConnectionError(f"{command[0]} was refused: {answer}")


@cache
def _template(url: str) -> Any:
    kind, options = _options(url)
    return kind(**options)


def _copy(template: Any) -> Any:
    """A connection like this one, which was never connected. To make one anew takes 0.6 MB of the memory that forked
    processes share. Nothing that the copies have in common changes once it is made."""
    made = object.__new__(type(template))
    vars(made).update(vars(template), pid=os.getpid())
    made.set_parser(_Parser)
    return made


def open_master(address: Address, name: str, connect_timeout_seconds: float, timeout_seconds: float) -> Connection:
    """A connection to the present master. Nothing is remembered: each new connection asks the sentinels.

    One that has not heard of a failover yet names the old master: so the server that it names is asked whether it is
    one, and if not, the next sentinel is asked. OSError says what each sentinel said.
    """
    found: list[str] = []
    for host, port in address.hosts:
        said = ""
        try:
            place = _ask_sentinel(address, host, port, name)
            said = f"it names {place[0]}:{place[1]}, "
            return _open_if_master(address.server_url(*place), name, connect_timeout_seconds, timeout_seconds)
        except OSError as exc:
            found.append(f"{host}:{port}: {said}{exc}")
    raise ConnectionError(f"no sentinel leads to a master {address.master!r} ({'; '.join(found)})")


def _ask_sentinel(address: Address, host: str, port: int, name: str) -> tuple[str, int]:
    kind, options = _options(address.sentinel_url(host, port))
    limits: dict[str, Any] = {"socket_connect_timeout": ASK_SECONDS, "socket_timeout": ASK_SECONDS}
    liveness.expect_busy(2 * ASK_SECONDS + liveness.LOOKUP_SECONDS)
    pool, sentinels = ConnectionPool(kind, client_name=name, **options, **limits), Sentinel([])
    try:
        # This connects. What discover_master says of a sentinel that it cannot reach has the password in it.
        sentinels.sentinels = [Redis(connection_pool=pool, single_connection_client=True)]
        place: tuple[str, int] = sentinels.discover_master(address.master)
    except MasterNotFoundError:
        raise ConnectionError("it knows no master of that name, or it is down") from None
    except (RedisError, OSError) as exc:
        raise _broken(exc) from exc
    finally:
        pool.disconnect()
    return place


def _open_if_master(url: str, name: str, connect_timeout_seconds: float, timeout_seconds: float) -> Connection:
    connection = Connection(
        url, name=name, connect_timeout_seconds=connect_timeout_seconds, timeout_seconds=timeout_seconds
    )
    try:
        connection.send(("INFO", "replication"))
        answer = connection.receive()
        if isinstance(answer, Exception):
            raise ConnectionError(str(answer))
        if b"role:master" not in answer:
            raise ConnectionError("which is no master (any more)")
    except BaseException:
        connection.close()
        raise
    return connection


def warm(url: str) -> None:
    """Does once, before a supervisor forks, what each connection does: its children share the memory that it takes."""
    address = read_address(url)
    connection = _copy(_template(address.server_url(*address.hosts[0]) if address.hosts else url))
    connection._sock, server = socket.socketpair()
    with server:
        # For AUTH, SELECT and CLIENT.
        server.sendall(b"+OK\r\n" * 3)
        _greet(connection)
        connection.disconnect()


def _limit(connection: socket.socket, seconds: float) -> None:
    """A time limit that the kernel keeps: Python's own asks with poll before each call whether it would block."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1_000_000))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _broken(exc: RedisError | OSError) -> OSError:
    """Of a time limit that the kernel keeps redis-py says: Resource temporarily unavailable. Up to 6.4 its parser has
    Python's TimeoutError for another, with another text."""
    if isinstance(exc.__context__, BlockingIOError | ssl.SSLWantReadError):
        return BlockingIOError("timed out")
    waited = isinstance(exc, redis.TimeoutError | TimeoutError)
    return TimeoutError("timed out") if waited else ConnectionError(str(exc))
