"""Redis Cluster: fetches the slot map and sends each call to the node that serves its key.

1. All keys of a queue are in one slot, so a call, script or transaction about a queue concerns one node. There is one
   connection per node in use.
2. The slot map comes from any node except one that has lost contact with the cluster (cluster_state:fail).
3. A call that was answered with MOVED was not carried out. It is sent again to the named node, at most MAX_REDIRECTS
   times.
4. ASK and TRYAGAIN are not followed: the keys of the slot are being moved one by one, and a script must see all of a
   queue. The call raises RedisUnavailable until the move is complete.
5. After any failure the next call fetches a new slot map.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from forq.errors import ForqError, RedisUnavailable
from forq.redis_url import Address

if TYPE_CHECKING:
    from forq.broker.connection import Connection
    from forq.broker.link import Link, Sent
    from forq.broker.scripts import Script

# Per node, tried one after another: a node that does not reply must not use up the time of all.
NODE_TIMEOUT_SECONDS = 1.0
MAX_REDIRECTS = 5
_T = TypeVar("_T")


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
    """The slot of a key; all keys with the same {tag} share one."""
    from redis.crc import key_slot

    return key_slot(key.encode())


def fetch_slot_map(
    address: Address, known: Iterable[str], name: str, kind: "type[Connection] | None" = None
) -> SlotMap:
    """The slot map of the first node that has one, of the known nodes and those in the URL. OSError if none has."""
    errors: list[str] = []
    urls = list(dict.fromkeys([*known, *(address.server_url(*host) for host in address.hosts)]))
    # In random order, to spread the load.
    for url in random.sample(urls, len(urls)):
        try:
            return _fetch_from(address, url, name, kind)
        except OSError as exc:
            errors.append(f"{_host_and_port(url)}: {exc or type(exc).__name__}")
    raise ConnectionError(f"no node of the cluster sent its slot map ({'; '.join(errors)})")


def _fetch_from(address: Address, url: str, name: str, kind: "type[Connection] | None") -> SlotMap:
    from forq.broker.connection import Connection

    limits = {"connect_timeout_seconds": NODE_TIMEOUT_SECONDS, "timeout_seconds": NODE_TIMEOUT_SECONDS}
    connection = (kind or Connection)(url, name=name, **limits)
    try:
        connection.send_many([("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
        info, ranges = connection.receive(), connection.receive()
    finally:
        connection.close()
    for answer in (info, ranges):
        if isinstance(answer, Exception):
            raise ConnectionError(str(answer))
    if b"cluster_state:ok" not in info:
        raise ConnectionError("it has lost contact with the cluster (cluster_state:fail)")
    slot_map = SlotMap([], [], [])
    for start, end, master, *_ in sorted(ranges, key=lambda found: int(found[0])):
        slot_map.starts.append(start)
        slot_map.ends.append(end)
        slot_map.urls.append(node_url(address, (master[0] or b"").decode(), int(master[1]), url))
    return slot_map


def node_url(address: Address, host: str, port: int, source_url: str) -> str:
    """The URL of a node; without a known host, that of the node which named it."""
    if host in ("", "?"):
        host = _host_and_port(source_url).rpartition(":")[0].strip("[]")
    return address.server_url(host, port)


def _host_and_port(url: str) -> str:
    return url.partition("://")[2].rpartition("@")[2].partition("/")[0].partition("?")[0]


class Moved(ForqError):
    """Another node serves the slot (`host`; empty for the same host). The call was not carried out."""

    def __init__(self, message: str, slot: int, host: str, port: int) -> None:
        super().__init__(message)
        self.slot = slot
        self.host = host
        self.port = port


class Cluster:
    """Routes calls to the nodes of a cluster. `open_link` makes a link to the node with a URL."""

    def __init__(
        self,
        address: Address,
        name: str,
        open_link: Callable[[str], "Link"],
        connection_kind: "type[Connection] | None" = None,
    ) -> None:
        self._address = address
        self._name = name
        self._open_link = open_link
        self._connection_kind = connection_kind
        self._links: dict[str, Link] = {}
        self._slots: SlotMap | None = None
        # Redirects since the slot map was fetched.
        self._moved: dict[int, str] = {}

    def call(self, args: tuple[Any, ...], at: str | None) -> Any:
        return self.route(_key_of(args) if at is None else at, lambda link: link.call(*args))

    def call_batch(self, commands: tuple[tuple[Any, ...], ...]) -> list[Any]:
        """Repeats the batch if the node refused all commands. If it refused only some, the slot has just moved: these
        are returned as RedisUnavailable, because the others must not be repeated."""

        def send(link: "Link") -> list[Any]:
            answers = link.call_batch(*commands)
            if all(isinstance(answer, Moved) for answer in answers):
                raise answers[0]
            return [RedisUnavailable(str(answer)) if isinstance(answer, Moved) else answer for answer in answers]

        answers = self.route(_key_of(commands[0]), send)
        if any(isinstance(answer, RedisUnavailable) for answer in answers):
            self._slots = None
        return answers

    def pipeline(self, commands: list[tuple[Any, ...]], at: str | None) -> list[Any]:
        """Sends commands to one node after another; the replies are in the order of the commands."""
        if at is not None:
            return self.route(at, lambda link: link.pipeline(commands))
        keys = [_key_of(command) for command in commands]
        return self._on_each(keys, lambda link, indexes: link.pipeline([commands[i] for i in indexes]))

    def run_each(self, script: "Script", bases: list[str]) -> list[Any]:
        return self._on_each(bases, lambda link, indexes: link.run_each(script, [bases[i] for i in indexes]))

    def route(self, key: str, send: Callable[["Link"], _T]) -> _T:
        """Calls `send` with the link to the node that serves this key."""
        slot = slot_of(key)
        return self._follow_redirects(lambda: send(self._link(self._url_of(slot))))

    def finish(self, sent: "Sent") -> list[Any]:
        try:
            return sent.link.finish(sent)
        except RedisUnavailable:
            self._slots = None
            raise

    def link_to(self, key: str) -> "Link":
        """The link to the node that serves this key."""
        return self.route(key, lambda link: link)

    def masters(self) -> list["Link"]:
        return [self._link(url) for url in self._map().masters()]

    def library_reloads(self) -> int:
        return sum(link.library_reloads() for link in self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _on_each(self, keys: list[str], send: Callable[["Link", list[int]], list[Any]]) -> list[Any]:
        """Only for reads: all are repeated if a node refused one with MOVED."""

        def once() -> list[Any]:
            indexes_by_url: dict[str, list[int]] = {}
            for index, key in enumerate(keys):
                indexes_by_url.setdefault(self._url_of(slot_of(key)), []).append(index)
            answers: dict[int, Any] = {}
            for url, indexes in indexes_by_url.items():
                answers.update(zip(indexes, send(self._link(url), indexes), strict=True))
            return [answers[index] for index in range(len(keys))]

        return self._follow_redirects(once)

    def _follow_redirects(self, send: Callable[[], _T]) -> _T:
        for _ in range(MAX_REDIRECTS):
            try:
                return send()
            except Moved as moved:
                self._moved[moved.slot] = node_url(self._address, moved.host, moved.port, self._url_of(moved.slot))
            except RedisUnavailable:
                # There may have been a failover.
                self._slots = None
                raise
        self._slots = None
        raise RedisUnavailable(f"no node of the cluster {self._address.shown} serves the slot: too many redirects")

    def _url_of(self, slot: int) -> str:
        url = self._map().url_of(slot) if slot not in self._moved else self._moved[slot]
        if url is None:
            raise RedisUnavailable(f"no node of the cluster {self._address.shown} serves slot {slot}")
        return url

    def _map(self) -> SlotMap:
        if self._slots is None:
            try:
                self._slots = fetch_slot_map(self._address, self._links, self._name, self._connection_kind)
            except OSError as exc:
                raise RedisUnavailable(f"cannot reach Redis at {self._address.shown}: {exc}") from None
            self._moved = {}
            self._close_unknown(self._slots.masters())
        return self._slots

    def _close_unknown(self, masters: list[str]) -> None:
        for url in set(self._links) - set(masters):
            self._links.pop(url).close()

    def _link(self, url: str) -> "Link":
        if url not in self._links:
            self._links[url] = self._open_link(url)
        return self._links[url]


def _key_of(command: tuple[Any, ...]) -> str:
    """The first key of a command; for EVAL and FCALL it follows the number of keys."""
    key = command[3] if command[0] in ("EVAL", "FCALL") else command[1]
    return str(key)
