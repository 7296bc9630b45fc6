"""The log of actions: one JSON line before an action is carried out, and one after it.

The first has id, at, user, via, from, action, target and params; the second has id, at, result and detail. An action
whose first line cannot be stored is refused. The data of jobs is never in it.
"""

import asyncio
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from forq.errors import ForqError, OutcomeUnknown, SupervisorUnreachable, TimedOut, UsageError
from forq.log_format import iso_time
from forq.web.access import User

MAX_BYTES = 10 << 20
MAX_TEXT = 200
MAX_VALUES = 64
# Jobs that one action names.
MAX_IDS = 1000

# unknown: no answer came, so the action may have been carried out.
Result = Literal["done", "refused", "failed", "unknown"]
Plain = str | int | float | bool | list[str] | None

# After these errors the action may or may not have been carried out.
UNANSWERED = (TimedOut, SupervisorUnreachable, OutcomeUnknown)

log = logging.getLogger("forq.web")
actions = logging.getLogger("forq.web.actions")


class ActionLogError(ForqError):
    """The action was not logged, and so it was not carried out."""

    code = "action_log"


class Entry:
    """One action under way. `detail` and `result` may be set before the end."""

    def __init__(self, entry_id: str) -> None:
        self.id = entry_id
        self.result: Result = "done"
        self.detail = ""


class ActionLog:
    """`path` None: lines go to the logger forq.web.actions, as in a mounted app. One thread writes, so the event loop
    never waits for a disk, and lines keep their order. `write` and `clock` are for tests."""

    def __init__(
        self,
        path: Path | None,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._file = None if path is None else _File(path, max_bytes, write)
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forq-actions")

    def close(self) -> None:
        """Waits for the lines that are under way."""
        self._thread.shutdown(wait=True)
        if self._file is not None:
            self._file.close()

    @asynccontextmanager
    async def recorded(
        self, user: User, action: str, target: Mapping[str, Plain], params: Mapping[str, Any] | None = None
    ) -> AsyncIterator[Entry]:
        """`async with log.recorded(…) as entry: carry it out`. An error of forq counts as refused, or as unknown if no
        answer came; any other exception as failed. All are raised again. Raises ActionLogError before the block if
        the action cannot be logged."""
        entry = Entry(await self.begin(user, action, target, params))
        try:
            yield entry
        except ForqError as exc:
            result: Result = "unknown" if isinstance(exc, UNANSWERED) else "refused"
            await self.end(entry.id, result, entry.detail or str(exc))
            raise
        except asyncio.CancelledError:
            await self.end(entry.id, "unknown", entry.detail or "the client left")
            raise
        except BaseException as exc:
            # Cancelled, too: the line is handed to the thread before anything waits.
            await self.end(entry.id, "failed", entry.detail or f"{type(exc).__name__}: {exc}")
            raise
        await self.end(entry.id, entry.result, entry.detail)

    async def begin(
        self, user: User, action: str, target: Mapping[str, Plain], params: Mapping[str, Any] | None = None
    ) -> str:
        """Stores the first line and returns the id. Raises ActionLogError if it cannot be stored."""
        entry_id = secrets.token_hex(8)
        line = _line(
            {
                "id": entry_id,
                "at": iso_time(self._clock()),
                "user": _short(user.name),
                "via": user.source,
                "from": _short(user.origin),
                "action": _short(action),
                "target": _plain(target, "target"),
                "params": _plain(params or {}, "params"),
            }
        )
        try:
            await asyncio.wrap_future(self._submit(line))
        except (OSError, ForqError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            log.error("the action is refused, since it cannot be logged: %s action=%s", reason, action)
            raise ActionLogError(f"the action was not carried out, since it cannot be logged: {reason}") from exc
        return entry_id

    async def end(self, entry_id: str, result: Result, detail: str = "") -> None:
        """Stores the second line. The action was carried out: if this fails, the log of forq gets the line."""
        line = _line({"id": entry_id, "at": iso_time(self._clock()), "result": result, "detail": _short(detail)})
        written = self._submit(line)
        try:
            await asyncio.shield(asyncio.wrap_future(written))
        except (OSError, ForqError) as exc:
            log.error("cannot log the end of an action: %s line=%s", exc, line.decode().rstrip())

    def _submit(self, line: bytes) -> Future[None]:
        return self._thread.submit(self._store, line)

    def _store(self, line: bytes) -> None:
        if self._file is None:
            actions.info("%s", line.decode().rstrip())
        else:
            self._file.append(line)


class _File:
    """Appends lines, each in one write, and syncs them. Used by one thread."""

    def __init__(self, path: Path, max_bytes: int, write: Callable[[int, bytes], int]) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._write = write
        self._fd = -1
        self._size = 0
        # The last line in the file has no end.
        self._torn = False

    def append(self, line: bytes) -> None:
        """Raises OSError or ActionLogError; the line, or a part of it, may be in the file all the same."""
        self._prepare(len(line))
        data = b"\n" + line if self._torn else line
        try:
            written = self._write(self._fd, data)
            self._size += written
            self._torn = written < len(data)
            if self._torn:
                raise ActionLogError(
                    f"{self._path}: only {written} of {len(data)} bytes were written; is the disk full?"
                )
            os.fsync(self._fd)
        except BaseException:
            # Opened again for the next line, with a look at how it ends.
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _prepare(self, length: int) -> None:
        if self._fd >= 0 and not self._is_current():
            self.close()
        if self._fd < 0:
            self._open()
        if self._size and self._size + length > self._max_bytes:
            os.rename(self._path, self._path.with_name(f"{self._path.name}.1"))
            self.close()
            self._open()

    def _is_current(self) -> bool:
        """False if the file was removed, or replaced by another program that rotates logs."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ActionLogError(f"{self._path} is not a file")
            if status.st_uid not in (0, os.geteuid()):
                raise ActionLogError(f"{self._path} belongs to another user: {status.st_uid}")
            if status.st_mode & 0o077:
                os.fchmod(fd, 0o600)
            self._torn = status.st_size > 0 and os.pread(fd, 1, status.st_size - 1) != b"\n"
            if status.st_size == 0:
                # A new name in the directory is durable only after this.
                directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._size = fd, status.st_size


def _line(record: Mapping[str, Any]) -> bytes:
    # ASCII: control characters, line separators and direction marks are escaped, so no name can forge a line.
    return json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Ids and options only, and lists of ids in a target: nested values could be the data of a job."""
    if len(values) > MAX_VALUES:
        raise UsageError(f"{what}: at most {MAX_VALUES} values are logged")
    return {
        _short(name): _plain_value(value, f"{what}: {name}", lists=what == "target") for name, value in values.items()
    }


def _plain_value(value: Any, where: str, *, lists: bool) -> Any:
    if isinstance(value, str):
        return _short(value)
    if lists and isinstance(value, list) and len(value) <= MAX_IDS and all(isinstance(each, str) for each in value):
        return [_short(each) for each in value]
    if not isinstance(value, int | float | bool | None):
        raise UsageError(f"{where} is a {type(value).__name__}; only text, ids, numbers and flags are logged")
    return value


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
