"""The failed log of a queue: logs/NAME/failed.jsonl in the state directory, one JSON object per line.

Two processes write it (the scribe; the clerk, when a queue is deleted), so each write is made under a lock on the file.
What append has returned from is on disk. A write that failed half way is taken back; one that a crash cut off is ended
by the next write, so that it spoils no other line.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from forq.errors import ForqError

NAME = "failed.jsonl"
# failed.jsonl, failed.jsonl.1 … failed.jsonl.9
MAX_FILES = 10
DEFAULT_MAX_BYTES = 64 * 1024 * 1024

_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def append_lines(directory: Path, lines: Sequence[Mapping[str, object]], max_bytes: int = DEFAULT_MAX_BYTES) -> None:
    """Appends lines durably. A file that would grow past `max_bytes` is rotated first (one batch may be larger)."""
    data = b"".join(_encode(line) + b"\n" for line in lines)
    try:
        with _opened_directory(directory) as folder:
            fd = _opened_for(len(data), folder, max_bytes)
            try:
                _write(fd, data)
                if os.fstat(fd).st_size == len(data):
                    os.fsync(folder)
            finally:
                os.close(fd)
    except OSError as exc:
        raise ForqError(f"cannot write {directory / NAME}: {exc.strerror or exc}") from exc


def _encode(line: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(line)
    except TypeError:
        # Data that was stored at orjson's limit of nesting is one level deeper here.
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


@contextmanager
def _opened_directory(directory: Path) -> Iterator[int]:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for parent in (directory.parent, directory.parent.parent):
            _sync_directory(parent)
    fd = os.open(directory, _DIRECTORY_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _opened_for(size: int, folder: int, max_bytes: int) -> int:
    """The locked log, with room for so many bytes."""
    while True:
        fd = os.open(NAME, _FILE_FLAGS, 0o600, dir_fd=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            status = os.fstat(fd)
            current = _inode(folder) == status.st_ino
            if current and (status.st_size == 0 or status.st_size + size <= max_bytes):
                return fd
            if current:
                _rotate(folder)
        except BaseException:
            os.close(fd)
            raise
        # It has been rotated, by us or by the other process: the lock is on the old file.
        os.close(fd)


def _inode(folder: int) -> int | None:
    try:
        return os.stat(NAME, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _rotate(folder: int) -> None:
    """failed.jsonl becomes .1, .1 becomes .2 and so on, up to the first number that is free; else the oldest goes."""
    names = [NAME, *(f"{NAME}.{number}" for number in range(1, MAX_FILES))]
    present = set(os.listdir(folder))
    free = next((number for number, name in enumerate(names) if name not in present), MAX_FILES - 1)
    for number in range(free, 0, -1):
        os.rename(names[number - 1], names[number], src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _write(fd: int, data: bytes) -> None:
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        data = b"\n" + data
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    except BaseException:
        # The lines stay in Redis and are written again: half of them must not stay here.
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise
