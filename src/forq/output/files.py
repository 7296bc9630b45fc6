"""The output of one queue on disk: output.jsonl and, before it, output.1.jsonl. One process writes it, the logger.

Not synced. A line that a full disk has cut off is ended by the next write, so that it spoils no other.

Reading the output of a queue from its files, a piece at a time, with a cursor that outlives their rotation.

A cursor is a digest of a file's first line, and an offset in that file. What it names stays the same when the file is
renamed. The file before is opened after the current one: whatever is rotated in between, no line is passed over.
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from forq.errors import UnknownQueue, UsageError
from forq.output.format import FIFO_NAME
from forq.values import shown

CURRENT = "output.jsonl"
PREVIOUS = "output.1.jsonl"
# Of queues that are not served any more.
STALE_SECONDS = 7 * 86400.0
MAX_STALE_QUEUES = 16


class RotatingFile:
    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0

    def append(self, lines: Iterable[bytes]) -> None:
        """Lines with their ends. Raises OSError; what was not written then is lost."""
        batch: list[bytes] = []
        room = self._room()
        for line in lines:
            if len(line) > room and (batch or self._size):
                self._write(b"".join(batch))
                batch = []
                self._rotate()
                room = self._room()
            batch.append(line)
            room -= len(line)
        self._write(b"".join(batch))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _room(self) -> int:
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            # Somebody has removed it.
            self.close()
        if self._fd < 0:
            self._open()
        return self._max_bytes - self._size

    def _open(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(self._directory / CURRENT, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._write(b"\n")

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                count = os.write(self._fd, left)
                self._size += count
                left = left[count:]
        except OSError:
            # The next one looks how it ends.
            self.close()
            raise

    def _rotate(self) -> None:
        os.rename(self._directory / CURRENT, self._directory / PREVIOUS)
        self.close()


def sweep(logs_dir: Path, served: Collection[str], now: float) -> list[str]:
    """Removes the output of queues that are not served, once it is old, or of too many. Returns their names."""
    left: list[tuple[float, Path]] = []
    swept = []
    for directory in _directories(logs_dir):
        if directory.name in served:
            continue
        with suppress(FileNotFoundError):
            left.append((os.stat(directory / CURRENT).st_mtime, directory))
    left.sort(reverse=True)
    for number, (modified, directory) in enumerate(left):
        if number >= MAX_STALE_QUEUES or now - modified > STALE_SECONDS:
            _remove(directory)
            swept.append(directory.name)
    return swept


def _directories(logs_dir: Path) -> list[Path]:
    try:
        return [directory for directory in logs_dir.iterdir() if directory.is_dir() and not directory.is_symlink()]
    except FileNotFoundError:
        return []


def _remove(directory: Path) -> None:
    for name in (CURRENT, PREVIOUS):
        with suppress(FileNotFoundError):
            os.unlink(directory / name)
    # Only if the queue has left nothing else: its failed log stays.
    with suppress(OSError):
        directory.rmdir()


READ_BYTES = 128 * 1024
# With a job's id most of what is read is not shown.
SEARCH_BYTES = 1024 * 1024
MAX_TAIL_BYTES = 32 * 1024 * 1024
FIRST_LINE_BYTES = 4096
_NO_LINE = "-"
_CURSOR = re.compile(r"([0-9a-f]{16}|-):([0-9]{1,15})")


@dataclass
class _OpenFile:
    fd: int
    name: str
    size: int

    @classmethod
    def open(cls, path: Path) -> "_OpenFile | None":
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        first, newline, _ = os.pread(fd, FIRST_LINE_BYTES, 0).partition(b"\n")
        whole = newline or len(first) == FIRST_LINE_BYTES
        name = hashlib.blake2b(first, digest_size=8).hexdigest() if whole else _NO_LINE
        return cls(fd, name, os.fstat(fd).st_size)


class OutputReader:
    def __init__(self, logs_dir: Path) -> None:
        self._logs_dir = logs_dir

    def read(self, queue: str, cursor: str | None, *, tail: int, job: str | None) -> dict[str, Any]:
        """Records behind the cursor, or from the last `tail` lines on; the next cursor; whether that is all for now."""
        directory = self._logs_dir / queue
        opened = [_OpenFile.open(directory / name) for name in (CURRENT, PREVIOUS)]
        files = [file for file in opened if file is not None]
        try:
            if not files and not (directory / FIFO_NAME).exists():
                raise UnknownQueue(f"there is no output of a queue {queue!r}")
            return self._read(files, cursor, tail, job)
        finally:
            for file in files:
                os.close(file.fd)

    def has_more(self, queue: str, cursor: str) -> bool:
        """Whether there may be something behind the cursor. Cheap: this is asked again and again."""
        current = _OpenFile.open(self._logs_dir / queue / CURRENT)
        if current is None:
            return False
        os.close(current.fd)
        name, offset = _parse_cursor(cursor)
        return name != current.name or current.size > offset

    def _read(self, files: list[_OpenFile], cursor: str | None, tail: int, job: str | None) -> dict[str, Any]:
        # The oldest first; one without a whole line is as good as none.
        files = [file for file in files[::-1] if file.name != _NO_LINE]
        if len(files) > 1 and files[0].name == files[1].name:
            # It was rotated between the two looks.
            files = files[1:]
        at, offset, skipped = _start_position(files, cursor, tail, job)
        records: list[Any] = []
        if not files:
            return {"records": records, "cursor": f"{_NO_LINE}:0", "more": False, "skipped": skipped}
        end = _read_records(files[at], offset, job, records)
        if at + 1 < len(files) and end in (offset, files[at].size):
            at, end, more = at + 1, 0, True
        else:
            more = offset < end < files[at].size
        return {"records": records, "cursor": f"{files[at].name}:{end}", "more": more, "skipped": skipped}


def _start_position(files: list[_OpenFile], cursor: str | None, tail: int, job: str | None) -> tuple[int, int, bool]:
    """Which file, where in it, and whether lines were lost between the cursor and there."""
    if cursor is not None:
        return _find_cursor(files, *_parse_cursor(cursor))
    return (0, 0, False) if job is not None else (*_find_tail(files, tail), False)


def _parse_cursor(cursor: object) -> tuple[str, int]:
    found = _CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise UsageError(f"cursor {shown(cursor)} is not allowed: use the one of the last answer")
    return found[1], int(found[2])


def _find_cursor(files: list[_OpenFile], name: str, offset: int) -> tuple[int, int, bool]:
    for at, file in enumerate(files):
        if file.name == name and offset <= file.size:
            return at, offset, False
    return 0, 0, name != _NO_LINE


def _find_tail(files: list[_OpenFile], lines: int) -> tuple[int, int]:
    """Where the last so many lines begin."""
    left, looked = lines + 1, 0
    for at in range(len(files) - 1, -1, -1):
        end = files[at].size
        while end > 0:
            begin = max(0, end - READ_BYTES)
            block = os.pread(files[at].fd, end - begin, begin)
            count = block.count(b"\n")
            if count >= left:
                position = len(block)
                for _ in range(left):
                    position = block.rfind(b"\n", 0, position)
                return at, begin + position + 1
            left -= count
            looked += len(block)
            end = begin
            if looked >= MAX_TAIL_BYTES:
                return at, begin + block.find(b"\n") + 1
        # The first line of a file has no end of another before it.
        if left == 1:
            return at, 0
    return 0, 0


def _read_records(file: _OpenFile, offset: int, job: str | None, records: list[Any]) -> int:
    """Adds what is there, up to a piece; returns where to go on. Half a line is left for the next time."""
    block = os.pread(file.fd, READ_BYTES if job is None else SEARCH_BYTES, offset)
    end = block.rfind(b"\n") + 1
    if not end and len(block) >= READ_BYTES:
        # No line of ours is that long.
        end = len(block)
    wanted = b'"job":' + orjson.dumps(job) if job is not None else b""
    for line in block[:end].split(b"\n")[:-1]:
        if wanted in line:
            record = _parse_record(line)
            if record is not None and (job is None or record.get("job") == job):
                records.append(record)
    return offset + end


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """None if it is only a part: the disk was full, or the machine was switched off."""
    try:
        record = orjson.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"time", "level", "message"} <= record.keys() else None
