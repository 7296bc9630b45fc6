"""The map of a Redis Cluster: which node serves which slot, as the nodes themselves tell.

Every node may be asked. One that has lost sight of most others (cluster_state:fail) is not believed: its map is old.

Sends each call of a link to the node of a Redis Cluster that serves its key.

1. All keys of a queue are in one slot, so that a call, a script or a transaction about a queue concerns one node.
   There is one connection per node that was needed.
2. A call that was answered with MOVED was not carried out: it is sent again, to the node named, but not endlessly.
3. ASK and TRYAGAIN are not followed. They say that the keys of a slot are on their way from one node to another, one
   by one, and a script must see all of a queue or nothing of it: until they have arrived it is RedisUnavailable.
4. After any failure the map is asked for anew, by the next call.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from forq.errors import ForqError, RedisUnavailable
from forq.redis_url import Address

if TYPE_CHECKING:
    from forq.broker.link import Link
    from forq.broker.scripts import Script

# The question is put to one node after another: one that does not answer must not take the time of all.
ASK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SlotMap:
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


def fetch_slot_map(address: Address, known: Iterable[str], name: str) -> SlotMap:
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


def _ask(address: Address, url: str, name: str) -> SlotMap:
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


def _read(address: Address, ranges: list[list[Any]], asked: str) -> SlotMap:
    nodes = SlotMap([], [], [])
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


HOPS = 5
_T = TypeVar("_T")


class Moved(ForqError):
    """The node does not serve that slot: `host` does (or the same host, if empty). The call was not carried out."""

    def __init__(self, message: str, slot: int, host: str, port: int) -> None:
        super().__init__(message)
        self.slot = slot
        self.host = host
        self.port = port


class Cluster:
    """`open_link` makes the connection to one node from its URL."""

    def __init__(self, address: Address, name: str, open_link: Callable[[str], "Link"]) -> None:
        self._address = address
        self._name = name
        self._open_link = open_link
        self._links: dict[str, Link] = {}
        self._nodes: SlotMap | None = None
        # What MOVED has said since the map was made.
        self._moved: dict[int, str] = {}

    def call(self, args: tuple[Any, ...], at: str | None) -> Any:
        return self.follow(_key_of(args) if at is None else at, lambda link: link.call(*args))

    def call_batch(self, commands: tuple[tuple[Any, ...], ...]) -> list[Any]:
        """Sent again if all were sent to the wrong node. If only some were, the slot has moved meanwhile: whoever asks
        is told so, since what was carried out must not be repeated."""

        def send(link: "Link") -> list[Any]:
            answers = link.call_batch(*commands)
            if all(isinstance(answer, Moved) for answer in answers):
                raise answers[0]
            return [RedisUnavailable(str(answer)) if isinstance(answer, Moved) else answer for answer in answers]

        answers = self.follow(_key_of(commands[0]), send)
        if any(isinstance(answer, RedisUnavailable) for answer in answers):
            self._nodes = None
        return answers

    def pipeline(self, commands: list[tuple[Any, ...]], at: str | None) -> list[Any]:
        """Commands of several nodes are sent to one after the other; the answers are in the order of the commands."""
        if at is not None:
            return self.follow(at, lambda link: link.pipeline(commands))
        keys = [_key_of(command) for command in commands]
        return self._on_each(keys, lambda link, some: link.pipeline([commands[number] for number in some]))

    def run_each(self, script: "Script", bases: list[str]) -> list[Any]:
        return self._on_each(bases, lambda link, some: link.run_each(script, [bases[number] for number in some]))

    def follow(self, key: str, send: Callable[["Link"], _T]) -> _T:
        """What `send` returns for the link to the node that serves this key."""
        slot = slot_of(key)
        return self._hop(lambda: send(self._link(self._url_of(slot))))

    def link_to(self, key: str) -> "Link":
        """The link to the node that serves this key, as far as is known."""
        return self.follow(key, lambda link: link)

    def masters(self) -> list["Link"]:
        return [self._link(url) for url in self._map().masters()]

    def missed(self) -> int:
        return sum(link.missed() for link in self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _on_each(self, keys: list[str], send: Callable[["Link", list[int]], list[Any]]) -> list[Any]:
        """What reads may be repeated as a whole when a part of it was sent to the wrong node."""

        def once() -> list[Any]:
            numbers: dict[str, list[int]] = {}
            for number, key in enumerate(keys):
                numbers.setdefault(self._url_of(slot_of(key)), []).append(number)
            answers: dict[int, Any] = {}
            for url, some in numbers.items():
                answers.update(zip(some, send(self._link(url), some), strict=True))
            return [answers[number] for number in range(len(keys))]

        return self._hop(once)

    def _hop(self, send: Callable[[], _T]) -> _T:
        for _ in range(HOPS):
            try:
                return send()
            except Moved as moved:
                self._moved[moved.slot] = node_url(self._address, moved.host, moved.port, self._url_of(moved.slot))
            except RedisUnavailable:
                # Another node may have taken over.
                self._nodes = None
                raise
        self._nodes = None
        raise RedisUnavailable(f"no node of the cluster {self._address.shown} serves the slot: each names another")

    def _url_of(self, slot: int) -> str:
        url = self._map().url_of(slot) if slot not in self._moved else self._moved[slot]
        if url is None:
            raise RedisUnavailable(f"no node of the cluster {self._address.shown} serves slot {slot}")
        return url

    def _map(self) -> SlotMap:
        if self._nodes is None:
            try:
                self._nodes = fetch_slot_map(self._address, self._links, self._name)
            except OSError as exc:
                raise RedisUnavailable(f"cannot reach Redis at {self._address.shown}: {exc}") from exc
            self._moved = {}
            self._drop_strangers(self._nodes.masters())
        return self._nodes

    def _drop_strangers(self, masters: list[str]) -> None:
        for url in set(self._links) - set(masters):
            self._links.pop(url).close()

    def _link(self, url: str) -> "Link":
        if url not in self._links:
            self._links[url] = self._open_link(url)
        return self._links[url]


def _key_of(command: tuple[Any, ...]) -> str:
    """The first key; scripts come with the number of theirs before it."""
    key = command[3] if command[0] in ("EVAL", "FCALL") else command[1]
    return str(key)
