"""The settings of the dashboard. Imported by the supervisor: nothing of the extra forq[web] is imported here."""

import ipaddress
from dataclasses import dataclass
from importlib.util import find_spec

from forq.errors import ConfigError

LOCALHOST = "localhost"
PACKAGES = ("starlette", "uvicorn", "jinja2")


def check_packages(where: str) -> None:
    """Raises ConfigError if the extra forq[web] is not installed."""
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise ConfigError(f"{where} needs {' and '.join(missing)}: pip install 'forq[web]'")


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """The section [web], or the arguments of `forq web`. The groups are those of the control socket."""

    listen: str
    read_only: bool = False
    users: str | None = None
    proxies: tuple[str, ...] = ()
    proxy_header: str = "X-Forwarded-User"
    proxy_actors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    control_group: str | None = None
    control_read_group: str | None = None

    @property
    def authenticates(self) -> bool:
        """Whether users are identified by a password or by a proxy."""
        return bool(self.users or self.proxies)

    @property
    def unix_socket(self) -> bool:
        return "/" in self.listen

    def check(self, where: str) -> None:
        """Raises ConfigError if these settings would let strangers in."""
        if not self.unix_socket and not self.authenticates and not is_loopback(self.listen.rpartition(":")[0]):
            raise ConfigError(
                f"{where}: listen = {self.listen!r} is not allowed without authentication: set `users` (a file written "
                "by `forq web-user FILE NAME`) or `proxies`, or listen on 127.0.0.1 or a Unix socket"
            )
        for proxy in self.proxies:
            check_proxy(proxy, where)


def is_loopback(host: str) -> bool:
    """A name counts as loopback only if it is localhost: others may change their address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == LOCALHOST


def check_proxy(proxy: str, where: str) -> None:
    if proxy == "unix":
        return
    try:
        ipaddress.ip_network(proxy)
    except ValueError as exc:
        raise ConfigError(
            f'{where}: proxies: {proxy!r} is not allowed: an address, a network such as "10.0.0.0/24", or "unix" '
            f"({exc})"
        ) from exc
