"""The output files of a queue: output.jsonl and, before it, output.1.jsonl.

1. RotatingFile writes them; only the logger does. Writes are not synced. A line that a full disk cut off is ended by
   the next write, so it spoils no other.
2. OutputReader reads them in pieces, with a cursor that survives rotation: a digest of a file's first line, and an
   offset. The previous file is opened after the current one, so a rotation in between loses no line.
3. sweep removes the files of queues that are no longer served.
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
# Output of queues that are no longer served is kept this long, for at most this many queues.
STALE_SECONDS = 7 * 86400.0
MAX_STALE_QUEUES = 16


class RotatingFile:
    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._fd = -1
        self._size = 0

    def append(self, lines: Iterable[bytes]) -> None:
        """Appends lines that end in a newline. Raises OSError; unwritten lines are lost then."""
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
            # The file was removed.
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
            # The next write reopens the file and checks how it ends.
            self.close()
            raise

    def _rotate(self) -> None:
        os.rename(self._directory / CURRENT, self._directory / PREVIOUS)
        self.close()


def sweep(logs_dir: Path, served: Collection[str], now: float) -> list[str]:
    """Removes output of unserved queues that is old or exceeds MAX_STALE_QUEUES queues. Returns their names."""
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
    # Fails if there are other files: the failed log stays.
    with suppress(OSError):
        directory.rmdir()


READ_BYTES = 128 * 1024
# When filtering by job most lines are not shown.
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

    def read(
        self, queue: str, cursor: str | None, *, tail: int, job: str | None, small: bool = False
    ) -> dict[str, Any]:
        """Records after the cursor, or the last `tail` lines; the next cursor; whether there is more; whether lines
        were lost. `small`: in parts of READ_BYTES, also those of one job."""
        directory = self._logs_dir / queue
        opened = [_OpenFile.open(directory / name) for name in (CURRENT, PREVIOUS)]
        files = [file for file in opened if file is not None]
        try:
            if not files and not (directory / FIFO_NAME).exists():
                raise UnknownQueue(
                    f"no output of queue {queue!r} on this host; if it runs elsewhere: forqctl logs {queue} --on HOST "
                    "(forqctl status --all lists the hosts)"
                )
            return self._read(files, cursor, tail, job, small)
        finally:
            for file in files:
                os.close(file.fd)

    def has_more(self, queue: str, cursor: str) -> bool:
        """Whether there may be lines after the cursor. Cheap: called often."""
        current = _OpenFile.open(self._logs_dir / queue / CURRENT)
        if current is None:
            return False
        os.close(current.fd)
        name, offset = _parse_cursor(cursor)
        return name != current.name or current.size > offset

    def _read(
        self, files: list[_OpenFile], cursor: str | None, tail: int, job: str | None, small: bool
    ) -> dict[str, Any]:
        # The oldest first, without those that have no complete line.
        files = [file for file in files[::-1] if file.name != _NO_LINE]
        if len(files) > 1 and files[0].name == files[1].name:
            # The current file was rotated after it was opened.
            files = files[1:]
        at, offset, skipped = _start_position(files, cursor, tail, job)
        records: list[Any] = []
        if not files:
            return {"records": records, "cursor": f"{_NO_LINE}:0", "more": False, "skipped": skipped}
        end = _read_records(files[at], offset, job, records, READ_BYTES if job is None or small else SEARCH_BYTES)
        if at + 1 < len(files) and end in (offset, files[at].size):
            at, end, more = at + 1, 0, True
        else:
            more = offset < end < files[at].size
        return {"records": records, "cursor": f"{files[at].name}:{end}", "more": more, "skipped": skipped}


def _start_position(files: list[_OpenFile], cursor: str | None, tail: int, job: str | None) -> tuple[int, int, bool]:
    """Index of the file, offset in it, and whether lines after the cursor were lost."""
    if cursor is not None:
        return _find_cursor(files, *_parse_cursor(cursor))
    return (0, 0, False) if job is not None else (*_find_tail(files, tail), False)


def _parse_cursor(cursor: object) -> tuple[str, int]:
    found = _CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
    if found is None:
        raise UsageError(f"invalid cursor {shown(cursor)}: use the cursor of the last answer")
    return found[1], int(found[2])


def _find_cursor(files: list[_OpenFile], name: str, offset: int) -> tuple[int, int, bool]:
    for at, file in enumerate(files):
        if file.name == name and offset <= file.size:
            return at, offset, False
    return 0, 0, name != _NO_LINE


def _find_tail(files: list[_OpenFile], lines: int) -> tuple[int, int]:
    """File and offset at which the last `lines` lines begin."""
    left, scanned = lines + 1, 0
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
            scanned += len(block)
            end = begin
            if scanned >= MAX_TAIL_BYTES:
                return at, begin + block.find(b"\n") + 1
        # No newline precedes the first line of a file.
        if left == 1:
            return at, 0
    return 0, 0


def _read_records(file: _OpenFile, offset: int, job: str | None, records: list[Any], size: int) -> int:
    """Appends the next records; returns the offset to continue at. Leaves an incomplete line for the next call."""
    block = os.pread(file.fd, size, offset)
    end = block.rfind(b"\n") + 1
    if not end and len(block) >= READ_BYTES:
        # The logger writes no line this long: skip it.
        end = len(block)
    wanted = b'"job":' + orjson.dumps(job) if job is not None else b""
    for line in block[:end].split(b"\n")[:-1]:
        if wanted in line:
            record = _parse_record(line)
            if record is not None and (job is None or record.get("job") == job):
                records.append(record)
    return offset + end


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """None for an incomplete line: the disk was full, or the machine lost power."""
    try:
        record = orjson.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"time", "level", "message"} <= record.keys() else None
