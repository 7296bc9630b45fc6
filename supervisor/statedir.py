"""The state directory: files that a supervisor keeps for the next run, and the locks that prevent sharing.

1. `supervisor.lock` is held by the supervisor alone: one supervisor per directory.
2. `tree.lock` is held by every process of its tree. A flock belongs to the open file, which forks share, so it is free
   exactly when the last of them is gone. Only then may the next run recover their jobs.
3. `processor` contains the name of the current run and where it runs: the locks of a copied directory prove nothing.
4. `queues/NAME.json` are the queues created at run time. Files are replaced atomically and synced, so that a crash
   leaves the old or the new content.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forq.errors import ConfigError, ForqError
from forq.procs.orphans import TreeMark
from forq.procs.ownership import refuse_changeable
from forq.procs.treekill import kill_tree, read_stat, self_and_ancestors
from forq.values import check_queue_name

POLL_SECONDS = 0.005
SECRET_BYTES = 16
MACHINE_ID = Path("/etc/machine-id")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class PreviousRun:
    """The last run on this directory. `doubt`: why the locks do not prove that it has ended, or ""."""

    name: str
    doubt: str


class StateDir:
    def __init__(self, path: Path, *, strict_modes: bool = True) -> None:
        """Creates the directory (0700) if needed. `strict_modes`: refuses it if another user could change it."""
        self.path = Path(os.path.abspath(path))
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"state directory {self.path}: not a directory") from None
        except OSError as exc:
            raise ConfigError(f"state directory {self.path}: {exc.strerror}") from exc
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"state directory {self.path}: not writable for user {os.geteuid()}")
        self._strict_modes = strict_modes
        if strict_modes:
            refuse_changeable(self.path, "state directory")
        self._supervisor_fd: int | None = None
        self._tree_fd: int | None = None
        self._tree_mark: TreeMark | None = None

    @property
    def redis_socket(self) -> Path:
        return self.path / "redis.sock"

    @property
    def redis_dir(self) -> Path:
        return self.path / "redis"

    @property
    def tree_lock_fd(self) -> int:
        """Inherited by every child."""
        if self._tree_fd is None:
            raise ForqError(f"state directory {self.path} is not locked")
        return self._tree_fd

    @property
    def tree_mark(self) -> TreeMark:
        """The mark of all descendants of queues' processes."""
        if self._tree_mark is None:
            raise ForqError(f"state directory {self.path} is not locked")
        return self._tree_mark

    def lock(self, wait_seconds: float = 10.0, on_wait: Callable[[list[int]], None] | None = None) -> None:
        """Makes this process the directory's supervisor; kills remaining processes of an earlier run first.

        `on_wait` is called with their pids.
        """
        deadline = time.monotonic() + wait_seconds
        self._supervisor_fd = self._lock_supervisor(deadline)
        try:
            self._tree_fd = self._lock_tree(deadline, on_wait)
            self._tree_mark = self._read_tree_mark(self._tree_fd)
            self._kill_marked(self._tree_mark, deadline, on_wait)
        except BaseException:
            self.unlock()
            raise

    def unlock(self) -> None:
        """Releases both locks; children that still run keep tree.lock."""
        for fd in (self._supervisor_fd, self._tree_fd):
            if fd is not None:
                os.close(fd)
        self._supervisor_fd = self._tree_fd = None

    def take_processor(self) -> tuple[str, PreviousRun | None]:
        """A new name for this run, and the previous run, if any."""
        path = self.path / "processor"
        try:
            name, *recorded = _read(path).decode("ascii", "replace").split() or [""]
        except FileNotFoundError:
            name, recorded = "", []
        doubt = _doubt(recorded, _lock_identity(self.tree_lock_fd))
        own = new_processor_name()
        self.save_processor(own)
        return own, PreviousRun(name, doubt) if name else None

    def save_processor(self, name: str) -> None:
        """Raises ForqError if it cannot be written."""
        path = self.path / "processor"
        with _writing(path):
            _replace(path, f"{name} {' '.join(_lock_identity(self.tree_lock_fd))}\n".encode())

    def save_queue(self, name: str, definition: dict[str, Any]) -> None:
        """Raises ForqError if it cannot be written."""
        path = self._queue_file(name)
        with _writing(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _replace(path, json.dumps(definition, indent=2, sort_keys=True).encode() + b"\n")

    def make_redis_dir(self) -> None:
        """Raises ForqError if it cannot be created."""
        with _writing(self.redis_dir):
            self.redis_dir.mkdir(mode=0o700, exist_ok=True)

    def drop_queue(self, name: str) -> None:
        """Idempotent. Raises ForqError if it cannot be removed."""
        path = self._queue_file(name)
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                _sync_directory(path.parent)
        except OSError as exc:
            raise ForqError(f"queue definition {path} cannot be removed: {exc.strerror}") from exc

    def load_queues(self) -> dict[str, dict[str, Any]]:
        if self._strict_modes:
            for path in (self.path / "queues", *self._queue_files()):
                if path.exists():
                    refuse_changeable(path, "queue definition")
        return {path.name.removesuffix(".json"): _load_queue(path) for path in self._queue_files()}

    def load_queue(self, name: str) -> dict[str, Any] | None:
        """The definition of one queue; None if there is none."""
        path = self._queue_file(name)
        if not path.exists():
            return None
        if self._strict_modes:
            refuse_changeable(path, "queue definition")
        return _load_queue(path)

    def _queue_file(self, name: str) -> Path:
        return self.path / "queues" / f"{check_queue_name(name)}.json"

    def _queue_files(self) -> list[Path]:
        directory = self.path / "queues"
        if not directory.is_dir():
            return []
        return sorted(path for path in directory.iterdir() if path.name.endswith(".json"))

    def _lock_supervisor(self, deadline: float) -> int:
        path = self.path / "supervisor.lock"
        fd = _open_lock(path)
        while not _try_lock(fd):
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            # A child forked right before its supervisor was killed holds the lock a moment longer.
            if _is_running(holder) or time.monotonic() >= deadline:
                os.close(fd)
                raise ForqError(f"another supervisor (pid {holder or '?'}) runs on state directory {self.path}")
            time.sleep(POLL_SECONDS)
        try:
            with _writing(path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except ForqError:
            os.close(fd)
            raise
        return fd

    def _read_tree_mark(self, tree_fd: int) -> TreeMark:
        path = self.path / "tree.secret"
        try:
            secret = _read(path)
        except FileNotFoundError:
            secret = b""
        if len(secret) < SECRET_BYTES:
            secret = os.urandom(SECRET_BYTES).hex().encode()
            with _writing(path):
                _replace(path, secret)
        lock = os.fstat(tree_fd)
        return TreeMark(secret, f"{lock.st_dev}:{lock.st_ino}")

    def _kill_marked(self, mark: TreeMark, deadline: float, on_wait: Callable[[list[int]], None] | None) -> None:
        """Kills descendants that closed the lock's descriptor, as exec'd programs do, and outlived the others."""
        found = mark.find()
        if found and on_wait:
            on_wait(found)
        left = mark.kill(mark.find, max(0.05, deadline - time.monotonic()))[1] if found else set()
        # Makes later searches consider new processes only.
        mark.find_escaped()
        if left:
            pids = " ".join(map(str, sorted(left)))
            raise ForqError(
                f"cannot kill processes started by handlers of an earlier run on {self.path}: pids {pids}; "
                f"as root: kill -9 {pids}"
            )

    def _lock_tree(self, deadline: float, on_wait: Callable[[list[int]], None] | None) -> int:
        path = self.path / "tree.lock"
        fd = _open_lock(path)
        reported: list[int] = []
        while not _try_lock(fd):
            holders = holders_of_lock(path)
            if time.monotonic() >= deadline:
                os.close(fd)
                who = f"pids {holders}" if holders else f"not visible to this user; as root: fuser -k -9 {path}"
                raise ForqError(f"processes of the previous supervisor on {self.path} still run: {who}")
            if on_wait and holders and holders != reported:
                on_wait(holders)
                reported = holders
            for pid in holders:
                kill_tree(pid, deadline_seconds=max(0.05, deadline - time.monotonic()))
            time.sleep(POLL_SECONDS)
        return fd


def new_processor_name() -> str:
    return uuid.uuid4().hex


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns OSError into ForqError; if the disk is full, adds where to free space."""
    try:
        yield
    except OSError as exc:
        raise ForqError(f"{path} cannot be written: {exc.strerror}{_where_to_make_room(path, exc)}") from exc


def _where_to_make_room(path: Path, exc: OSError) -> str:
    if exc.errno == errno.ENOSPC:
        return f"; the file system is full: free some space (df -h {path.parent}; df -i {path.parent})"
    return "; the disk quota of this user is exhausted: free some space (quota -s)" if exc.errno == errno.EDQUOT else ""


def _lock_identity(lock_fd: int) -> list[str]:
    """Machine, boot id and file of a lock; "-" if unknown. A lock is visible only where all three are the same."""
    # Hashed: a machine id is confidential.
    machine = hashlib.sha256(b"forq " + machine_id).hexdigest()[:16] if (machine_id := _line(MACHINE_ID)) else "-"
    boot = _line(BOOT_ID).decode("ascii", "replace") or "-"
    lock = os.fstat(lock_fd)
    return [machine, boot, f"{lock.st_dev}:{lock.st_ino}"]


def _doubt(recorded: list[str], here: list[str]) -> str:
    if len(recorded) != len(here):
        return "an earlier release did not record where it ran"
    if recorded[0] != here[0]:
        return "the directory was used on another machine: it was moved or copied"
    if recorded[1] != here[1] or here[1] == "-":
        return "the machine was rebooted since, or is a copy"
    return "" if recorded[2] == here[2] else "the directory is a copy, or its file system was mounted again"


def _line(path: Path) -> bytes:
    try:
        return _read(path).strip()
    except OSError:
        return b""


def holders_of_lock(path: Path) -> list[int]:
    """Processes other than the caller and its ancestors that hold a flock on the file."""
    target = os.stat(path)
    ours = self_and_ancestors()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid not in ours and _holds_lock(pid, os.path.realpath(path), target)]


def _holds_lock(pid: int, real_path: str, target: os.stat_result) -> bool:
    """An open file is not enough: a process may only read it."""
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{fd}"
            if os.readlink(link) != real_path or not os.path.samestat(os.stat(link), target):
                continue
            if "FLOCK" in Path(f"/proc/{pid}/fdinfo/{fd}").read_text():
                return True
    except OSError:
        # It has ended, or belongs to another user and so is not part of our tree.
        return False
    return False


def _is_running(pid: str) -> bool:
    process = read_stat(int(pid)) if pid.isdigit() else None
    return process is not None and process.alive


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | SAFE_FLAGS, 0o600)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ForqError(f"lock {path}: {exc.strerror}{_where_to_make_room(path, exc)}") from exc
        reason = "is a symbolic link" if exc.errno == errno.ELOOP else exc.strerror
        raise ConfigError(f"lock {path}: {reason}") from exc


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load_queue(path: Path) -> dict[str, Any]:
    try:
        check_queue_name(path.name.removesuffix(".json"))
        definition = json.loads(_read(path))
    except (OSError, ValueError, ForqError) as exc:
        raise ConfigError(f"queue definition {path} cannot be read: {exc}") from exc
    if not isinstance(definition, dict):
        raise ConfigError(f"queue definition {path} is not a JSON object")
    return definition


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | SAFE_FLAGS), "rb") as file:
        return file.read()


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | SAFE_FLAGS, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
