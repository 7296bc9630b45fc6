"""A connection that hears what scripts publish, to be watched in a poll loop."""

from typing import TYPE_CHECKING, Any

from forq.broker.link import CONNECT_TIMEOUT_SECONDS, connect
from forq.broker.topology import fetch_slot_map, slot_of
from forq.errors import RedisUnavailable
from forq.redis_url import CLUSTER, read_address

if TYPE_CHECKING:
    from forq.broker.connection import Connection


class Subscription:
    """Hears every message on the channels that match `pattern`, or with `exact` on the channel of that name.

    What was published while it was not connected is lost: whoever listens must look for himself after each `connect`.
    The nodes of a cluster pass on to each other what is published, so that it may listen to any of them.
    """

    def __init__(self, url: str, pattern: str, *, name: str, exact: bool = False) -> None:
        self._address = read_address(url)
        self._pattern = pattern
        self._name = name
        self._exact = exact
        self._connection: Connection | None = None

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def fileno(self) -> int:
        """-1 while it is not connected."""
        return -1 if self._connection is None else self._connection.socket.fileno()

    def connect(self) -> None:
        self.close()
        try:
            self._connection = self._connect()
            self._connection.send(("SUBSCRIBE" if self._exact else "PSUBSCRIBE", self._pattern))
            answer = self._connection.receive()
        except OSError as exc:
            self.close()
            raise RedisUnavailable(f"cannot listen: {str(exc) or type(exc).__name__}") from exc
        if isinstance(answer, Exception):
            self.close()
            raise RedisUnavailable(f"cannot listen: {answer}")
        self._connection.socket.setblocking(False)

    def _connect(self) -> "Connection":
        if self._address.kind != CLUSTER:
            return connect(self._address, self._name, CONNECT_TIMEOUT_SECONDS)
        nodes = fetch_slot_map(self._address, (), self._name)
        # First that of the queue whose channel it is: while that is down nothing is published on it.
        own = nodes.url_of(slot_of(self._pattern))
        for url in sorted(nodes.masters(), key=lambda url: url != own):
            try:
                return connect(read_address(url), self._name, CONNECT_TIMEOUT_SECONDS)
            except OSError as exc:
                last: Exception = exc
        raise last

    def receive(self) -> list[tuple[str, str]]:
        """What has come, as (channel, message); RedisUnavailable when the connection has ended."""
        assert self._connection is not None, "connect first"
        heard: list[tuple[str, str]] = []
        try:
            while True:
                message: list[Any] = self._connection.receive()
                # [b"pmessage", pattern, channel, text] or [b"message", channel, text].
                if message[0] in (b"pmessage", b"message"):
                    heard.append((message[-2].decode(errors="replace"), message[-1].decode(errors="replace")))
        except BlockingIOError:
            return heard
        except OSError as exc:
            self.close()
            raise RedisUnavailable(f"the connection that listens broke: {str(exc) or type(exc).__name__}") from exc

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
