"""Where a web server listens: HOST:PORT, or the path of a Unix socket."""

import grp
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forq.errors import ConfigError, ForqError
from forq.procs.unix_socket import check_path, listen

BACKLOG = 128


@dataclass(frozen=True)
class ListenAddress:
    """A Unix socket (`path`), or host and port. `where` is the place for errors, `listen` the text of the setting."""

    where: str
    listen: str
    host: str
    port: int
    path: Path | None

    def open(self, group: str | None) -> socket.socket:
        """The listening socket. Raises ConfigError if it cannot listen."""
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
        except ForqError as exc:
            raise ConfigError(f"{self.where}: {exc}") from exc
        except (OSError, KeyError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            raise ConfigError(f"{self.where}: cannot listen at {self.listen}: {reason}") from exc

    def close(self, listener: socket.socket) -> None:
        listener.close()
        if self.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.path)


def read_listen(listen: str) -> tuple[str, str, int, Path | None]:
    """The text, the host, the port, and the path of a Unix socket."""
    if "/" in listen:
        check_path(listen)
        return listen, "", 0, Path(listen)
    host, _, port = listen.rpartition(":")
    return listen, host.strip("[]"), int(port), None
