"""The control socket: listening and access (ControlServer), one client (Connection), one call of a verb (Request).

Nothing here blocks. A client that is too fast, too slow or broken loses only its own connection.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import select
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from forq.errors import ForqError, InvalidData, PermissionRefused, TimedOut, UnknownVerb
from forq.logging_setup import WarningThrottle
from forq.procs import jsonrpc
from forq.procs.lines import LineBuffer, LineConnection
from forq.procs.loop import Loop, Timer
from forq.procs.unix_socket import Peer, allowed_to, listen, peer_groups, peer_of

log = logging.getLogger("forq.control")

MAX_CONNECTIONS = 256
# Descriptors kept free of clients: needed to replace a child and to kill its tree.
RESERVED_DESCRIPTORS = 24
# Leash and pidfd of two processes and of their successors while they overlap, and the output pipe.
DESCRIPTORS_PER_QUEUE = 9
LISTEN_RETRY_SECONDS = 5.0
ACCEPTS_PER_PASS = 64
# Without free descriptors accept fails at once, again and again: leave the clients in the backlog for a while.
ACCEPT_PAUSE_SECONDS = 0.5

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# Limits of one connection.
MAX_UNANSWERED = 64
MAX_OUTPUT_BYTES = 8 << 20
HALF_LINE_SECONDS = 30.0
# How long a client may take to read its last error before the connection is closed.
CLOSE_SECONDS = 5.0
# Small, so that one pass over a flood of tiny requests takes only a few milliseconds.
READ_BYTES = 16 << 10


class ControlServer:
    """Listens at `path` and serves `verbs`, a flat table from name to function.

    1. Creates the socket with mode 0600, or 0660 and the group if one of `group` and `readers` is given. A file has
       only one group: with both the mode is 0666, and other users are rejected after the connect.
    2. Creates it again if its file is removed.
    3. Accepts clients: root, the supervisor's user and `group` get `verbs`, members of `readers` get `read_verbs`.

    `listener` is a socket created by systemd, used as is; its file stays when this server ends.
    """

    def __init__(
        self,
        loop: Loop,
        path: str,
        verbs: Mapping[str, Callable[[Request], None]],
        *,
        group: int | None = None,
        readers: int | None = None,
        read_verbs: Mapping[str, Callable[[Request], None]] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.path = path if listener is None else str(listener.getsockname())
        self._loop = loop
        self._verbs = verbs
        self._group = group
        self._readers = readers
        self._read_verbs = read_verbs or {}
        self._connections: set[Connection] = set()
        self._resume_timer: Timer | None = None
        self._listener = self._listen(path) if listener is None else listener
        self._inode = os.lstat(path).st_ino if listener is None else None
        self._watch = self._watch_directory() if listener is None else None
        self._listen_timer: Timer | None = None
        self._foreign_inode: int | None = None
        # Users without access must not be able to fill the log.
        self._refused = WarningThrottle(log, loop.call_later)
        self._unreadable = WarningThrottle(log, loop.call_later)
        loop.add_reader(self._listener.fileno(), self._accept)

    def _listen(self, path: str) -> socket.socket:
        if self._group is not None and self._readers is not None:
            return listen(path, self._group, mode=0o666)
        return listen(path, self._readers if self._group is None else self._group)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_PASS):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno in _OUT_OF_RESOURCES:
                    self._pause_accepting(exc)
                    return
                # The client left before it was accepted.
                continue
            sock.setblocking(False)
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        verbs = self._verbs_for(sock, peer)
        if verbs is None:
            self._refused.warn(f"client refused uid={peer.uid} gid={peer.gid} pid={peer.pid}")
            _reject(sock, PermissionRefused(f"user {peer.uid} may not use this control socket"))
        elif len(self._connections) >= MAX_CONNECTIONS:
            _reject(sock, ForqError(f"too many connections: at most {MAX_CONNECTIONS} at a time"))
        elif sock.fileno() + RESERVED_DESCRIPTORS >= _descriptor_limit():
            # The kernel uses the lowest free number: all lower ones are in use.
            _reject(
                sock,
                ForqError(
                    f"too many connections: {len(self._connections)} are open, and the supervisor may open "
                    f"{_descriptor_limit()} files (ulimit -n, LimitNOFILE=)"
                ),
            )
        else:
            self._connections.add(Connection(self._loop, sock, peer, verbs, self._connections.discard))

    def _verbs_for(self, sock: socket.socket, peer: Peer) -> Mapping[str, Callable[[Request], None]] | None:
        """The verbs that this client may use; None if it has no access."""
        match allowed_to(
            peer.uid, lambda: {peer.gid, *self._groups_of(sock)}, group=self._group, readers=self._readers
        ):
            case "act":
                return self._verbs
            case "read":
                return self._read_verbs
            case None:
                return None

    def _groups_of(self, sock: socket.socket) -> tuple[int, ...]:
        try:
            return peer_groups(sock)
        except OSError as exc:
            self._unreadable.warn(f"cannot read groups of a client error={exc}")
            return ()

    def _pause_accepting(self, reason: OSError) -> None:
        log.warning("cannot accept clients; pausing", extra={"reason": str(reason)})
        self._loop.remove_reader(self._listener.fileno())
        self._resume_timer = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._resume_timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _watch_directory(self) -> DirectoryWatch | None:
        try:
            return DirectoryWatch(self._loop, os.path.dirname(self.path) or ".", self._listen_if_removed)
        except OSError as exc:
            log.warning(
                "cannot watch the control socket; it will not be recreated if removed path=%s error=%s", self.path, exc
            )
            return None

    def _listen_if_removed(self) -> None:
        """Creates the socket again if its file is gone. Another file in its place is left alone."""
        if self._listen_timer is not None:
            self._listen_timer.cancel()
            self._listen_timer = None
        try:
            found = os.lstat(self.path).st_ino
            if found not in (self._inode, self._foreign_inode):
                self._foreign_inode = found
                log.error("control socket was replaced by another file; to recreate the socket: rm %s", self.path)
            return
        except FileNotFoundError:
            pass
        except OSError as exc:
            log.error("cannot check the control socket path=%s error=%s", self.path, exc.strerror)
            return
        try:
            listener = self._listen(self.path)
        except ForqError as exc:
            log.error("control socket was removed and cannot be recreated; retrying in 5 s error=%s", exc)
            self._listen_timer = self._loop.call_later(LISTEN_RETRY_SECONDS, self._listen_if_removed)
            return
        log.warning("control socket was removed; recreated it path=%s", self.path)
        # Clients that connected before the file was removed.
        self._accept()
        self._close_listener()
        self._listener, self._inode = listener, os.lstat(self.path).st_ino
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Closes all connections and removes the socket, unless it was replaced or belongs to systemd."""
        if self._listener.fileno() < 0:
            return
        if self._watch is not None:
            self._watch.close()
        if self._listen_timer is not None:
            self._listen_timer.cancel()
        self._close_listener()
        for connection in list(self._connections):
            connection.close()
        if self._inode is None:
            return
        try:
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass

    def _close_listener(self) -> None:
        if self._resume_timer is None:
            self._loop.remove_reader(self._listener.fileno())
        else:
            self._resume_timer.cancel()
            self._resume_timer = None
        self._listener.close()


