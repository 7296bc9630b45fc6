"""What a Redis URL may look like and what it stands for: one server, a cluster, or a master that sentinels know."""

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
# What of redis-py's own parameters may stand in a URL; timeouts, retries and the protocol are forq's.
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
# What only the sentinels are told: they may have other passwords than the servers that they watch.
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Address:
    """`hosts`: the server; or nodes of the cluster, or sentinels, that are asked where to go. None of a unix socket."""

    url: str
    kind: str
    hosts: tuple[Host, ...]
    master: str
    db: int
    _parts: SplitResult
    _path: str

    @property
    def shown(self) -> str:
        """For errors and logs: without user and password."""
        return shown_url(self.url)

    def server_url(self, host: str, port: int) -> str:
        """That of one server, with the user, database and options of this address."""
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
    """UsageError says what is allowed."""
    try:
        return _read(url)
    except ValueError as exc:
        # What the standard library says may quote a password.
        why = f"{exc}; " if isinstance(exc, _InvalidUrl) else ""
        raise UsageError(f"Redis URL {shown_url(url)!r} is not allowed: {why}it may be {ALLOWED}") from None


class _InvalidUrl(ValueError):
    """Says what is wrong with a URL, without anything that may be secret."""


def shown_url(url: str) -> str:
    """A Redis URL for logs and errors: without user and password, wherever in it they stand."""
    return re.sub(r"(username|password)=[^&]*", r"\1=***", re.sub(r"://.*@", "://***@", url))


def _split(url: str) -> SplitResult:
    """urlsplit, which in newer releases of Python refuses brackets of IPv6 behind anything else: in a list of hosts."""
    scheme, mark, rest = url.partition("://")
    end = next((at for at, sign in enumerate(rest) if sign in "/?#"), len(rest))
    return urlsplit(f"{scheme}{mark}{rest[end:]}")._replace(netloc=rest[:end])


def _read(url: str) -> Address:
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    secure, _, what = parts.scheme.partition("+")
    if parts.scheme == "unix":
        if not url.startswith("unix://") or parts.hostname or len(parts.path) < 2:
            raise _InvalidUrl("a unix socket is given by its absolute path")
        _check_options(options, SERVER, tls=False)
        return Address(url, SERVER, (), "", _db(options.get("db", "")), parts, parts.path)
    if secure not in ("redis", "rediss") or what not in _KIND_BY_SUFFIX:
        raise _InvalidUrl("its scheme is unknown")
    kind = _KIND_BY_SUFFIX[what]
    hosts = tuple(_host(text, _PORTS[kind]) for text in parts.netloc.rpartition("@")[2].split(","))
    if kind == SERVER and len(hosts) > 1:
        raise _InvalidUrl("of one server there is one host")
    path = unquote(parts.path).strip("/")
    master, _, in_path = path.partition("/") if kind == SENTINEL else ("", "", path)
    if kind == SENTINEL and not master:
        raise _InvalidUrl("the name of the master is missing")
    _check_options(options, kind, tls=secure == "rediss")
    db = _db(options.get("db") or in_path)
    if kind == CLUSTER and db:
        raise _InvalidUrl("a cluster has no databases")
    return Address(url, kind, hosts, master, db, parts, f"/{in_path}" if in_path else "")


def _host(text: str, default_port: int) -> Host:
    # Reading the port checks it.
    parts = urlsplit(f"//{text}")
    host, port = parts.hostname, parts.port
    if not host or parts.username is not None or port == 0:
        raise _InvalidUrl("a host, or its port, cannot be read")
    return host, default_port if port is None else port


def _check_options(options: dict[str, str], kind: str, *, tls: bool) -> None:
    """redis-py passes on what it does not know, and takes timeouts and retries, which forq sets itself."""
    allowed = (*_OPTIONS, *(_SENTINEL_OPTIONS if kind == SENTINEL else ()), *(_TLS_OPTIONS if tls else ()))
    for name in options:
        if name not in allowed:
            why = "is for TLS (rediss://...)" if name in _TLS_OPTIONS else "is unknown"
            raise _InvalidUrl(f"the option {name!r} {why}, the options of this URL are {', '.join(allowed)}")
        if name in _ALLOWED_VALUES and options[name] not in _ALLOWED_VALUES[name]:
            raise _InvalidUrl(f"{name} is {options[name]!r}, and may be {', '.join(_ALLOWED_VALUES[name])}")


def _db(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise _InvalidUrl(f"the database {text!r} is no number")
    return int(text or 0)


def database_of(url: str) -> int:
    """The number of the database that a URL of any kind names; a cluster has one only."""
    return read_address(url).db
