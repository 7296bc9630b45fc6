"""Listens on a Unix socket: never replaces a live socket, and restricts access to it."""

import errno
import os
import socket
import stat

from forq.errors import ConfigError, ForqError

# The size of sockaddr_un, without the final zero.
MAX_PATH_BYTES = 107


def listen(path: str, group: int | None = None, mode: int = 0o660) -> socket.socket:
    """A non-blocking listening socket with mode 0600, or with `mode` and `group` if a group is given."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"socket path {path} is too long: Linux allows {MAX_PATH_BYTES} bytes")
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
