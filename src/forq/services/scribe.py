"""The failed log of a queue: logs/NAME/failed.jsonl in the state directory, one JSON object per line.

Two processes write it (the scribe; the clerk, when a queue is deleted), so each write is made under a lock on the file.
What append has returned from is on disk. A write that failed half way is taken back; one that a crash cut off is ended
by the next write, so that it spoils no other line.

The scribe: writes the failed log, one line per job that failed for good.

1. It drains a queue's outbox when it is told of new lines, when it begins to serve the queue, after it has lost its
   subscription, and every 30 s in case it was not told.
2. A batch is written and synced, then forgotten in Redis. Whatever happens in between, the lines are written again.
3. While a log cannot be written, or Redis cannot be reached, nothing is removed: it tries again, in growing pauses.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from forq import exits
from forq.broker.link import Link
from forq.broker.outbox import Outbox, OutboxSubscription, read_line
from forq.errors import Fenced, ForqError, RedisUnavailable, UnknownQueue
from forq.procs.backoff import Backoff
from forq.procs.context import Context
from forq.procs.liveness import DISK_SECONDS, expect_busy
from forq.procs.loop import service_loop
from forq.services.append_only_sync import AppendOnlySync
from forq.services.rpc import RpcServer

log = logging.getLogger("forq")

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


CALL_TIMEOUT_SECONDS = 3.0
LOOK_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0


def run_scribe(context: Context, leash: socket.socket) -> int:
    if context.redis_dir is not None:
        AppendOnlySync(context.redis_dir).start()
    return Scribe(context, leash).run()


class Scribe:
    def __init__(self, context: Context, leash: socket.socket) -> None:
        self._context = context
        link = Link(context.url, name="forq-scribe", timeout_seconds=CALL_TIMEOUT_SECONDS)
        self._outbox = Outbox(link, context.prefix, context.processor, context.expiry_ms)
        self._outbox_subscription = OutboxSubscription(context.url, context.prefix, "forq-scribe-bell")
        self._loop = service_loop()
        self._rpc = RpcServer(self._loop, leash, {"serve": self._serve})
        self._queues: list[str] = []
        # When each queue that has lines is to be drained, and when to look for such queues.
        self._due: dict[str, float] = {}
        self._look_at = 0.0
        self._disk: dict[str, Backoff] = {}
        self._redis = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        # Written but perhaps not forgotten: if only the reply was lost, they need not be written twice.
        self._written: dict[str, list[bytes]] = {}

    def run(self) -> int:
        self._loop.run(self._after_pass)
        return exits.STOPPED

    def _after_pass(self) -> float:
        self.tick(time.monotonic())
        return max(0.0, min([self._look_at, *self._due.values()]) - time.monotonic())

    def tick(self, now: float) -> None:
        """Everything that is due: connect, look for lines, write one batch of each queue."""
        try:
            looking = now >= self._look_at
            if looking:
                self._look(now)
            for queue in [queue for queue, at in self._due.items() if at <= now]:
                self._drain(queue, now)
            # A server that only refuses to write lets us look: the streak ends when the writing works too.
            if looking and self._redis.failures:
                log.info("failed logs can be drained again failures=%s", self._redis.failures)
                self._redis.reset()
        except RedisUnavailable as exc:
            self._redis_failed(exc, now)

    def _serve(self, params: dict[str, Any]) -> object:
        """Which queues this supervisor serves from now on."""
        for queue in set(self._queues) - set(params["queues"]):
            self._due.pop(queue, None)
            self._written.pop(queue, None)
            self._disk_works(queue)
        if set(params["queues"]) - set(self._queues) and not self._redis.failures:
            self._look_at = 0.0
        self._queues = list(params["queues"])
        return {}

    def _look(self, now: float) -> None:
        if not self._queues:
            self._look_at = now + LOOK_SECONDS
            return
        # First the subscription, then the look: what comes in between is seen by both.
        if not self._outbox_subscription.connected:
            self._outbox_subscription.connect()
            self._loop.add_reader(self._outbox_subscription.fileno(), self._listen)
        for queue in self._outbox.waiting(self._queues):
            self._due.setdefault(queue, now)
        self._look_at = now + LOOK_SECONDS

    def _listen(self) -> None:
        fd = self._outbox_subscription.fileno()
        try:
            for queue in self._outbox_subscription.receive_queues() & set(self._queues):
                self._due.setdefault(queue, self._look_at if self._redis.failures else 0.0)
        except RedisUnavailable:
            self._loop.remove_reader(fd)
            self._look_at = 0.0

    def _drain(self, queue: str, now: float) -> None:
        """One batch, so that other queues and the supervisor get their turn."""
        try:
            lines = self._outbox.collect(queue)
            if lines:
                self._write(queue, lines)
                self._outbox.forget(queue, lines)
            self._written.pop(queue, None)
        except RedisUnavailable:
            raise
        except (UnknownQueue, Fenced) as exc:
            # Deleted, or this processor was evicted: its lines are in other hands, and pulse tells the supervisor.
            log.info("lines for the failed log went elsewhere queue=%s reason=%s", queue, exc)
            del self._due[queue]
        except ForqError as exc:
            self._disk_failed(queue, exc, now)
        else:
            self._disk_works(queue)
            if not lines:
                del self._due[queue]

    def _write(self, queue: str, lines: list[bytes]) -> None:
        if self._written.get(queue) == lines:
            return
        directory = self._context.logs_dir / queue
        expect_busy(DISK_SECONDS)
        append_lines(directory, [read_line(queue, line) for line in lines], self._context.failed_log_max)
        self._written[queue] = lines

    def _disk_failed(self, queue: str, exc: ForqError, now: float) -> None:
        streak = self._disk.setdefault(queue, Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
        self._due[queue] = now + streak.fail()
        if streak.failures == 1:
            log.error("failed log cannot be written, its lines stay in Redis queue=%s error=%s", queue, exc)
        self._rpc.notify("failed_log", queue=queue, error=str(exc), failures=streak.failures)

    def _disk_works(self, queue: str) -> None:
        streak = self._disk.pop(queue, None)
        if streak is not None:
            log.info("failed log can be written again queue=%s failures=%s", queue, streak.failures)
            self._rpc.notify("failed_log", queue=queue, error=None, failures=streak.failures)

    def _redis_failed(self, exc: RedisUnavailable, now: float) -> None:
        """Which queues have lines is looked up again when Redis is back."""
        self._look_at = now + self._redis.fail()
        self._due = {queue: max(at, self._look_at) for queue, at in self._due.items()}
        if self._redis.failures == 1:
            log.warning("failed logs cannot be drained error=%s", exc)
