"""Unix sockets: listens without replacing a live socket, restricts access, and identifies the user of a connection."""

import errno
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, Protocol

from forq.errors import ConfigError, ForqError

# The size of sockaddr_un, without the final zero.
MAX_PATH_BYTES = 107

_SO_PEERGROUPS = 59
# The largest buffer of socket.getsockopt: 256 groups.
_PEERGROUPS_BYTES = 1024


class Peer(NamedTuple):
    """The client's credentials, from the kernel."""

    pid: int
    uid: int
    gid: int


class Connected(Protocol):
    """A socket, or the part of it that asyncio shows to a protocol."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def listen(path: str, group: int | None = None, mode: int = 0o660) -> socket.socket:
    """A non-blocking listening socket with mode 0600, or with `mode` and `group` if a group is given."""
    check_path(path)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Others must never have access to the file, not even for a moment. Nobody can connect before listen.
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        if group is not None:
            os.chown(path, -1, group, follow_symlinks=False)
            os.chmod(path, mode)
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ForqError(f"cannot listen at {path}: {exc.strerror}") from exc
    return listener


def peer_of(sock: Connected) -> Peer:
    """The client of a connection. Raises OSError."""
    return Peer(*struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))


def peer_groups(sock: Connected) -> tuple[int, ...]:
    """The supplementary groups of the client, from the kernel: a lookup by name may block. Raises OSError."""
    packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _PEERGROUPS_BYTES)
    return struct.unpack(f"{len(packed) // 4}I", packed)


def allowed_to(
    uid: int, groups: Callable[[], Collection[int]], *, group: int | None, readers: int | None
) -> Literal["act", "read"] | None:
    """The one rule for local users: root, our own user and `group` may act, members of `readers` may read. `groups`
    is only called if they matter."""
    if uid in (0, os.geteuid()):
        return "act"
    if group is None and readers is None:
        return None
    member_of = groups()
    if group in member_of:
        return "act"
    return "read" if readers in member_of else None


def check_path(path: str) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"socket path {path} is too long: Linux allows {MAX_PATH_BYTES} bytes")


def _remove_stale(path: str) -> None:
    """Removes the socket of a dead process, and raises for anything else at that path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        failed_with = probe.connect_ex(path)
    if failed_with == errno.ENOENT:
        return
    if failed_with in (0, errno.EAGAIN):
        raise ForqError(f"cannot listen at {path}: another process listens there")
    if failed_with != errno.ECONNREFUSED:
        raise ForqError(f"cannot listen at {path}: {os.strerror(failed_with)}")
    # A plain file refuses connections as well.
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ForqError(f"cannot listen at {path}: the file there is not a socket")
    os.unlink(path)
