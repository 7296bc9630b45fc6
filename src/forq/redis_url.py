"""Parses Redis URLs: one server, a cluster, or a master found through sentinels."""

import re
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from forq.errors import UsageError

ALLOWED = (
    "redis://[USER:PASSWORD@]HOST[:PORT][/DB] or rediss://... (TLS), unix:///PATH[?db=DB], "
    "redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...] or rediss+cluster://..., "
    "redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DB] or rediss+sentinel://..."
)
SERVER, CLUSTER, SENTINEL = "server", "cluster", "sentinel"
_KIND_BY_SUFFIX = {"": SERVER, "cluster": CLUSTER, "sentinel": SENTINEL}
_PORTS = {SERVER: 6379, CLUSTER: 6379, SENTINEL: 26379}
# The parameters of redis-py that a URL may set. forq itself sets timeouts, retries and the protocol.
_OPTIONS = ("db", "username", "password")
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_min_version",
    "ssl_ciphers",
)
# The numbers of TLS 1.2 and 1.3.
_ALLOWED_VALUES = {"ssl_cert_reqs": ("none", "optional", "required"), "ssl_min_version": ("771", "772")}
# Credentials for the sentinels, which may differ from those of the servers.
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Address:
    """`hosts`: the server, or the cluster nodes or sentinels to start from; empty for a unix socket."""

    url: str
    kind: str
    hosts: tuple[Host, ...]
    master: str
    db: int
    _parts: SplitResult
    _path: str

    @property
    def shown(self) -> str:
        """Without user and password, for errors and logs."""
        return shown_url(self.url)

    def server_url(self, host: str, port: int) -> str:
        """The URL of one server, with the user, database and options of this address."""
        options = [(name, value) for name, value in parse_qsl(self._parts.query) if name not in _SENTINEL_OPTIONS]
        user, at, _ = self._parts.netloc.rpartition("@")
        return self._url(user + at, (host, port), self._path, options)

    def sentinel_url(self, host: str, port: int) -> str:
        given = parse_qsl(self._parts.query)
        options = [(name, value) for name, value in given if name not in ("username", "password", *_SENTINEL_OPTIONS)]
        options += [(_SENTINEL_OPTIONS[name], value) for name, value in given if name in _SENTINEL_OPTIONS]
        return self._url("", (host, port), "", options)

    def _url(self, user: str, host: Host, path: str, options: list[tuple[str, str]]) -> str:
        scheme = self._parts.scheme.partition("+")[0]
        shown_host = f"[{host[0]}]" if ":" in host[0] else host[0]
        return urlunsplit((scheme, f"{user}{shown_host}:{host[1]}", path, urlencode(options), ""))


@cache
def read_address(url: str) -> Address:
    """UsageError, with the allowed forms, if the URL is invalid."""
    try:
        return _read(url)
    except ValueError as exc:
        # Messages of the standard library may quote a password.
        why = f"{exc}; " if isinstance(exc, _InvalidUrl) else ""
        raise UsageError(f"Redis URL {shown_url(url)!r} is not allowed: {why}allowed: {ALLOWED}") from None


class _InvalidUrl(ValueError):
    """Its message contains no secrets."""


def shown_url(url: str) -> str:
    """A Redis URL with user and password replaced by ***, for logs and errors."""
    return re.sub(r"(username|password)=[^&]*", r"\1=***", re.sub(r"://.*@", "://***@", url))


def _split(url: str) -> SplitResult:
    """Like urlsplit, which in newer Pythons refuses IPv6 brackets inside a list of hosts."""
    scheme, mark, rest = url.partition("://")
    end = next((at for at, sign in enumerate(rest) if sign in "/?#"), len(rest))
    return urlsplit(f"{scheme}{mark}{rest[end:]}")._replace(netloc=rest[:end])


def _read(url: str) -> Address:
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    scheme, _, suffix = parts.scheme.partition("+")
    if parts.scheme == "unix":
        if not url.startswith("unix://") or parts.hostname or len(parts.path) < 2:
            raise _InvalidUrl("a unix socket needs an absolute path")
        _check_options(options, SERVER, tls=False)
        return Address(url, SERVER, (), "", _db(options.get("db", "")), parts, parts.path)
    if scheme not in ("redis", "rediss") or suffix not in _KIND_BY_SUFFIX:
        raise _InvalidUrl("unknown scheme")
    kind = _KIND_BY_SUFFIX[suffix]
    hosts = tuple(_host(text, _PORTS[kind]) for text in parts.netloc.rpartition("@")[2].split(","))
    if kind == SERVER and len(hosts) > 1:
        raise _InvalidUrl("a single server has only one host")
    path = unquote(parts.path).strip("/")
    master, _, in_path = path.partition("/") if kind == SENTINEL else ("", "", path)
    if kind == SENTINEL and not master:
        raise _InvalidUrl("the name of the master is missing")
    _check_options(options, kind, tls=scheme == "rediss")
    db = _db(options.get("db") or in_path)
    if kind == CLUSTER and db:
        raise _InvalidUrl("a cluster has no databases")
    return Address(url, kind, hosts, master, db, parts, f"/{in_path}" if in_path else "")


def _host(text: str, default_port: int) -> Host:
    # Reading the port checks it.
    parts = urlsplit(f"//{text}")
    host, port = parts.hostname, parts.port
    if not host or parts.username is not None or port == 0:
        raise _InvalidUrl("a host or port is invalid")
    return host, default_port if port is None else port


def _check_options(options: dict[str, str], kind: str, *, tls: bool) -> None:
    """redis-py would pass on unknown options, and accept timeouts and retries, which forq sets itself."""
    allowed = (*_OPTIONS, *(_SENTINEL_OPTIONS if kind == SENTINEL else ()), *(_TLS_OPTIONS if tls else ()))
    for name in options:
        if name not in allowed:
            why = "needs TLS (rediss://...)" if name in _TLS_OPTIONS else "is unknown"
            raise _InvalidUrl(f"option {name!r} {why}; allowed options: {', '.join(allowed)}")
        if name in _ALLOWED_VALUES and options[name] not in _ALLOWED_VALUES[name]:
            raise _InvalidUrl(f"{name} = {options[name]!r}; allowed: {', '.join(_ALLOWED_VALUES[name])}")


def _db(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise _InvalidUrl(f"database {text!r} is not a number")
    return int(text or 0)


def database_of(url: str) -> int:
    """The database number of a URL; always 0 for a cluster."""
    return read_address(url).db
