"""Calls to Redis on one connection, with forq's errors; and the check that a server can be used.

1. Every call is sent once. A lost reply raises OutcomeUnknown and the caller decides: a retry here could repeat an
   enqueue or a BLMOVE.
2. A call that was certainly not carried out raises RedisUnavailable.
3. Connects on demand. A forked process never uses its parent's connection.
4. In a cluster, sends each call to the right node (topology.py). With sentinels, connects to the master.
"""

import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forq.broker.scripts import Script
from forq.broker.topology import Cluster, Moved
from forq.errors import BackPressure, ForqError, IncompatibleServer, OutcomeUnknown, RedisUnavailable
from forq.redis_url import CLUSTER, SENTINEL, Address, read_address, shown_url

if TYPE_CHECKING:
    from forq.broker.connection import Connection

CONNECT_TIMEOUT_SECONDS = 5.0
CALL_TIMEOUT_SECONDS = 10.0
# Limit for reads of job data: the server does nothing else during a call.
READ_BYTES = 4 << 20
# Connections idle longer than this are checked before reuse: the server may have closed them.
IDLE_CHECK_SECONDS = 0.5
# How long calls use EVAL after a server refused the library, before it is loaded again.
EVAL_SECONDS = 1.0
# Oldest versions with functions (FUNCTION LOAD) and script flags.
OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (7, 2)

# Error codes of calls that were not carried out and may succeed later.
_TEMPORARY_ERRORS = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "READONLY", "UNBLOCKED")
_SLOT_MIGRATION_ERRORS = ("ASK ", "TRYAGAIN ")


class Sent:
    """A call that was sent. Its reply may still be in the connection of `link`."""

    __slots__ = ("answer", "link")

    def __init__(self, link: "Link") -> None:
        self.link = link
        # The reply; an Exception for an error reply, or if the connection broke.
        self.answer: Any = None


