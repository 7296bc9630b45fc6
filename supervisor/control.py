"""One client of the control socket, and its requests.

1. Connection answers the lines of one client, and holds it to the limits below.
2. Request is what a verb gets: it answers once, now or later.

Nothing here blocks, and no client can make it: whoever is too fast, too slow or broken loses its own connection only.

Tells when names in a directory are taken away or replaced, by inotify: nothing has to look again and again.

The control socket: binds it, and again if somebody removes it; decides who may connect; keeps the connections.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import select
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from forq.errors import ForqError, InvalidData, PermissionRefused, TimedOut, UnknownVerb
from forq.logging_setup import WarningThrottle
from forq.procs import jsonrpc
from forq.procs.lines import LineBuffer, LineConnection
from forq.procs.loop import Loop
from forq.procs.unix_socket import listen

if TYPE_CHECKING:
    from forq.procs.loop import Loop, Timer

log = logging.getLogger("forq.control")

MAX_UNANSWERED = 64
MAX_OUTPUT_BYTES = 8 << 20
HALF_LINE_SECONDS = 30.0
# A client that was told goodbye gets this long to read it.
CLOSE_SECONDS = 5.0
# Small enough that one pass over a flood of tiny requests takes a few milliseconds.
READ_BYTES = 16 << 10


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int
    gid: int


class Request:
    """One call of a verb. Answer it exactly once, with reply or fail; after the client has gone both do nothing."""

    def __init__(self, connection: Connection, call: jsonrpc.Call) -> None:
        self.method = call.method
        self.params = call.params
        self.peer = connection.peer
        self.answered = False
        self.gone = False
        self._call = call
        self._connection = connection
        self._gone_callbacks: list[Callable[[], None]] = []

    def reply(self, value: object) -> None:
        try:
            line = jsonrpc.result(self._call.id, value)
        except InvalidData:
            log.exception("the answer is not JSON", extra={"verb": self.method})
            self.fail(ForqError("internal error: the answer cannot be sent"), jsonrpc.INTERNAL_ERROR)
            return
        if len(line) > MAX_OUTPUT_BYTES:
            self.fail(InvalidData(f"the answer is larger than {MAX_OUTPUT_BYTES} bytes: ask for less"))
            return
        self._answer(line)

    def fail(self, error: ForqError, rpc_code: int | None = None) -> None:
        self._answer(jsonrpc.failure(self._call.id, error, rpc_code))

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back when the client leaves before the answer."""
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
                log.exception("an on_gone callback failed", extra={"verb": self.method})

    def _answer(self, line: bytes) -> None:
        if self.answered:
            raise ForqError(f"{self.method} was answered twice")
        self.answered = True
        if not self.gone:
            self._connection.settle(self, line if self._call.expects_answer else b"")


