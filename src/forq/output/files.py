"""The output of one queue on disk: output.jsonl and, before it, output.1.jsonl. One process writes it, the logger.

Not synced. A line that a full disk has cut off is ended by the next write, so that it spoils no other.
"""

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

CURRENT = "output.jsonl"
BEFORE = "output.1.jsonl"
# Of queues that are not served any more.
KEPT_SECONDS = 7 * 86400.0
KEPT_QUEUES = 16


class Ring:
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
        os.rename(self._directory / CURRENT, self._directory / BEFORE)
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
        if number >= KEPT_QUEUES or now - modified > KEPT_SECONDS:
            _remove(directory)
            swept.append(directory.name)
    return swept


def _directories(logs_dir: Path) -> list[Path]:
    try:
        return [directory for directory in logs_dir.iterdir() if directory.is_dir() and not directory.is_symlink()]
    except FileNotFoundError:
        return []


def _remove(directory: Path) -> None:
    for name in (CURRENT, BEFORE):
        with suppress(FileNotFoundError):
            os.unlink(directory / name)
    # Only if the queue has left nothing else: its failed log stays.
    with suppress(OSError):
        directory.rmdir()
