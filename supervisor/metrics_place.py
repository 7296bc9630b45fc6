"""[metrics] of the config file: where the metrics are served, and opening that address."""

import grp
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forq.errors import ConfigError, ForqError, UsageError
from forq.names import shown
from forq.options import Option, nearest
from forq.procs.unix_socket import listen
from forq.supervisor.embedded import check_socket_path

DEFAULT_LISTEN = "127.0.0.1:9464"
BACKLOG = 128
_HEALTH = Option("health_seconds", "duration", 60.0, 0.1, 86400.0, "how long a queue with waiting jobs may stand still")
_SETTINGS = ("listen", "health_seconds")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9_.-]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class MetricsPlace:
    """`path`: a Unix socket; else host and port. `where`: for errors."""

    where: str
    listen: str
    host: str
    port: int
    path: Path | None
    health_seconds: float

    def open(self, group: str | None) -> socket.socket:
        """The listening socket. Raises ConfigError with the address and the reason."""
        try:
            if self.path is not None:
                return listen(str(self.path), None if group is None else grp.getgrnam(group).gr_gid)
            family, kind, proto, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, proto)
            try:
                listener.setblocking(False)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
            except OSError:
                listener.close()
                raise
            return listener
        except (OSError, KeyError, ForqError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            raise ConfigError(f"{self.where}: cannot listen at {self.listen}: {reason}") from exc

    def close(self, listener: socket.socket) -> None:
        listener.close()
        if self.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.path)


def read_metrics(table: object, file: Path) -> MetricsPlace:
    where = f"{file}: [metrics]"
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: metrics = {shown(table)} is not allowed: a table with listen and health_seconds")
    for name in table:
        if name not in _SETTINGS:
            raise ConfigError(f"{where}: there is no setting {shown(name)}{nearest(name, _SETTINGS)}")
    if find_spec("prometheus_client") is None:
        raise ConfigError(f"{where} needs prometheus_client: pip install 'forq[metrics]'")
    given = table.get("listen", DEFAULT_LISTEN)
    host, port, path = _read_listen(given, where, file.parent)
    try:
        health = float(_HEALTH.parse(table.get("health_seconds", _HEALTH.default), where))
    except UsageError as exc:
        raise ConfigError(str(exc)) from exc
    return MetricsPlace(where, str(path or given), host, port, path, health)


def _read_listen(given: object, where: str, base: Path) -> tuple[str, int, Path | None]:
    refused = ConfigError(
        f'{where}: listen = {shown(given)} is not allowed: "HOST:PORT" with a port from 1 to 65535, or the path of a '
        "Unix socket, with a slash in it"
    )
    if not isinstance(given, str) or "\0" in given or "://" in given:
        raise refused
    if "/" in given:
        path = Path(os.path.abspath(base / given))
        check_socket_path(path)
        return "", 0, path
    found = _ADDRESS.fullmatch(given)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise refused
    return found["v6"] or found["host"], int(found["port"]), None
