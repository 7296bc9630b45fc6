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

    def run(self, script: Script, base: str, *args: Any) -> list[Any]:
        """Runs a script of the queue with this base."""
        try:
            return cast(list[Any], self.call("FCALL", script.name, 1, base, *args))
        except _ScriptMissing:
            return cast(list[Any], self.call(*self._load(script), 1, base, *args))

    def run_each(self, script: Script, bases: list[str]) -> list[Any]:
        """Runs a script that only reads for each of these queues, in one round trip."""
        try:
            return self.pipeline([("FCALL", script.name, 1, base) for base in bases])
        except _ScriptMissing:
            how = self._load(script)
            return self.pipeline([(*how, 1, base) for base in bases])

    def _load(self, script: Script) -> tuple[str, str]:
        """Gives the server a script; how it is to be called then."""
        try:
            self.call("FUNCTION", "LOAD", script.library)
        except _ScriptKnown:
            pass
        except BackPressure:
            # A server that is out of memory takes no new function, but runs a script that may go beyond that.
            return "EVAL", script.source
        return "FCALL", script.name

    def call_together(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Sends several commands at once, the later ones whatever becomes of the others; their answers, or refusals."""
        connection = self._ready()
        try:
            connection.send_many(list(commands))
            answers = [connection.receive() for _ in commands]
        except (OSError, hiredis.HiredisError) as exc:
            self.close()
            raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {_text(exc)}") from exc
        except BaseException:
            self.close()
            raise
        self._used_at = time.monotonic()
        return [self._refusal(str(a)) if isinstance(a, hiredis.ReplyError) else a for a in answers]

    def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Sends several read commands at once; answers in order."""
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
        for answer in answers:
            if isinstance(answer, hiredis.ReplyError):
                raise self._refusal(str(answer))
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
        if text.startswith("ERR Function not found"):
            return _ScriptMissing(f"Redis at {self.shown_url} has forgotten a function: {text}")
        if text.startswith("ERR Library") and text.endswith("already exists"):
            return _ScriptKnown(text)
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
    return "timed out" if isinstance(exc, BlockingIOError) else str(exc) or type(exc).__name__


class _ScriptMissing(RedisUnavailable):
    """The server does not know the script: it was not run."""


class _ScriptKnown(ForqError):
    """The server has had the script before, or somebody else was faster."""
