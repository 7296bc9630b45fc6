"""`forq run --reload`: watches the files of apps with inotify, and restarts an app when one of its files changes.

A library such as watchfiles would need threads, which break fork, or a process of its own; inotify is a descriptor in
the supervisor's loop.
"""

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from forq.errors import ForqError
from forq.procs.loop import Loop, Timer
from forq.supervisor.apps import Apps, ServedApp
from forq.supervisor.census import CENSUS_SECONDS

log = logging.getLogger("forq")

# An editor may write several files, or one file several times.
DEBOUNCE_SECONDS = 0.2
READ_BYTES = 64 * 1024
_EVENT = struct.Struct("iIII")

# From sys/inotify.h. A file counts as changed when it was written and closed, or replaced by a rename.
IN_CLOSE_WRITE = 0x00000008
IN_MOVED_TO = 0x00000080
IN_Q_OVERFLOW = 0x00004000
IN_IGNORED = 0x00008000
IN_ONLYDIR = 0x01000000

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Calls `changed` with the paths of files that were written in the watched directories; None: some were lost."""

    def __init__(self, loop: Loop, changed: Callable[[str | None], None]) -> None:
        self._changed = changed
        self._directories: dict[int, str] = {}
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")
        loop.add_reader(self._fd, self._read)

    def add(self, directory: str) -> None:
        """Idempotent. Raises OSError."""
        if directory in self._directories.values():
            return
        mask = IN_CLOSE_WRITE | IN_MOVED_TO | IN_ONLYDIR
        number = _checked(_libc.inotify_add_watch(self._fd, os.fsencode(directory), mask), directory)
        self._directories[number] = directory

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        for number, mask, name in _events(data):
            if mask & IN_Q_OVERFLOW:
                self._changed(None)
            elif mask & IN_IGNORED:
                # The directory was deleted, perhaps to create it anew: the kernel has removed the watch.
                self._directories.pop(number, None)
                self._changed(None)
            elif name and number in self._directories:
                self._changed(os.path.join(self._directories[number], name))


def _events(data: bytes) -> Iterator[tuple[int, int, str]]:
    at = 0
    while at < len(data):
        number, mask, _, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size + length
        yield number, mask, os.fsdecode(data[at - length : at].rstrip(b"\0"))


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


class Reload:
    """Restarts apps whose files change. While an app cannot be read, every Python file in its directories counts."""

    def __init__(self, loop: Loop, apps: Apps) -> None:
        self._loop = loop
        self._apps = apps
        self._changed: set[ServedApp] = set()
        self._timer: Timer | None = None
        self._watch = DirectoryWatch(loop, self._file_changed)
        apps.on_read.append(self._watch_app)

    def _watch_app(self, app: ServedApp) -> None:
        for directory in _directories(app):
            try:
                self._watch.add(directory)
            except OSError as exc:
                log.warning("cannot watch a directory; changes are not noticed app=%s error=%s", app.label, exc)

    def _file_changed(self, path: str | None) -> None:
        changed = {app for app in self._apps.all if path is None or _concerns(app, path)}
        if not changed:
            return
        self._changed |= changed
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(DEBOUNCE_SECONDS, self._restart)

    def _restart(self) -> None:
        changed, self._changed, self._timer = self._changed, set(), None
        for app in changed:
            log.info("files changed; restarting app app=%s", app.label)
            self._apps.restart(app, CENSUS_SECONDS, partial(_log_result, app))


def _directories(app: ServedApp) -> set[str]:
    """Of the imported modules; and those of the app itself, whose import may have failed."""
    package = app.spec.app.partition(":")[0].split(".")[:-1]
    own = {os.path.join(root, *package[:depth]) for root in app.spec.path for depth in range(len(package) + 1)}
    return {os.path.dirname(file) for file in app.files} | {directory for directory in own if os.path.isdir(directory)}


def _concerns(app: ServedApp, path: str) -> bool:
    if path in app.files:
        return True
    return app.error is not None and path.endswith(".py") and os.path.dirname(path) in _directories(app)


def _log_result(app: ServedApp, answer: "dict[str, Any] | ForqError") -> None:
    if not isinstance(answer, ForqError):
        log.info("restarted app app=%s queues=%s", app.label, sorted(app.specs))
    elif app.error is None:
        # Otherwise the error was logged when the app was read.
        log.error("%s", answer)