class Connection:
    """One client: reads its lines, calls the verbs, sends the answers, and enforces the limits above."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        peer: Peer,
        verbs: Mapping[str, Callable[[Request], None]],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.peer = peer
        self.closed = False
        self._verbs = verbs
        self._on_close = on_close
        self._loop = loop
        self._unanswered: set[Request] = set()
        self._serving = False
        self._closing = False
        self._half_line_timer: Timer | None = None
        self._io = LineConnection(
            loop, sock, self._on_input, lines=LineBuffer(), on_output=self._all_sent, read_bytes=READ_BYTES
        )

    def _on_input(self) -> None:
        if self._io.ended and (self._io.error or self._hung_up()):
            self.close()
        else:
            self._serve()

    def _serve(self) -> None:
        """Handles the received lines, up to the limit of unanswered requests."""
        if self._serving or self.closed or self._closing:
            return
        self._serving = True
        try:
            while len(self._unanswered) < MAX_UNANSWERED and not self.closed:
                line = self._io.lines.pop()
                if line is None:
                    break
                self._stop_half_line_timer()
                if line.strip():
                    self._dispatch(line)
        except InvalidData as exc:
            self._send_last_error(exc)
        finally:
            self._serving = False
        self._update_reading()

    def _dispatch(self, line: bytes) -> None:
        try:
            call = jsonrpc.read_request(line)
        except jsonrpc.Malformed as exc:
            self._send(jsonrpc.failure(exc.id, exc, exc.rpc_code))
            return
        request = Request(self, call)
        self._unanswered.add(request)
        try:
            verb = self._verbs.get(call.method)
            if verb is None:
                raise UnknownVerb(f"there is no verb {call.method[:64]!a}")
            verb(request)
        except Exception as exc:
            if request.answered or not isinstance(exc, ForqError):
                log.exception("verb failed", extra={"verb": call.method})
            if request.answered:
                return
            if isinstance(exc, ForqError):
                request.fail(exc)
            else:
                hidden = ForqError(f"internal error in {call.method}: the supervisor's log has the details")
                request.fail(hidden, jsonrpc.INTERNAL_ERROR)

    def _update_reading(self) -> None:
        """Continues, pauses or ends reading, depending on the state of the connection."""
        if self.closed or self._closing:
            return
        if self._io.ended and not self._unanswered and not self._io.unsent_bytes:
            self.close()
        elif self._io.ended or len(self._unanswered) >= MAX_UNANSWERED:
            self._stop_half_line_timer()
            self._stop_reading()
        else:
            self._start_reading()
            # Further bytes do not extend it: a client that trickles bytes must not keep the connection.
            if len(self._io.lines) and self._half_line_timer is None:
                self._half_line_timer = self._loop.call_later(HALF_LINE_SECONDS, self._half_line_expired)

    def answer(self, request: Request, line: bytes) -> None:
        """Sends the answer and continues with lines that had to wait for it."""
        self._unanswered.discard(request)
        self._send(line)
        if not self._io.reading:
            self._serve()

    def _send(self, line: bytes) -> None:
        self._io.send(line)
        if self._io.gone:
            self.close()
        elif self._io.unsent_bytes > MAX_OUTPUT_BYTES:
            log.warning(
                "client does not read its answers; closing the connection",
                extra={"peer_uid": self.peer.uid, "peer_pid": self.peer.pid},
            )
            self.close()

    def _all_sent(self) -> None:
        if self._io.gone or self._closing:
            self.close()
        else:
            self._update_reading()

    def _send_last_error(self, error: ForqError) -> None:
        """Sends one last error line; closes when it is read, or after CLOSE_SECONDS."""
        self._send(jsonrpc.failure(None, error, jsonrpc.INVALID_REQUEST))
        if not self._io.unsent_bytes:
            self.close()
        if self.closed:
            return
        self._closing = True
        self._stop_half_line_timer()
        self._stop_reading()
        self._loop.call_later(CLOSE_SECONDS, self.close)

    def _half_line_expired(self) -> None:
        self._half_line_timer = None
        self._send_last_error(TimedOut(f"incomplete line: no newline within {HALF_LINE_SECONDS:g} s"))

    def _stop_half_line_timer(self) -> None:
        if self._half_line_timer is not None:
            self._half_line_timer.cancel()
            self._half_line_timer = None

    def _start_reading(self) -> None:
        self._io.set_reading(True)
        self._loop.on_hangup(self._io.fileno(), None)

    def _stop_reading(self) -> None:
        self._io.set_reading(False)
        self._loop.on_hangup(self._io.fileno(), self.close)

    def _hung_up(self) -> bool:
        """True if the client closed the connection, false if it only shut down its sending side."""
        poll = select.poll()
        poll.register(self._io.fileno(), 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._stop_half_line_timer()
        self._loop.on_hangup(self._io.fileno(), None)
        self._io.close()
        self._on_close(self)
        for request in self._unanswered:
            request.client_left()


class Caller(Protocol):
    """Where a request comes from, and its answer goes to: a connection, or a requester elsewhere (remote.py)."""

    peer: Peer

    def answer(self, request: Request, line: bytes) -> None: ...


class Request:
    """One call of a verb. Must be answered exactly once, with reply or fail; both do nothing if the client has left."""

    def __init__(self, caller: Caller, call: jsonrpc.Call) -> None:
        self.method = call.method
        self.params = call.params
        self.peer = caller.peer
        self.answered = False
        self.gone = False
        self._call = call
        self._caller = caller
        self._gone_callbacks: list[Callable[[], None]] = []

    def reply(self, value: object) -> None:
        try:
            line = jsonrpc.result(self._call.id, value)
        except InvalidData:
            log.exception("answer is not valid JSON", extra={"verb": self.method})
            self.fail(ForqError("internal error: the answer cannot be sent"), jsonrpc.INTERNAL_ERROR)
            return
        if len(line) > MAX_OUTPUT_BYTES:
            self.fail(InvalidData(f"the answer is larger than {MAX_OUTPUT_BYTES} bytes: request less"))
            return
        self._answer(line)

    def fail(self, error: ForqError, rpc_code: int | None = None) -> None:
        self._answer(jsonrpc.failure(self._call.id, error, rpc_code))

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Calls back if the client leaves before the answer."""
        if self.gone:
            callback()
        else:
            self._gone_callbacks.append(callback)

    def client_left(self) -> None:
        self.gone = True
        for callback in self._gone_callbacks:
            try:
                callback()
            except Exception:
                log.exception("on_gone callback failed", extra={"verb": self.method})

    def _answer(self, line: bytes) -> None:
        if self.answered:
            raise ForqError(f"{self.method} was answered twice")
        self.answered = True
        if not self.gone:
            self._caller.answer(self, line if self._call.expects_answer else b"")