class Connection:
    """One client. `peer` is who it is; `closed` is true from the moment its socket is gone."""

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
        """Handle the lines that are here, as far as the limit on unanswered requests allows."""
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
                log.exception("a verb failed", extra={"verb": call.method})
            if request.answered:
                return
            if isinstance(exc, ForqError):
                request.fail(exc)
            else:
                hidden = ForqError(f"internal error in {call.method}: the supervisor's log has the details")
                request.fail(hidden, jsonrpc.INTERNAL_ERROR)

    def _update_reading(self) -> None:
        """Read on, stop for a while, or end, as the state of this connection asks."""
        if self.closed or self._closing:
            return
        if self._io.ended and not self._unanswered and not self._io.unsent_bytes:
            self.close()
        elif self._io.ended or len(self._unanswered) >= MAX_UNANSWERED:
            self._stop_half_line_timer()
            self._stop_reading()
        else:
            self._start_reading()
            # Further bytes do not extend it: one byte now and then must not hold the connection for ever.
            if len(self._io.lines) and self._half_line_timer is None:
                self._half_line_timer = self._loop.call_later(HALF_LINE_SECONDS, self._half_line_expired)

    def settle(self, request: Request, line: bytes) -> None:
        """Send the answer, and take up what had to wait for it."""
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
                "a client does not read its answers: dropped",
                extra={"peer_uid": self.peer.uid, "peer_pid": self.peer.pid},
            )
            self.close()

    def _all_sent(self) -> None:
        if self._io.gone or self._closing:
            self.close()
        else:
            self._update_reading()

    def _send_last_error(self, error: ForqError) -> None:
        """Send one last error line, and close when it has been read, or soon."""
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
        self._send_last_error(TimedOut(f"a line was begun and not ended within {HALF_LINE_SECONDS:g} s"))

    def _stop_half_line_timer(self) -> None:
        if self._half_line_timer is not None:
            self._half_line_timer.cancel()
            self._half_line_timer = None

    def _start_reading(self) -> None:
        self._io.read(True)
        self._loop.on_hangup(self._io.fileno(), None)

    def _stop_reading(self) -> None:
        self._io.read(False)
        self._loop.on_hangup(self._io.fileno(), self.close)

    def _hung_up(self) -> bool:
        """True when the client closed its end, false when it only said that it sends no more."""
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


