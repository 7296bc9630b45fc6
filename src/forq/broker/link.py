"""A connection to Redis, with the errors of forq.

1. A call is sent once. Nothing is repeated behind the caller's back: a lost reply is OutcomeUnknown, and the caller
   knows what to do about it (redis-py's own retries would repeat a BLMOVE or an enqueue).
2. A call that was certainly not carried out is RedisUnavailable.
3. The connection is made on demand and never shared with a forked process.
4. Of a cluster there is one per node that is needed (cluster.py); with sentinels it is to the master (connection.py).
"""

import os
import re
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forq.broker.scripts import Script
from forq.broker.topology import Cluster, Moved
from forq.errors import BackPressure, ForqError, OutcomeUnknown, RedisUnavailable
from forq.redis_url import CLUSTER, SENTINEL, Address, read_address, shown_url

if TYPE_CHECKING:
    from forq.broker.connection import Connection

CONNECT_TIMEOUT_SECONDS = 5.0
CALL_TIMEOUT_SECONDS = 10.0
# What one call should read at most of data that jobs bring along.
READ_BYTES = 4 << 20
# A connection that was idle for so long is looked at before it is used: the server may have closed it.
IDLE_CHECK_SECONDS = 0.5
# How long calls go through EVAL after a server refused the library, before it is offered again.
EVALUATES_SECONDS = 1.0

# Answers to calls that were not carried out, and may be if they are made again.
_NOT_NOW = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "READONLY", "UNBLOCKED")
_ON_THE_MOVE = ("ASK ", "TRYAGAIN ")


