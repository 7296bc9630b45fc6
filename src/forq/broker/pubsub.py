"""Subscriptions to the channels on which scripts publish, for use in a poll loop."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forq.broker.link import CONNECT_TIMEOUT_SECONDS, connect
from forq.broker.topology import fetch_slot_map, slot_of
from forq.errors import RedisUnavailable
from forq.redis_url import CLUSTER, Address, read_address

if TYPE_CHECKING:
    from forq.broker.connection import Connection

# Channels per SUBSCRIBE command.
SUBSCRIBE_BATCH = 500


def connect_subscriber(
    address: Address,
    name: str,
    channel: str,
    connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
    kind: "type[Connection] | None" = None,
) -> "Connection":
    """A connection for a subscription to this channel."""
    limits = connect_timeout_seconds, connect_timeout_seconds
    if address.kind != CLUSTER:
        return connect(address, name, *limits, kind)
    slot_map = fetch_slot_map(address, (), name, kind)
    # Prefer the node of the queue: while that is down, nothing is published on its channel.
    own = slot_map.url_of(slot_of(channel))
    for url in sorted(slot_map.masters(), key=lambda url: url != own):
        try:
            return connect(read_address(url), name, *limits, kind)
        except OSError as exc:
            last: Exception = exc
    raise last


class Subscription:
    """Receives messages from all channels that match one of `patterns`; with `exact` they are names of channels.

    Messages published while it is not connected are lost, so the owner must check the state after each `connect`.
    In a cluster any node will do: the nodes forward messages to each other.
    """

    def __init__(self, url: str, *patterns: str, name: str, exact: bool = False) -> None:
        self._address = read_address(url)
        # `connect` subscribes to these.
        self.patterns: Sequence[str] = patterns
        self._name = name
        self._exact = exact
        self._connection: Connection | None = None

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def fileno(self) -> int:
        """-1 while not connected."""
        return -1 if self._connection is None else self._connection.socket.fileno()

    def connect(self) -> None:
        self.close()
        try:
            self._connection = connect_subscriber(self._address, self._name, self.patterns[0])
            for start in range(0, len(self.patterns), SUBSCRIBE_BATCH):
                self._subscribe(self._connection, self.patterns[start : start + SUBSCRIBE_BATCH])
        except OSError as exc:
            self.close()
            raise RedisUnavailable(f"cannot subscribe: {str(exc) or type(exc).__name__}") from None
        except BaseException:
            self.close()
            raise
        self._connection.socket.setblocking(False)

    def _subscribe(self, connection: "Connection", patterns: Sequence[str]) -> None:
        connection.send(("SUBSCRIBE" if self._exact else "PSUBSCRIBE", *patterns))
        confirmed = 0
        while confirmed < len(patterns):
            answer = connection.receive()
            if isinstance(answer, Exception):
                raise RedisUnavailable(f"cannot subscribe: {answer}")
            # The messages of earlier channels may arrive in between. The owner checks the state afterwards.
            confirmed += answer[0] in (b"subscribe", b"psubscribe")

    def receive(self) -> list[tuple[str, str]]:
        """The messages that have arrived, as (channel, message); RedisUnavailable if the connection is broken."""
        assert self._connection is not None, "connect first"
        messages: list[tuple[str, str]] = []
        try:
            while True:
                message: list[Any] = self._connection.receive()
                # [b"pmessage", pattern, channel, text] or [b"message", channel, text].
                if message[0] in (b"pmessage", b"message"):
                    messages.append((message[-2].decode(errors="replace"), message[-1].decode(errors="replace")))
        except BlockingIOError:
            return messages
        except OSError as exc:
            self.close()
            raise RedisUnavailable(f"subscription broke: {str(exc) or type(exc).__name__}") from None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
