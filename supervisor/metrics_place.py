"""[metrics] of the config file: where the metrics are served, and opening that address."""

import grp
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forq.errors import ConfigError, ForqError
from forq.procs.unix_socket import listen
from forq.settings import METRICS, read_section
from forq.supervisor.embedded import check_socket_path

BACKLOG = 128


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
    given = read_section(METRICS, table, where, str(file.parent))
    if find_spec("prometheus_client") is None:
        raise ConfigError(f"{where} needs prometheus_client: pip install 'forq[metrics]'")
    listen = given["listen"]
    if "/" in listen:
        check_socket_path(Path(listen))
        return MetricsPlace(where, listen, "", 0, Path(listen), given["health_seconds"])
    host, _, port = listen.rpartition(":")
    return MetricsPlace(where, listen, host.strip("[]"), int(port), None, given["health_seconds"])