_IN_MOVED_FROM = 0x040
_IN_MOVED_TO = 0x080
_IN_DELETE = 0x200
_IN_DELETE_SELF = 0x400
_IN_MOVE_SELF = 0x800
_EVENTS = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_READ_BYTES = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Calls back after something in the directory has been removed, renamed or replaced. What it was the callback finds
    out: several events may be one call. Making one raises OSError where the kernel has no watch to give."""

    def __init__(self, loop: Loop, directory: str, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._changed = changed
        # Both are close-on-exec and non-blocking, by the same numbers.
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
            os.read(self._fd, _READ_BYTES)
            self._changed()


def _last_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


__all__ = ["ControlServer", "Peer", "Request"]


MAX_CONNECTIONS = 256
# Descriptors that clients never get: what it takes to replace a child, and to kill the tree of one.
RESERVED_DESCRIPTORS = 24
# What a queue takes: leash and pidfd of its two processes, and of their successors while they overlap; its output.
DESCRIPTORS_PER_QUEUE = 9
# How soon a socket that could not be made again is tried once more.
LISTEN_AGAIN_SECONDS = 5.0
ACCEPTS_PER_PASS = 64
# With no file descriptor left, accept would fail at once for ever: leave the clients in the backlog for a while.
ACCEPT_PAUSE_SECONDS = 0.5

_SO_PEERGROUPS = 59
# The largest answer socket.getsockopt takes: 256 groups.
_PEERGROUPS_BYTES = 1024
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ControlServer:
    """Listens at `path` (0600; 0660 and that group when one of `group` and `readers` is given) and serves `verbs`.

    `verbs` is all a client can reach: a flat table, looked up by the whole name. `listener` is a socket that somebody
    else has made and goes on listening at: it is used instead, as it is, and its file stays when this server ends.
    Members of the group `readers` get `read_verbs`. A file has one group only: with both it lets everybody connect
    (0666), and who may not is turned away here.
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
        self._again_timer: Timer | None = None
        self._foreign_inode: int | None = None
        # Whoever may not use the socket must not be able to fill the log.
        self._refused = WarningThrottle(log, loop.call_later)
        self._unreadable = WarningThrottle(log, loop.call_later)
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Drop every client and remove the socket, unless another one has taken its place, or it is not ours."""
        if self._listener.fileno() < 0:
            return
        if self._watch is not None:
            self._watch.close()
        if self._again_timer is not None:
            self._again_timer.cancel()
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

    def _watch_directory(self) -> DirectoryWatch | None:
        try:
            return DirectoryWatch(self._loop, os.path.dirname(self.path) or ".", self._listen_if_removed)
        except OSError as exc:
            log.warning("nobody will notice if %s is removed: %s", self.path, exc)
            return None

    def _listen_if_removed(self) -> None:
        """A socket without a name lets nobody in. What somebody has put in its place is left alone."""
        if self._again_timer is not None:
            self._again_timer.cancel()
            self._again_timer = None
        try:
            found = os.lstat(self.path).st_ino
            if found not in (self._inode, self._foreign_inode):
                self._foreign_inode = found
                log.error("%s is not the control socket any more; remove it, and the socket is made again", self.path)
            return
        except FileNotFoundError:
            pass
        except OSError as exc:
            log.error("cannot look at the control socket %s: %s", self.path, exc.strerror)
            return
        try:
            listener = self._listen(self.path)
        except ForqError as exc:
            log.error("the control socket was removed and cannot be made again; next try in 5 s: %s", exc)
            self._again_timer = self._loop.call_later(LISTEN_AGAIN_SECONDS, self._listen_if_removed)
            return
        log.warning("the control socket was removed; made it again at %s", self.path)
        # Who had connected to the old one before it lost its name.
        self._accept()
        self._close_listener()
        self._listener, self._inode = listener, os.lstat(self.path).st_ino
        self._loop.add_reader(listener.fileno(), self._accept)

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
                # The client gave up before it was accepted.
                continue
            sock.setblocking(False)
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        peer = Peer(*struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))
        verbs = self._verbs_for(sock, peer)
        if verbs is None:
            self._refused.warn(f"client refused uid={peer.uid} gid={peer.gid} pid={peer.pid}")
            _reject(sock, PermissionRefused(f"user {peer.uid} may not use this control socket"))
        elif len(self._connections) >= MAX_CONNECTIONS:
            _reject(sock, ForqError(f"too many connections: at most {MAX_CONNECTIONS} at a time"))
        elif sock.fileno() + RESERVED_DESCRIPTORS >= _descriptor_limit():
            # The kernel hands out the lowest free number: all below this one are in use.
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
        """What this client may ask for; None: nothing."""
        if peer.uid in (0, os.geteuid()):
            return self._verbs
        if self._group is None and self._readers is None:
            return None
        groups = {peer.gid, *self._groups_of(sock)}
        if self._group in groups:
            return self._verbs
        return self._read_verbs if self._readers in groups else None

    def _groups_of(self, sock: socket.socket) -> tuple[int, ...]:
        """The supplementary groups the client had when it connected, from the kernel: a lookup by name may block."""
        try:
            packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _PEERGROUPS_BYTES)
        except OSError as exc:
            self._unreadable.warn(f"cannot read the groups of a client error={exc}")
            return ()
        return struct.unpack(f"{len(packed) // 4}I", packed)

    def _pause_accepting(self, reason: OSError) -> None:
        log.warning("no new clients for a while", extra={"reason": str(reason)})
        self._loop.remove_reader(self._listener.fileno())
        self._resume_timer = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._resume_timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


def warn_of_few_descriptors(queues: int, in_use: int) -> None:
    """At the start, when so many descriptors are in use and so many queues are to be served."""
    needed = in_use + DESCRIPTORS_PER_QUEUE * queues + RESERVED_DESCRIPTORS + MAX_CONNECTIONS
    allowed = _descriptor_limit()
    if allowed < needed:
        log.warning(
            "ulimit -n is %s: with %s queues that leaves room for %s clients of the control socket instead of %s; "
            "raise it to %s (ulimit -n, or LimitNOFILE= of the unit)",
            *(allowed, queues, max(0, MAX_CONNECTIONS - needed + allowed), MAX_CONNECTIONS, needed),
        )


def _descriptor_limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _reject(sock: socket.socket, error: ForqError) -> None:
    try:
        sock.send(jsonrpc.failure(None, error))
    except OSError as exc:
        log.debug("a client left before it was refused", extra={"reason": str(exc)})
    finally:
        sock.close()