class Link:
    """A connection to Redis. `at` routes a call without a key: any key of the queue that it concerns."""

    # None: Connection, which is imported when it is needed.
    connection_kind: "type[Connection] | None" = None

    def __init__(
        self,
        url: str,
        *,
        name: str = "forq",
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
    ) -> None:
        self.url = url
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.connect_timeout_seconds = connect_timeout_seconds
        self._address = read_address(url)
        self._cluster: Cluster | None = None
        if self._address.kind == CLUSTER:
            self._cluster = Cluster(self._address, name, self._to_node, self.connection_kind)
        self._connection: Connection | None = None
        self._pid = 0
        self._used_at = 0.0
        # Oldest first.
        self._unanswered: list[Sent] = []
        self._library_reloads = 0
        # A server that refused the library gets EVAL until this time (monotonic).
        self._eval_until = 0.0
        # The current connection's id; None until fetch_client_id.
        self.client_id: int | None = None

    def call(self, *args: Any, at: str | None = None) -> Any:
        """Sends one command and returns its reply."""
        return self._call(args) if self._cluster is None else self._cluster.call(args, at)

    def _call(self, command: tuple[Any, ...]) -> Any:
        connection = self._ready_connection()
        try:
            connection.send(command)
            answer = connection.receive()
        except OSError as exc:
            self.close()
            raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {_reason_of(exc)}") from None
        except BaseException:
            # Interrupted between request and reply: the next call would read this reply.
            self.close()
            raise
        self._used_at = time.monotonic()
        if isinstance(answer, Exception):
            raise self._refusal(str(answer))
        return answer

    def run(self, script: Script, base: str, *args: Any) -> list[Any]:
        """Runs a script for the queue with this base."""
        if self._cluster is not None:
            return self._cluster.route(base, lambda link: link.run(script, base, *args))
        try:
            answer: list[Any] = self._call(self._command(script, base, *args))
        except _LibraryMissing:
            self._load(script)
            answer = self._call(self._command(script, base, *args))
        return answer

    def send(self, script: Script, base: str, *args: Any) -> Sent:
        """Starts to run a script; `finish` returns its reply. Calls run in the order in which they are sent.

        Every other call on this link reads the replies that are missing first. So the caller may run any code before
        `finish`, also code that uses this link. Before the next `send`, it asks `is_under_way`.
        """
        if self._cluster is not None:
            return self._cluster.route(base, lambda link: link.send(script, base, *args))
        connection = self._ready_connection(ahead=True)
        sent = Sent(self)
        try:
            self._unanswered.append(sent)
            connection.send(self._command(script, base, *args))
        except OSError as exc:
            self._break(exc)
        except BaseException:
            self.close()
            raise
        else:
            self._used_at = time.monotonic()
        return sent

    def is_under_way(self, sent: Sent) -> bool:
        """Whether another call may be sent before the reply to this one is read.

        Not if it is known that the connection broke, nor after a pause: the server may have closed it.
        """
        return sent.answer is None and sent.link._may_send_ahead()

    def finish(self, sent: Sent) -> list[Any]:
        """The reply to a call of `send`. An error of NOT_CARRIED_OUT: `run` may repeat the call."""
        if self._cluster is not None:
            return self._cluster.finish(sent)
        if sent.answer is None:
            self._read_unanswered(sent)
        if isinstance(sent.answer, OutcomeUnknown):
            raise sent.answer
        if isinstance(sent.answer, Exception):
            # Some refusals close the connection.
            self._read_unanswered()
            raise self._refusal(str(sent.answer))
        answer: list[Any] = sent.answer
        return answer

    def _read_unanswered(self, last: Sent | None = None) -> None:
        """Reads the missing replies, up to that to `last`. After a failure the connection is closed."""
        while self._unanswered and (last is None or last.answer is None):
            connection = self._connection
            if connection is None or self._pid != os.getpid():
                self._break(ConnectionError("the reply belongs to the process that was forked"))
                return
            try:
                # This is no use of the connection: the reply may have come long ago, before the server closed it.
                answer = connection.receive()
                self._unanswered.pop(0).answer = answer
            except OSError as exc:
                self._break(exc)
                return
            except BaseException:
                self.close()
                raise

    def _break(self, exc: OSError) -> None:
        """Closes the connection: the outcome of all unanswered calls is unknown."""
        self.close(f"connection to Redis at {self.shown_url} broke: {_reason_of(exc)}")

    def run_each(self, script: Script, bases: list[str]) -> list[Any]:
        """Runs a read-only script for each of these queues, in one round trip per server."""
        if self._cluster is not None:
            return self._cluster.run_each(script, bases)
        try:
            return self.pipeline([self._command(script, base) for base in bases])
        except _LibraryMissing:
            self._load(script)
            return self.pipeline([self._command(script, base) for base in bases])

    def load_library(self, script: Script) -> None:
        """Loads the library into every server, for clients whose ACL allows FCALL but not FUNCTION LOAD."""
        for master in self.masters():
            with suppress(_LibraryKnown, CallNotAllowed):
                master.call("FUNCTION", "LOAD", script.library)

    def library_reloads(self) -> int:
        """Grows each time a server has lost the library, by a flush or a restart without its data."""
        return self._library_reloads if self._cluster is None else self._cluster.library_reloads()

    def _load(self, script: Script) -> None:
        """Loads the library. If the server refuses (out of memory, no functions, ACL), calls use EVAL for a while."""
        try:
            self.call("FUNCTION", "LOAD", script.library)
        except _LibraryKnown:
            pass
        except (BackPressure, CallNotAllowed):
            self._eval_until = time.monotonic() + EVAL_SECONDS
            return
        self._library_reloads += 1

    def _command(self, script: Script, *call: Any) -> tuple[Any, ...]:
        if time.monotonic() < self._eval_until:
            return ("EVAL", script.source, 1, *call, script.verb)
        return ("FCALL", script.name, 1, *call)

    def call_batch(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Sends several commands about one queue at once; returns replies, or an error for each refused command."""
        if self._cluster is not None:
            return self._cluster.call_batch(commands)
        return self.read_answers(self._exchange(commands, OutcomeUnknown))

    def read_answers(self, answers: Sequence[Any]) -> list[Any]:
        """The replies, with forq's errors. When all are there, since some errors close the connection."""
        return [self._refusal(str(a)) if isinstance(a, Exception) else a for a in answers]

    def replies(self, *commands: tuple[Any, ...]) -> Generator[Any, None, None]:
        """Sends several commands about one queue at once; yields each reply as soon as it arrives. Not in a cluster.

        Errors are as the server sent them (read_answers). Closing it before the last reply closes the connection.
        """
        connection = self._ready_connection()
        try:
            connection.send_many(commands)
            for _ in commands:
                answer = connection.receive()
                self._used_at = time.monotonic()
                yield answer
        except OSError as exc:
            self.close()
            raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {_reason_of(exc)}") from None
        except BaseException:
            self.close()
            raise

    @property
    def is_cluster(self) -> bool:
        return self._cluster is not None

    def run_batch(self, script: Script, calls: list[tuple[Any, ...]]) -> list[list[Any] | ForqError]:
        """Runs a script for several queues of one server at once: (base, args …) per call.

        Returns an error in place of each refused call. OutcomeUnknown if the connection breaks: any of the calls may
        have been carried out.
        """
        if self._cluster is not None:
            answers = self._cluster.route(calls[0][0], lambda link: link.run_batch(script, calls))
        else:
            answers = self.call_batch(*(self._command(script, *call) for call in calls))
        return [
            self._run_again(script, call) if isinstance(answer, _LibraryMissing | Moved) else answer
            for call, answer in zip(calls, answers, strict=True)
        ]

    def run_atomic(self, script: Script, calls: list[tuple[Any, ...]]) -> list[list[Any]]:
        """Runs a script for a queue and for its fail queue in one transaction: (base, args …) per call."""
        if self._cluster is not None:
            return self._cluster.route(calls[0][0], lambda link: link.run_atomic(script, calls))
        try:
            try:
                return self._transact(script, calls)
            except _LibraryMissing:
                self._load(script)
                return self._transact(script, calls)
        except BackPressure:
            # While out of memory, Redis accepts no commands in MULTI, not even scripts that may exceed the limit. Run
            # them one by one: deleting a queue to free memory and starting a supervisor must stay possible.
            return [self.run(script, *call) for call in calls]

    def _transact(self, script: Script, calls: list[tuple[Any, ...]]) -> list[list[Any]]:
        commands = [("MULTI",), *(self._command(script, *call) for call in calls), ("EXEC",)]
        *queued, answers = self._exchange(commands, OutcomeUnknown)
        # The error of a refused command is the reason why the transaction failed.
        for answer in (*queued, *([answers] if isinstance(answers, Exception) else answers)):
            if isinstance(answer, Exception):
                raise self._refusal(str(answer))
        return list(answers)

    def _run_again(self, script: Script, call: tuple[Any, ...]) -> list[Any] | ForqError:
        """Only for a call that was certainly not carried out."""
        try:
            return self.run(script, *call)
        except RedisUnavailable:
            raise
        except ForqError as exc:
            return exc

    def hash_values(self, key: str, fields: Sequence[Any]) -> Iterator[bytes | None]:
        """The values of these fields, in order. No call reads more than READ_BYTES, unless one value is longer."""
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
        """Sends several repeatable commands at once; returns their replies in order.

        `at`: all commands are about this queue and go to one node.
        """
        if self._cluster is not None:
            return self._cluster.pipeline(commands, at)
        answers = self._exchange(commands, RedisUnavailable)
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._refusal(str(answer))
        return answers

    def _exchange(self, commands: Sequence[tuple[Any, ...]], error_type: type[RedisUnavailable]) -> list[Any]:
        connection = self._ready_connection()
        try:
            connection.send_many(commands)
            answers = [connection.receive() for _ in commands]
        except OSError as exc:
            self.close()
            raise error_type(f"connection to Redis at {self.shown_url} broke: {_reason_of(exc)}") from None
        except BaseException:
            self.close()
            raise
        self._used_at = time.monotonic()
        return answers

    def count_replicas(self, base: str, mark: str, timeout_ms: int) -> int:
        """The number of replicas that have everything written by the last call, which was about this queue.

        `mark`: a key that is written and expires. WAIT only covers writes of its own connection, and the last call may
        have written nothing because the jobs were stored before. OutcomeUnknown if the number is not known.
        """
        if self._cluster is not None:
            return self._cluster.link_to(base).count_replicas(base, mark, timeout_ms)
        # Never reconnect here: the new connection could reach a server that does not have the write.
        connection = self._connection
        if connection is None:
            raise OutcomeUnknown("the connection to the master ended")
        try:
            connection.send_many([("SET", mark, "", "PX", 1), ("WAIT", 1, timeout_ms)])
            marked, acknowledged = connection.receive(), connection.receive()
        except BaseException as exc:
            self.close()
            if isinstance(exc, OSError):
                raise OutcomeUnknown(f"connection to Redis at {self.shown_url} broke: {_reason_of(exc)}") from None
            raise
        for answer in (marked, acknowledged):
            if isinstance(answer, Exception):
                raise OutcomeUnknown(f"Redis at {self.shown_url} refused WAIT: {answer}")
        return int(acknowledged)

    def fetch_client_id(self, *, at: str) -> None:
        """Sets `client_id`, once per connection."""
        if self._cluster is not None:
            node = self._cluster.link_to(at)
            node.fetch_client_id(at=at)
            self.client_id = node.client_id
            return
        self._ready_connection()
        if self.client_id is None:
            self.client_id = int(self.call("CLIENT", "ID"))

    def masters(self) -> list["Link"]:
        """Links to all masters of a cluster; else this link."""
        return [self] if self._cluster is None else self._cluster.masters()

    def server_of(self, key: str) -> str:
        """The URL of the server that serves this key."""
        return self.url if self._cluster is None else self._cluster.link_to(key).url

    def close(self, reason: str = "the connection was closed before the reply") -> None:
        if self._cluster is not None:
            self._cluster.close()
        unanswered, self._unanswered = self._unanswered, []
        for sent in unanswered:
            sent.answer = OutcomeUnknown(reason)
        connection, self._connection = self._connection, None
        self.client_id = None
        if connection is not None and self._pid == os.getpid():
            connection.close()

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return shown_url(self.url)

    def _ready_connection(self, *, ahead: bool = False) -> "Connection":
        """`ahead`: replies to earlier calls may still be missing."""
        if self._unanswered and not (ahead and self._may_send_ahead()):
            self._read_unanswered()
        connection = self._connection
        if connection is not None and self._pid == os.getpid():
            if self._unanswered:
                return connection
            if time.monotonic() - self._used_at < IDLE_CHECK_SECONDS or not connection.is_closed():
                return connection
            self.close()
        try:
            connection = connect(
                self._address, self.name, self.timeout_seconds, self.connect_timeout_seconds, self.connection_kind
            )
        except OSError as exc:
            reason = _reason_of(exc).removesuffix(".") + self._advice()
            raise RedisUnavailable(f"cannot reach Redis at {self.shown_url}: {reason}") from None
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _may_send_ahead(self) -> bool:
        return self._pid == os.getpid() and time.monotonic() - self._used_at < IDLE_CHECK_SECONDS

    def _advice(self) -> str:
        """What to do if it is the embedded server of a supervisor that does not run."""
        path = self.url.removeprefix("unix://")
        if os.environ.get("FORQ_REDIS") or not path.endswith("/redis.sock") or os.path.lexists(path):
            return ""
        return "; is a supervisor (forq run) running with this state directory? If not: start it, or set FORQ_STATE_DIR"

    def _to_node(self, url: str) -> "Link":
        return type(self)(
            url,
            name=self.name,
            timeout_seconds=self.timeout_seconds,
            connect_timeout_seconds=self.connect_timeout_seconds,
        )

    def _refusal(self, text: str) -> ForqError:
        if text.startswith("ERR Function not found") or _names_command(text, "FCALL"):
            return _LibraryMissing(f"Redis at {self.shown_url} lacks a function: {text}")
        if text.startswith("ERR Library") and text.endswith("already exists"):
            return _LibraryKnown(text)
        if _names_command(text, "EVAL"):
            self._eval_until = 0.0
            return RedisUnavailable(
                f"Redis at {self.shown_url} does not have the functions of this release, and this user may neither "
                "load them nor use EVAL; a supervisor of this release loads them, and so does `forq app MODULE:APP "
                f"--create` with a user that may: {text}"
            )
        if text.startswith("NOPERM") or _names_command(text, "FUNCTION"):
            return CallNotAllowed(f"Redis at {self.shown_url} refused the call: {text}")
        if "OOM" in text[:80]:
            return BackPressure(f"Redis at {self.shown_url} is out of memory: {text}")
        if text.startswith(_TEMPORARY_ERRORS):
            self.close()
            return RedisUnavailable(f"Redis at {self.shown_url} cannot serve requests now: {text}")
        if text.startswith("MOVED "):
            _, slot, place = text.split(" ")
            host, _, port = place.rpartition(":")
            cluster = f"Redis at {self.shown_url} is one node of a cluster: give its URL as redis+cluster://"
            return Moved(cluster, int(slot), host.strip("[]"), int(port))
        if text.startswith(_SLOT_MIGRATION_ERRORS):
            return RedisUnavailable(f"the keys of a queue are being moved away from Redis at {self.shown_url}: {text}")
        return ForqError(f"Redis at {self.shown_url} refused the call: {text}")


def connect(
    address: Address,
    name: str,
    timeout_seconds: float,
    connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
    kind: "type[Connection] | None" = None,
) -> "Connection":
    """Connects to the server of this address, or to the current master that the sentinels name."""
    # Imported late: redis-py takes 0.15 s, which a Client that never connects does not need.
    from forq.broker.connection import Connection, open_master

    kind = kind or Connection
    if address.kind == SENTINEL:
        return open_master(kind, address, name, connect_timeout_seconds, timeout_seconds)
    limits = {"connect_timeout_seconds": connect_timeout_seconds, "timeout_seconds": timeout_seconds}
    return kind(address.url, name=name, **limits)


def _names_command(text: str, command: str) -> bool:
    """Whether an error says that this command does not exist or is not allowed for this user."""
    return text.startswith(("NOPERM", "ERR unknown command")) and bool(re.search(rf"'{command}\b", text, re.IGNORECASE))


def _reason_of(exc: Exception) -> str:
    return "timed out" if isinstance(exc, BlockingIOError | TimeoutError) else str(exc) or type(exc).__name__


class _LibraryMissing(RedisUnavailable):
    """The server lacks the library; the call was not carried out."""


# Errors of calls that were certainly not carried out, and that `Link.run` would repeat.
NOT_CARRIED_OUT = (_LibraryMissing, Moved)


class CallNotAllowed(ForqError):
    """The ACL does not allow the call, or the server has no functions."""


class _LibraryKnown(ForqError):
    """The server already has the library."""


def check_server(link: Link) -> str:
    """The server's name and version, in a cluster those of all masters.

    Raises IncompatibleServer if a server is too old or may evict keys.
    """
    found = [_check_one(master) for master in link.masters()]
    return ", ".join(sorted(set(found))) + (f", a cluster of {len(found)} masters" if len(found) > 1 else "")


def _check_one(link: Link) -> str:
    info = _info(link, "server")
    valkey = info.get("valkey_version")
    name, version = ("Valkey", valkey) if valkey else ("Redis", info.get("redis_version", "0"))
    oldest = OLDEST_VALKEY if valkey else OLDEST_REDIS
    if _version_numbers(version) < oldest:
        wanted = ".".join(map(str, oldest))
        raise IncompatibleServer(
            f"{name} {version} at {link.shown_url} is too old: forq needs {name} {wanted} or newer"
        )
    policy = _info(link, "memory").get("maxmemory_policy", "noeviction")
    limit = _info(link, "memory").get("maxmemory", "0")
    if policy != "noeviction" and limit != "0":
        raise IncompatibleServer(
            f"the server at {link.shown_url} may evict jobs: maxmemory-policy is {policy}, but forq needs noeviction"
        )
    return f"{name} {version}"


def _info(link: Link, section: str) -> dict[str, str]:
    text = link.call("INFO", section)
    if isinstance(text, dict):
        return {str(key): str(value) for key, value in text.items()}
    lines = text.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _version_numbers(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError as exc:
        raise ForqError(f"cannot parse the version of the server: {version!r}") from exc
