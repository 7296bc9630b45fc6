"""One connection to Redis, with the errors of forq.

1. A call is sent once. Nothing is repeated behind the caller's back: a lost reply is OutcomeUnknown, and the caller
   knows what to do about it (redis-py's own retries would repeat a BLMOVE or an enqueue).
2. A call that was certainly not carried out is RedisUnavailable.
3. The connection is made on demand and never shared with a forked process.
"""

import os
import select
import time
from typing import Any, cast

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from forq.broker.scripts import Script
from forq.errors import BackPressure, ForqError, OutcomeUnknown, RedisUnavailable

CONNECT_TIMEOUT_SECONDS = 5.0
CALL_TIMEOUT_SECONDS = 10.0
# A connection that was idle for so long is looked at before it is used: the server may have closed it.
IDLE_CHECK_SECONDS = 0.5

_NOT_NOW = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "READONLY")


class Link:
    """A connection to one Redis server."""

    def __init__(self, url: str, *, name: str = "forq", timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        self.url = url
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._connection: AbstractConnection | None = None
        self._pid = 0
        self._used_at = 0.0

    def call(self, *args: Any) -> Any:
        """Sends one command and returns its answer."""
        connection = self._ready()
        try:
            connection.send_command(*args)
            answer = connection.read_response()
        except (RedisConnectionError, RedisTimeoutError, OSError) as exc:
            self.close()
            raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {exc}") from exc
        except ResponseError as exc:
            raise self._refusal(exc) from exc
        except BaseException:
            # A signal or a cancelled task between request and answer: the next answer would be the wrong one.
            self.close()
            raise
        self._used_at = time.monotonic()
        return answer

    def run(self, script: Script, base: str, *args: Any) -> list[Any]:
        """Runs a script of the queue with this base."""
        try:
            return cast(list[Any], self.call("EVALSHA", script.sha, 1, base, *args))
        except _ScriptMissing:
            self.call("SCRIPT", "LOAD", script.source)
            return cast(list[Any], self.call("EVALSHA", script.sha, 1, base, *args))

    def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Sends several read commands at once; answers in order."""
        connection = self._ready()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            return [connection.read_response() for _ in commands]
        except (RedisError, OSError) as exc:
            self.close()
            raise RedisUnavailable(f"Redis at {self.shown_url}: {exc}") from exc

    def client_id(self) -> int:
        return int(self.call("CLIENT", "ID"))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            connection.disconnect()

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    def _ready(self) -> AbstractConnection:
        connection = self._connection
        if connection is not None and self._pid == os.getpid():
            if time.monotonic() - self._used_at < IDLE_CHECK_SECONDS or not self._hung_up(connection):
                return connection
            self.close()
        connection = _connection(self.url, self.name, self.timeout_seconds)
        try:
            connection.connect()
        except (RedisError, OSError) as exc:
            raise RedisUnavailable(f"cannot reach Redis at {self.shown_url}: {exc}") from exc
        self._connection, self._pid = connection, os.getpid()
        return connection

    @staticmethod
    def _hung_up(connection: AbstractConnection) -> bool:
        """True if an idle connection has something to read: that can only be its end."""
        sock = connection._sock
        if sock is None:
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))

    def _refusal(self, exc: ResponseError) -> ForqError:
        text = str(exc)
        if isinstance(exc, NoScriptError):
            return _ScriptMissing(text)
        if isinstance(exc, OutOfMemoryError) or "OOM" in text[:80]:
            return BackPressure(f"Redis at {self.shown_url} is out of memory: {text}")
        if isinstance(exc, ReadOnlyError) or text.startswith(_NOT_NOW):
            self.close()
            return RedisUnavailable(f"Redis at {self.shown_url} cannot serve now: {text}")
        return ForqError(f"Redis at {self.shown_url} refused the call: {text}")


class _ScriptMissing(ForqError):
    """The server does not know the script: it was not run."""


def _connection(url: str, name: str, timeout_seconds: float) -> AbstractConnection:
    options = dict(parse_url(url))
    made_for = options.pop("connection_class", Connection)
    options |= {
        "socket_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
        "client_name": name,
        "protocol": 2,
    }
    if made_for is not UnixDomainSocketConnection:
        options |= {"socket_connect_timeout": CONNECT_TIMEOUT_SECONDS, "socket_keepalive": True}
    assert issubclass(made_for, Connection | SSLConnection | UnixDomainSocketConnection)
    return cast(AbstractConnection, made_for(**options))
