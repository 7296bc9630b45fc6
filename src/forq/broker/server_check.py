"""Whether a Redis server can be trusted with jobs: new enough, and never evicting keys. Of a cluster, each master."""

from forq.broker.link import Link
from forq.errors import ForqError, IncompatibleServer

# Scripts are functions (FUNCTION LOAD), and have flags: these versions brought both.
OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (7, 2)


def check_server(link: Link) -> str:
    """The server's name and version (those of a cluster's masters); IncompatibleServer says why it cannot be used."""
    found = [_check(master) for master in link.masters()]
    return ", ".join(sorted(set(found))) + (f", a cluster of {len(found)} masters" if len(found) > 1 else "")


def _check(link: Link) -> str:
    info = _info(link, "server")
    valkey = info.get("valkey_version")
    name, version = ("Valkey", valkey) if valkey else ("Redis", info.get("redis_version", "0"))
    oldest = OLDEST_VALKEY if valkey else OLDEST_REDIS
    if _numbers(version) < oldest:
        wanted = ".".join(map(str, oldest))
        raise IncompatibleServer(
            f"{name} {version} at {link.shown_url} is too old: forq needs {name} {wanted} or newer"
        )
    policy = _info(link, "memory").get("maxmemory_policy", "noeviction")
    limit = _info(link, "memory").get("maxmemory", "0")
    if policy != "noeviction" and limit != "0":
        raise IncompatibleServer(
            f"the server at {link.shown_url} may evict jobs: maxmemory-policy is {policy}, forq needs noeviction"
        )
    return f"{name} {version}"


def _info(link: Link, section: str) -> dict[str, str]:
    text = link.call("INFO", section)
    if isinstance(text, dict):
        return {str(key): str(value) for key, value in text.items()}
    lines = text.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _numbers(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError as exc:
        raise ForqError(f"the server's version {version!r} cannot be read") from exc
