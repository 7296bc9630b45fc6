"""Tells when names in a directory are taken away or replaced, by inotify: nothing has to look again and again."""

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

from forq.procs.loop import Loop

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