_IN_MOVED_FROM = 0x040
_IN_MOVED_TO = 0x080
_IN_DELETE = 0x200
_IN_DELETE_SELF = 0x400
_IN_MOVE_SELF = 0x800
_EVENTS = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_INOTIFY_READ_BYTES = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Calls back when a file in the directory was removed, renamed or replaced (inotify). Several events may cause one
    call. The constructor raises OSError if the kernel has no watch left."""

    def __init__(self, loop: Loop, directory: str, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._changed = changed
        # IN_CLOEXEC and IN_NONBLOCK have the values of O_CLOEXEC and O_NONBLOCK.
        self._fd: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise _last_error("inotify_init1")
        if _libc.inotify_add_watch(self._fd, os.fsencode(directory), _EVENTS) < 0:
            error = _last_error("inotify_add_watch")
            os.close(self._fd)
            raise error
        loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._fd, _INOTIFY_READ_BYTES)
            self._changed()


def _last_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


def warn_of_few_descriptors(queues: int, in_use: int) -> None:
    """Called at start, with the number of queues and of descriptors in use."""
    needed = in_use + DESCRIPTORS_PER_QUEUE * queues + RESERVED_DESCRIPTORS + MAX_CONNECTIONS
    allowed = _descriptor_limit()
    if allowed < needed:
        log.warning(
            "ulimit -n is %s: with %s queues the control socket has room for %s clients instead of %s; "
            "raise it to %s (ulimit -n, or LimitNOFILE= of the systemd unit)",
            *(allowed, queues, max(0, MAX_CONNECTIONS - needed + allowed), MAX_CONNECTIONS, needed),
        )


def _descriptor_limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _reject(sock: socket.socket, error: ForqError) -> None:
    try:
        sock.send(jsonrpc.failure(None, error))
    except OSError as exc:
        log.debug("client left before it was rejected", extra={"reason": str(exc)})
    finally:
        sock.close()
