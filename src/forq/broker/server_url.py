"""What the URL of one Redis server says: redis://, rediss:// (TLS) or unix://, with the parameters that redis-py knows.

redis-py reads such URLs too. To import it for that would more than double the memory of the supervisor, which every
fork has to map, and the start of everything that uses a Client.
"""

from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from forq.errors import UsageError
from forq.redis_address import ALLOWED, CLUSTER, SERVER, read_address

DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """`path` is that of a Unix socket; if it is None, host and port count. `tls`: its ssl_ parameters, or None."""

    path: str | None
    host: str
    port: int
    db: int
    username: str | None
    password: str | None
    tls: dict[str, str] | None


@cache
def read_server_url(url: str) -> ServerAddress:
    """Raises UsageError, which does not repeat the URL: there may be a password in it."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix") or "://" not in url:
            raise UsageError(f"the URL of Redis begins with {parts.scheme or 'no scheme'!r}; allowed: {ALLOWED}")
        return _address(parts, {name: values[0] for name, values in parse_qs(parts.query).items()})
    except ValueError as exc:
        raise UsageError(f"the URL of Redis is not right: {exc}; allowed: {ALLOWED}") from None


def database_of(url: str) -> int:
    """The number of the database that a URL of any kind names; a cluster has one only."""
    address = read_address(url)
    if address.kind == CLUSTER:
        return 0
    return read_server_url(url if address.kind == SERVER else address.server_url(*address.hosts[0])).db


def _address(parts: SplitResult, given: dict[str, str]) -> ServerAddress:
    path = unquote(parts.path)
    local = parts.scheme == "unix"
    return ServerAddress(
        path=given.get("path", path) if local else None,
        host=given.get("host") or unquote(parts.hostname or "localhost"),
        port=int(given.get("port") or parts.port or DEFAULT_PORT),
        db=_db(given.get("db", "0" if local else path.strip("/") or "0")),
        username=unquote(parts.username) if parts.username else given.get("username"),
        password=unquote(parts.password) if parts.password else given.get("password"),
        tls={name: value for name, value in given.items() if name.startswith("ssl_")}
        if parts.scheme == "rediss"
        else None,
    )


def _db(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"the number of its database is {text!r}")
    return int(text)
