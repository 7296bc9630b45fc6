"""The control socket: binds it, and again if somebody removes it; decides who may connect; keeps the connections."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from forq.errors import ForqError, PermissionRefused
from forq.logging_setup import Seldom
from forq.procs import jsonrpc
from forq.procs.unix_socket import listen
from forq.supervisor.connection import Connection, Peer, Request
from forq.supervisor.directory_watch import DirectoryWatch

if TYPE_CHECKING:
    from forq.procs.loop import Loop, Timer

__all__ = ["ControlServer", "Peer", "Request"]

log = logging.getLogger("forq.control")

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
        self._refused = Seldom(log, loop.call_later)
        self._unreadable = Seldom(log, loop.call_later)
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
            _turn_away(sock, PermissionRefused(f"user {peer.uid} may not use this control socket"))
        elif len(self._connections) >= MAX_CONNECTIONS:
            _turn_away(sock, ForqError(f"too many connections: at most {MAX_CONNECTIONS} at a time"))
        elif sock.fileno() + RESERVED_DESCRIPTORS >= _descriptor_limit():
            # The kernel hands out the lowest free number: all below this one are in use.
            _turn_away(
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


def _turn_away(sock: socket.socket, error: ForqError) -> None:
    try:
        sock.send(jsonrpc.failure(None, error))
    except OSError as exc:
        log.debug("a client left before it was refused", extra={"reason": str(exc)})
    finally:
        sock.close()