class Link:
    """A connection to Redis. `at`, of a call without a key: a key of the queue it is about, which says where to go."""

    def __init__(self, url: str, *, name: str = "forq", timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        self.url = url
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._address = read_address(url)
        self._cluster = Cluster(self._address, name, self._to_node) if self._address.kind == CLUSTER else None
        self._connection: Connection | None = None
        self._pid = 0
        self._used_at = 0.0
        # How often the server lacked the library and got it.
        self._missed = 0
        # A server that takes no library runs it through EVAL until then (monotonic).
        self._evaluates_until = 0.0
        # Of the present connection; None until fetch_client_id has asked.
        self.client_id: int | None = None

    def call(self, *args: Any, at: str | None = None) -> Any:
        """Sends one command and returns its answer."""
        if self._cluster is not None:
            return self._cluster.call(args, at)
        connection = self._ready()
        try:
            connection.send(args)
            answer = connection.receive()
        except OSError as exc:
            self.close()
            raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {_text(exc)}") from exc
        except BaseException:
            # A signal or a cancelled task between request and answer: the next answer would be the wrong one.
            self.close()
            raise
        self._used_at = time.monotonic()
        if isinstance(answer, Exception):
            raise self._refusal(str(answer))
        return answer

    def run(self, script: Script, base: str, *args: Any) -> list[Any]:
        """Runs a script of the queue with this base."""
        if self._cluster is not None:
            return self._cluster.follow(base, lambda link: link.run(script, base, *args))
        try:
            answer: list[Any] = self.call(*self._command(script, base, *args))
        except _ScriptMissing:
            self._load(script)
            answer = self.call(*self._command(script, base, *args))
        return answer

    def run_each(self, script: Script, bases: list[str]) -> list[Any]:
        """Runs a script that only reads for each of these queues, in one round trip (to each node of a cluster)."""
        if self._cluster is not None:
            return self._cluster.run_each(script, bases)
        try:
            return self.pipeline([self._command(script, base) for base in bases])
        except _ScriptMissing:
            self._load(script)
            return self.pipeline([self._command(script, base) for base in bases])

    def offer(self, script: Script) -> None:
        """Gives every server the library, for those who may call it and may not do that themselves."""
        for master in self.masters():
            with suppress(_ScriptKnown, _NotAllowed):
                master.call("FUNCTION", "LOAD", script.library)

    def missed(self) -> int:
        """Grows when a server turns out to have lost its functions: by a restart without its data, or a flush."""
        return self._missed if self._cluster is None else self._cluster.missed()

    def _load(self, script: Script) -> None:
        """Gives the server the library. If it takes none (it is out of memory, has no functions, or does not let this
        user), calls go through EVAL for a while."""
        try:
            self.call("FUNCTION", "LOAD", script.library)
        except _ScriptKnown:
            pass
        except (BackPressure, _NotAllowed):
            self._evaluates_until = time.monotonic() + EVALUATES_SECONDS
            return
        self._missed += 1

    def _command(self, script: Script, *call: Any) -> tuple[Any, ...]:
        if time.monotonic() < self._evaluates_until:
            return ("EVAL", script.source, 1, *call, script.verb)
        return ("FCALL", script.name, 1, *call)

    def call_batch(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Sends several commands about one queue at once, the later ones whatever becomes of the others; their
        answers, or refusals."""
        if self._cluster is not None:
            return self._cluster.call_batch(commands)
        answers = self._exchange(commands, OutcomeUnknown)
        return [self._refusal(str(a)) if isinstance(a, Exception) else a for a in answers]

    def run_batch(self, script: Script, calls: list[tuple[Any, ...]]) -> list[list[Any] | ForqError]:
        """Runs a script for several queues of one server, sent at once: (base, args …) per call. What the server
        refuses is returned; if the connection breaks, nobody knows which of them were carried out."""
        if self._cluster is not None:
            answers = self._cluster.follow(calls[0][0], lambda link: link.run_batch(script, calls))
        else:
            answers = self.call_batch(*(self._command(script, *call) for call in calls))
        return [
            self._run_late(script, call) if isinstance(answer, _ScriptMissing | Moved) else answer
            for call, answer in zip(calls, answers, strict=True)
        ]

    def run_atomic(self, script: Script, calls: list[tuple[Any, ...]]) -> list[list[Any]]:
        """Runs a script for a queue and for its fail queue, (base, args …) per call: nobody sees what is in between."""
        if self._cluster is not None:
            return self._cluster.follow(calls[0][0], lambda link: link.run_atomic(script, calls))
        try:
            try:
                return self._transact(script, calls)
            except _ScriptMissing:
                self._load(script)
                return self._transact(script, calls)
        except BackPressure:
            # Redis queues no command while it is out of memory, not even one that may go beyond that: then one by one.
            # Without this nobody could delete a queue to make room, nor a supervisor start and work off what is there.
            return [self.run(script, *call) for call in calls]

    def _transact(self, script: Script, calls: list[tuple[Any, ...]]) -> list[list[Any]]:
        commands = [("MULTI",), *(self._command(script, *call) for call in calls), ("EXEC",)]
        *queued, answers = self._exchange(commands, OutcomeUnknown)
        # What one of them was refused for is why the whole was not carried out.
        for answer in (*queued, *([answers] if isinstance(answers, Exception) else answers)):
            if isinstance(answer, Exception):
                raise self._refusal(str(answer))
        return list(answers)

    def _run_late(self, script: Script, call: tuple[Any, ...]) -> list[Any] | ForqError:
        """What was certainly not carried out."""
        try:
            return self.run(script, *call)
        except RedisUnavailable:
            raise
        except ForqError as exc:
            return exc

    def hash_values(self, key: str, fields: Sequence[Any]) -> Iterator[bytes | None]:
        """The values of these fields, in order. No call reads more than READ_BYTES of them, unless one alone is longer:
        the server does nothing else meanwhile."""
        lengths = self.pipeline([("HSTRLEN", key, field) for field in fields]) if fields else []
        piece: list[Any] = []
        size = 0
        for field, length in zip(fields, lengths, strict=True):
            if piece and size + length > READ_BYTES:
                yield from self.call("HMGET", key, *piece)
                piece, size = [], 0
            piece.append(field)
            size += length
        if piece:
            yield from self.call("HMGET", key, *piece)

    def pipeline(self, commands: list[tuple[Any, ...]], *, at: str | None = None) -> list[Any]:
        """Sends several commands at once that may be repeated (most read); answers in order.

        `at`: they are about one queue, and are to be sent together even if it is one of a cluster (a transaction).
        """
        if self._cluster is not None:
            return self._cluster.pipeline(commands, at)
        answers = self._exchange(commands, RedisUnavailable)
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._refusal(str(answer))
        return answers

    def _exchange(self, commands: Sequence[tuple[Any, ...]], if_it_breaks: type[RedisUnavailable]) -> list[Any]:
        connection = self._ready()
        try:
            connection.send_many(commands)
            answers = [connection.receive() for _ in commands]
        except OSError as exc:
            self.close()
            raise if_it_breaks(f"connection to Redis at {self.shown_url} broke: {_text(exc)}") from exc
        except BaseException:
            self.close()
            raise
        self._used_at = time.monotonic()
        return answers

    def acknowledged(self, base: str, mark: str, timeout_ms: int) -> int:
        """How many replicas have, in time, all that was written by the last call, which was about this queue.

        `mark`: a key of the queue's that is written for this, and expires. WAIT only speaks of what its own connection
        has written, and the last call may have found everything stored. OutcomeUnknown if it cannot be told.
        """
        if self._cluster is not None:
            return self._cluster.link_to(base).acknowledged(base, mark, timeout_ms)
        # Not another one: it might be to another server, which never had what was written.
        connection = self._connection
        if connection is None:
            raise OutcomeUnknown("the connection to the master ended")
        try:
            connection.send_many([("SET", mark, "", "PX", 1), ("WAIT", 1, timeout_ms)])
            marked, acknowledged = connection.receive(), connection.receive()
        except BaseException as exc:
            self.close()
            if isinstance(exc, OSError):
                raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {_text(exc)}") from exc
            raise
        for answer in (marked, acknowledged):
            if isinstance(answer, Exception):
                raise OutcomeUnknown(f"Redis at {self.shown_url} refused to tell: {answer}")
        return int(acknowledged)

    def fetch_client_id(self, *, at: str) -> None:
        """Asks once per connection which number the server knows it by."""
        if self._cluster is not None:
            node = self._cluster.link_to(at)
            node.fetch_client_id(at=at)
            self.client_id = node.client_id
            return
        self._ready()
        if self.client_id is None:
            self.client_id = int(self.call("CLIENT", "ID"))

    def masters(self) -> list["Link"]:
        """A link to each server that holds queues: of a cluster all its masters, else this one."""
        return [self] if self._cluster is None else self._cluster.masters()

    def server_of(self, key: str) -> str:
        """Which server serves this key, as far as is known."""
        return self.url if self._cluster is None else self._cluster.link_to(key).url

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        connection, self._connection = self._connection, None
        self.client_id = None
        if connection is not None and self._pid == os.getpid():
            connection.close()

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return shown_url(self.url)

    def _ready(self) -> "Connection":
        connection = self._connection
        if connection is not None and self._pid == os.getpid():
            if time.monotonic() - self._used_at < IDLE_CHECK_SECONDS or not _hung_up(connection):
                return connection
            self.close()
        try:
            connection = connect(self._address, self.name, self.timeout_seconds)
        except OSError as exc:
            raise RedisUnavailable(f"cannot reach Redis at {self.shown_url}: {_text(exc)}") from exc
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _to_node(self, url: str) -> "Link":
        return Link(url, name=self.name, timeout_seconds=self.timeout_seconds)

    def _refusal(self, text: str) -> ForqError:
        if text.startswith("ERR Function not found") or _names_command(text, "FCALL"):
            return _ScriptMissing(f"Redis at {self.shown_url} has forgotten a function: {text}")
        if text.startswith("ERR Library") and text.endswith("already exists"):
            return _ScriptKnown(text)
        if _names_command(text, "EVAL"):
            self._evaluates_until = 0.0
            return RedisUnavailable(
                f"Redis at {self.shown_url} does not have the functions that a supervisor of this release loads "
                f"when it reaches Redis; this user may neither load them nor use EVAL: {text}"
            )
        if text.startswith("NOPERM") or _names_command(text, "FUNCTION"):
            return _NotAllowed(f"Redis at {self.shown_url} refused the call: {text}")
        if "OOM" in text[:80]:
            return BackPressure(f"Redis at {self.shown_url} is out of memory: {text}")
        if text.startswith(_NOT_NOW):
            self.close()
            return RedisUnavailable(f"Redis at {self.shown_url} cannot serve now: {text}")
        if text.startswith("MOVED "):
            _, slot, place = text.split(" ")
            host, _, port = place.rpartition(":")
            cluster = f"Redis at {self.shown_url} is one node of a cluster: give its URL as redis+cluster://"
            return Moved(cluster, int(slot), host.strip("[]"), int(port))
        if text.startswith(_ON_THE_MOVE):
            return RedisUnavailable(f"the keys of a queue are being moved away from Redis at {self.shown_url}: {text}")
        return ForqError(f"Redis at {self.shown_url} refused the call: {text}")


def connect(address: Address, name: str, timeout_seconds: float) -> "Connection":
    """To the server of this address, or to the present master if sentinels know it."""
    # This imports redis-py, which takes 0.15 s: a Client that was only made need not.
    from forq.broker.connection import Connection, open_master

    if address.kind == SENTINEL:
        return open_master(address, name, CONNECT_TIMEOUT_SECONDS, timeout_seconds)
    limits = {"connect_timeout_seconds": CONNECT_TIMEOUT_SECONDS, "timeout_seconds": timeout_seconds}
    return Connection(address.url, name=name, **limits)


def _names_command(text: str, command: str) -> bool:
    """Whether a refusal says that this command does not exist, or is not for this user."""
    return text.startswith(("NOPERM", "ERR unknown command")) and bool(re.search(rf"'{command}\b", text, re.IGNORECASE))


def _hung_up(connection: "Connection") -> bool:
    """True if an idle connection has something to read: that can only be its end."""
    poll = select.poll()
    poll.register(connection.socket, select.POLLIN)
    return bool(poll.poll(0))


def _text(exc: Exception) -> str:
    return "timed out" if isinstance(exc, BlockingIOError | TimeoutError) else str(exc) or type(exc).__name__


class _ScriptMissing(RedisUnavailable):
    """The server does not know the script: it was not run."""


class _NotAllowed(ForqError):
    """The server's rules (ACL) do not allow this user to make the call, or it has no functions."""


class _ScriptKnown(ForqError):
    """The server has had the script before, or somebody else was faster."""
