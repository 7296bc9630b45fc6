"""The map of a Redis Cluster: which node serves which slot, as the nodes themselves tell.

Every node may be asked. One that has lost sight of most others (cluster_state:fail) is not believed: its map is old.
"""

import random
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forq.redis_address import Address

# The question is put to one node after another: one that does not answer must not take the time of all.
ASK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranges of slots in order, and the URL of the master that serves each."""

    starts: list[int]
    ends: list[int]
    urls: list[str]

    def url_of(self, slot: int) -> str | None:
        at = bisect_right(self.starts, slot) - 1
        return self.urls[at] if at >= 0 and slot <= self.ends[at] else None

    def masters(self) -> list[str]:
        return list(dict.fromkeys(self.urls))


def slot_of(key: str) -> int:
    """Which of the 16,384 slots a key is in: all keys with the same {tag} are in one."""
    from redis.crc import key_slot

    return key_slot(key.encode())


def ask_nodes(address: Address, known: Iterable[str], name: str) -> Nodes:
    """The map, from the first that has one: of those known before and those in the URL. OSError if none has."""
    found: list[str] = []
    urls = list(dict.fromkeys([*known, *(address.server_url(*host) for host in address.hosts)]))
    # Not the same first one each time, nor for everybody.
    for url in random.sample(urls, len(urls)):
        try:
            return _ask(address, url, name)
        except OSError as exc:
            found.append(f"{_place(url)}: {exc or type(exc).__name__}")
    raise ConnectionError(f"no node of the cluster says where to go ({'; '.join(found)})")


def _ask(address: Address, url: str, name: str) -> Nodes:
    from forq.broker.connection import Connection

    connection = Connection(url, name=name, connect_timeout_seconds=ASK_SECONDS, timeout_seconds=ASK_SECONDS)
    try:
        connection.send_many([("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
        info, ranges = connection.receive(), connection.receive()
    finally:
        connection.close()
    for answer in (info, ranges):
        if isinstance(answer, Exception):
            raise ConnectionError(str(answer))
    if b"cluster_state:ok" not in info:
        raise ConnectionError("it is not in touch with the cluster (cluster_state:fail)")
    return _read(address, ranges, url)


def _read(address: Address, ranges: list[list[Any]], asked: str) -> Nodes:
    nodes = Nodes([], [], [])
    for start, end, master, *_ in sorted(ranges, key=lambda found: int(found[0])):
        nodes.starts.append(start)
        nodes.ends.append(end)
        nodes.urls.append(node_url(address, (master[0] or b"").decode(), int(master[1]), asked))
    return nodes


def node_url(address: Address, host: str, port: int, asked: str) -> str:
    """A node that does not know its own name is reached by the one it was asked under."""
    return address.server_url(host if host not in ("", "?") else _host(asked), port)


def _host(url: str) -> str:
    return _place(url).rpartition(":")[0].strip("[]")


def _place(url: str) -> str:
    """HOST:PORT of the URL of one server."""
    return url.partition("://")[2].rpartition("@")[2].partition("/")[0].partition("?")[0]
