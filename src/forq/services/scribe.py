"""The scribe: moves jobs that failed for good from the outbox in Redis to the failed log of their queue, and syncs the
embedded server's data to disk.

The failed log is logs/NAME/failed.jsonl in the state directory, one JSON object per line. Two processes write it (the
scribe, and the clerk when a queue is deleted), each under a lock on the file.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from forq.broker.link import Link
from forq.broker.outbox import Outbox, OutboxSubscription, read_line
from forq.errors import ExitCode, Fenced, ForqError, RedisUnavailable, UnknownQueue
from forq.procs.backoff import Backoff
from forq.procs.context import Context
from forq.procs.liveness import DISK_SECONDS, expect_busy
from forq.procs.loop import service_loop
from forq.services.rpc import RpcServer

log = logging.getLogger("forq")

CALL_TIMEOUT_SECONDS = 3.0
CHECK_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0
SYNC_SECONDS = 1.0
LOG_SECONDS = 60.0

NAME = "failed.jsonl"
# failed.jsonl, failed.jsonl.1 … failed.jsonl.9
MAX_FILES = 10
DEFAULT_MAX_BYTES = 64 * 1024 * 1024

_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def run_scribe(context: Context, leash: socket.socket) -> int:
    if context.redis_dir is not None:
        AppendOnlySync(context.redis_dir).start()
    return Scribe(context, leash).run()


class Scribe:
    """
    1. Drains the outbox of a queue when new lines are published, when it starts to serve the queue, after the
       subscription broke, and every 30 s in case a message was lost.
    2. Writes and syncs a batch, then removes it from Redis. After a crash in between the lines are written again.
    3. Removes nothing while a log cannot be written or Redis is unreachable; it retries with growing pauses.
    """

    def __init__(self, context: Context, leash: socket.socket) -> None:
        self._context = context
        link = Link(context.url, name="forq-scribe", timeout_seconds=CALL_TIMEOUT_SECONDS)
        self._outbox = Outbox(link, context.prefix, context.processor, context.expiry_ms)
        self._subscription = OutboxSubscription(context.url, context.prefix, "forq-scribe-subscription")
        self._loop = service_loop()
        self._rpc = RpcServer(self._loop, leash, {"serve": self._serve})
        self._queues: list[str] = []
        # When to drain each queue that has lines, and when to check for such queues.
        self._due: dict[str, float] = {}
        self._check_at = 0.0
        self._write_failures: dict[str, Backoff] = {}
        self._redis_failures = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        # Written, but perhaps still in Redis: if only the reply was lost, they are not written twice.
        self._written: dict[str, list[bytes]] = {}

    def run(self) -> int:
        self._loop.run(self._after_pass)
        return ExitCode.STOPPED

    def _after_pass(self) -> float:
        self.tick(time.monotonic())
        return max(0.0, min([self._check_at, *self._due.values()]) - time.monotonic())

    def tick(self, now: float) -> None:
        """Connects, checks for lines, and writes one batch of each queue, as far as that is due."""
        try:
            checking = now >= self._check_at
            if checking:
                self._check(now)
            for queue in [queue for queue, at in self._due.items() if at <= now]:
                self._drain(queue, now)
            # A server that only refuses writes passes the check: the failure ends when draining works too.
            if checking and self._redis_failures.failures:
                log.info("draining failed logs again failures=%s", self._redis_failures.failures)
                self._redis_failures.reset()
        except RedisUnavailable as exc:
            self._redis_failed(exc, now)

    def _serve(self, params: dict[str, Any]) -> object:
        """Replaces the set of served queues."""
        for queue in set(self._queues) - set(params["queues"]):
            self._due.pop(queue, None)
            self._written.pop(queue, None)
            self._write_succeeded(queue)
        if set(params["queues"]) - set(self._queues) and not self._redis_failures.failures:
            self._check_at = 0.0
        self._queues = list(params["queues"])
        return {}

    def _check(self, now: float) -> None:
        if not self._queues:
            self._check_at = now + CHECK_SECONDS
            return
        # Subscribe before the check, so that no line is missed in between.
        if not self._subscription.connected:
            self._subscription.connect()
            self._loop.add_reader(self._subscription.fileno(), self._receive)
        for queue in self._outbox.waiting(self._queues):
            self._due.setdefault(queue, now)
        self._check_at = now + CHECK_SECONDS

    def _receive(self) -> None:
        fd = self._subscription.fileno()
        try:
            for queue in self._subscription.receive_queues() & set(self._queues):
                self._due.setdefault(queue, self._check_at if self._redis_failures.failures else 0.0)
        except RedisUnavailable:
            self._loop.remove_reader(fd)
            self._check_at = 0.0

    def _drain(self, queue: str, now: float) -> None:
        """Writes one batch: other queues and requests come in between."""
        try:
            lines = self._outbox.collect(queue)
            if lines:
                self._write(queue, lines)
                self._outbox.forget(queue, lines)
            self._written.pop(queue, None)
        except RedisUnavailable:
            raise
        except (UnknownQueue, Fenced) as exc:
            # The queue was deleted, or this processor evicted: others write the lines, and pulse reports it.
            log.info("not draining the outbox any more queue=%s reason=%s", queue, exc)
            del self._due[queue]
        except ForqError as exc:
            self._write_failed(queue, exc, now)
        else:
            self._write_succeeded(queue)
            if not lines:
                del self._due[queue]

    def _write(self, queue: str, lines: list[bytes]) -> None:
        if self._written.get(queue) == lines:
            return
        directory = self._context.logs_dir / queue
        expect_busy(DISK_SECONDS)
        append_lines(directory, [read_line(queue, line) for line in lines], self._context.failed_log_max)
        self._written[queue] = lines

    def _write_failed(self, queue: str, exc: ForqError, now: float) -> None:
        backoff = self._write_failures.setdefault(queue, Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
        self._due[queue] = now + backoff.fail()
        if backoff.failures == 1:
            log.error("cannot write the failed log; its lines stay in Redis queue=%s error=%s", queue, exc)
        self._rpc.notify("failed_log", queue=queue, error=str(exc), failures=backoff.failures)

    def _write_succeeded(self, queue: str) -> None:
        backoff = self._write_failures.pop(queue, None)
        if backoff is not None:
            log.info("failed log is writable again queue=%s failures=%s", queue, backoff.failures)
            self._rpc.notify("failed_log", queue=queue, error=None, failures=backoff.failures)

    def _redis_failed(self, exc: RedisUnavailable, now: float) -> None:
        self._check_at = now + self._redis_failures.fail()
        self._due = {queue: max(at, self._check_at) for queue, at in self._due.items()}
        if self._redis_failures.failures == 1:
            log.warning("cannot drain failed logs; retrying error=%s", exc)


def append_lines(directory: Path, lines: Sequence[Mapping[str, object]], max_bytes: int = DEFAULT_MAX_BYTES) -> None:
    """Appends lines and syncs them. A file that would grow past `max_bytes` is rotated first (one batch may be larger).

    A partial write is undone. If a crash left an incomplete line, the next write ends it first, so that it spoils no
    other line.
    """
    data = b"".join(_encode(line) + b"\n" for line in lines)
    try:
        with _opened_directory(directory) as folder:
            fd = _open_with_room(len(data), folder, max_bytes)
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
        # Data at orjson's nesting limit is one level deeper here.
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


def _open_with_room(size: int, folder: int, max_bytes: int) -> int:
    """Opens and locks the log, with room for `size` bytes."""
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
        # The log was rotated, here or by the other process: the lock is on the old file.
        os.close(fd)


def _inode(folder: int) -> int | None:
    try:
        return os.stat(NAME, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _rotate(folder: int) -> None:
    """Renames failed.jsonl to .1, .1 to .2 and so on up to the first free number, or over the oldest file."""
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
        # The lines stay in Redis and are written again: remove the part that was written.
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise


class AppendOnlySync:
    """Syncs the embedded server's append-only files once a second while they grow. `directory`: the server's data.

    The server writes them before it replies and never syncs. With `everysec` and a slow disk it would hold back writes
    for up to two seconds but reply at once, so a kill would lose acknowledged jobs. This way a killed server loses
    nothing, and a power failure loses about the last second.

    Runs in a thread: a sync may block for as long as the disk takes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._synced: dict[str, tuple[int, int]] = {}
        self._logged_at = -LOG_SECONDS

    def start(self) -> None:
        threading.Thread(target=self._run, name="append-only-sync", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(SYNC_SECONDS)
            self.sync()

    def sync(self) -> list[str]:
        """Syncs the files that have changed and returns their names."""
        synced = []
        for path in sorted(self._directory.glob("**/*.incr.aof")):
            try:
                if self._sync_one(path):
                    synced.append(path.name)
            except FileNotFoundError:
                continue  # the server has replaced it
            except OSError as exc:
                self._log_failure(path, exc)
        return synced

    def _sync_one(self, path: Path) -> bool:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            about = os.fstat(fd)
            seen = (about.st_ino, about.st_size)
            if self._synced.get(path.name) == seen:
                return False
            os.fdatasync(fd)
        finally:
            os.close(fd)
        # Later writes make the file larger than this; the next call syncs them.
        self._synced[path.name] = seen
        return True

    def _log_failure(self, path: Path, exc: OSError) -> None:
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = time.monotonic()
            log.error("cannot sync the data of the embedded server to disk file=%s error=%s", path, exc)
