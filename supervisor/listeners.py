"""The sections [metrics] and [web] of the config file."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forq.errors import ConfigError
from forq.procs.listen_address import ListenAddress, read_listen
from forq.settings import METRICS, WEB, read_section
from forq.web.settings import WebSettings, check_packages


@dataclass(frozen=True)
class MetricsConfig(ListenAddress):
    health_seconds: float


@dataclass(frozen=True)
class WebConfig(ListenAddress):
    read_only: bool
    users: str | None
    proxies: tuple[str, ...]
    proxy_header: str
    proxy_actors: tuple[str, ...]
    hosts: tuple[str, ...]

    def settings(self, control_group: str | None, control_read_group: str | None) -> WebSettings:
        """For the process; with the groups of the control socket."""
        return WebSettings(
            listen=self.listen,
            read_only=self.read_only,
            users=self.users,
            proxies=self.proxies,
            proxy_header=self.proxy_header,
            proxy_actors=self.proxy_actors,
            hosts=self.hosts,
            control_group=control_group,
            control_read_group=control_read_group,
        )


def read_metrics(table: object, file: Path) -> MetricsConfig:
    where = f"{file}: [metrics]"
    given = read_section(METRICS, table, where, str(file.parent))
    if find_spec("prometheus_client") is None:
        raise ConfigError(f"{where} needs prometheus_client: pip install 'forq[metrics]'")
    return MetricsConfig(where, *read_listen(given.pop("listen")), **given)


def read_web(table: object, file: Path) -> WebConfig:
    where = f"{file}: [web]"
    given = read_section(WEB, table, where, str(file.parent))
    check_packages(where)
    config = WebConfig(where, *read_listen(given.pop("listen")), **given)
    config.settings(None, None).check(where)
    return config
