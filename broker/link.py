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

import hiredis

from forq.broker.connection import Connection
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
        self._connection: Connection | None = None
        self._pid = 0
        self._used_at = 0.0
        # Of the present connection; None until learn_client_id has asked.
        self.known_client_id: int | None = None

    def call(self, *args: Any) -> Any:
        """Sends one command and returns its answer."""
        connection = self._ready()
        try:
            connection.send(args)
            answer = connection.receive()
        except (OSError, hiredis.HiredisError) as exc:
            self.close()
            raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {_text(exc)}") from exc
        except BaseException:
            # A signal or a cancelled task between request and answer: the next answer would be the wrong one.
            self.close()
            raise
        self._used_at = time.monotonic()
        if isinstance(answer, hiredis.ReplyError):
            raise self._refusal(str(answer))
        return answer

    def call_patiently(self, seconds: float, *args: Any) -> Any:
        """The same, of a command whose answer may take so long."""
        if seconds <= self.timeout_seconds:
            return self.call(*args)
        self._ready().socket.settimeout(seconds)
        try:
            return self.call(*args)
        finally:
            if self._connection is not None:
                self._connection.socket.settimeout(self.timeout_seconds)

    def run(self, script: Script, base: str, *args: Any) -> list[Any]:
        """Runs a script of the queue with this base."""
        try:
            return cast(list[Any], self.call("EVALSHA", script.sha, 1, base, *args))
        except _ScriptMissing:
            self.call("SCRIPT", "LOAD", script.source)
            return cast(list[Any], self.call("EVALSHA", script.sha, 1, base, *args))

    def run_many(self, script: Script, calls: list[tuple[Any, ...]]) -> list[list[Any] | ForqError]:
        """Runs a script for several queues, sent at once: (base, args …) per call. What the server refuses is returned;
        if the connection breaks, nobody knows which of them were carried out."""
        answers = self._exchange([("EVALSHA", script.sha, 1, *call) for call in calls])
        return [self._read(script, call, answer) for call, answer in zip(calls, answers, strict=True)]

    def _read(self, script: Script, call: tuple[Any, ...], answer: Any) -> list[Any] | ForqError:
        if not isinstance(answer, hiredis.ReplyError):
            return cast(list[Any], answer)
        refusal = self._refusal(str(answer))
        if not isinstance(refusal, _ScriptMissing):
            return refusal
        try:
            return self.run(script, *call)
        except RedisUnavailable:
            raise
        except ForqError as exc:
            return exc

    def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Sends several read commands at once; answers in order."""
        answers = self._exchange(commands)
        for answer in answers:
            if isinstance(answer, hiredis.ReplyError):
                raise self._refusal(str(answer))
        return answers

    def _exchange(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        connection = self._ready()
        try:
            connection.send_many(commands)
            answers = [connection.receive() for _ in commands]
        except (OSError, hiredis.HiredisError) as exc:
            self.close()
            raise RedisUnavailable(f"connection to Redis at {self.shown_url} broke: {_text(exc)}") from exc
        except BaseException:
            self.close()
            raise
        self._used_at = time.monotonic()
        return answers

    def learn_client_id(self) -> None:
        """Asks once per connection which number the server knows it by."""
        self._ready()
        if self.known_client_id is None:
            self.known_client_id = int(self.call("CLIENT", "ID"))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self.known_client_id = None
        if connection is not None and self._pid == os.getpid():
            connection.close()

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    def _ready(self) -> Connection:
        connection = self._connection
        if connection is not None and self._pid == os.getpid():
            if time.monotonic() - self._used_at < IDLE_CHECK_SECONDS or not _hung_up(connection):
                return connection
            self.close()
        try:
            connection = Connection(
                self.url,
                name=self.name,
                connect_timeout_seconds=CONNECT_TIMEOUT_SECONDS,
                timeout_seconds=self.timeout_seconds,
            )
        except (OSError, hiredis.HiredisError) as exc:
            raise RedisUnavailable(f"cannot reach Redis at {self.shown_url}: {_text(exc)}") from exc
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _refusal(self, text: str) -> ForqError:
        if text.startswith("NOSCRIPT"):
            return _ScriptMissing(text)
        if "OOM" in text[:80]:
            return BackPressure(f"Redis at {self.shown_url} is out of memory: {text}")
        if text.startswith(_NOT_NOW):
            self.close()
            return RedisUnavailable(f"Redis at {self.shown_url} cannot serve now: {text}")
        return ForqError(f"Redis at {self.shown_url} refused the call: {text}")


def _hung_up(connection: Connection) -> bool:
    """True if an idle connection has something to read: that can only be its end."""
    poll = select.poll()
    poll.register(connection.socket, select.POLLIN)
    return bool(poll.poll(0))


def _text(exc: Exception) -> str:
    return str(exc) or type(exc).__name__


class _ScriptMissing(ForqError):
    """The server does not know the script: it was not run."""
