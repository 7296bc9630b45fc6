"""fakeredis instead of a server, in this process. forq's library runs in it; all code above the connection is the
product's.

A connection answers each command before `send` returns, so nothing ever waits. `FakeServer` has the interface of
`Server`; each has its own URL, which connects to it inside `installed`.
"""

import itertools
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import fakeredis
import redis
from fakeredis._socket import FakeSocket
from redis.exceptions import ResponseError

from forq.broker import link, pubsub
from forq.redis_url import Address
from tests.support.drive import one_queue, redis_cluster

_numbers = itertools.count(1)


class FakeServer:
    def __init__(self) -> None:
        self.url = f"redis://fake-{next(_numbers)}.invalid"
        self._state = fakeredis.FakeServer(version=(7,))

    def connect(self) -> redis.Redis:
        return fakeredis.FakeRedis(server=self._state)

    def flush(self) -> None:
        self.connect().flushall()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Connections to its URL reach it; all other URLs are unchanged."""
        to_others, client_of_others = link.connect, redis_cluster.connect

        def connect(address: Address, *arguments: Any) -> Any:
            return _Connection(self._state) if address.url == self.url else to_others(address, *arguments)

        def client(url: str, key: str) -> redis.Redis:
            return self.connect() if url == self.url else client_of_others(url, key)

        with (
            patch.object(link, "connect", connect),
            patch.object(pubsub, "connect", connect),
            patch.object(one_queue, "connect", client),
        ):
            yield


class _Connection:
    """Has the interface of forq.broker.connection.Connection."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        self.socket = _Socket(server)

    def is_closed(self) -> bool:
        return False

    def send(self, command: tuple[Any, ...]) -> None:
        self.send_many([command])

    def send_many(self, commands: Sequence[tuple[Any, ...]]) -> None:
        for command in commands:
            self.socket.sendall(b"".join(_packer.pack_command(*command)))

    def receive(self) -> Any:
        return self.socket.take()

    def close(self) -> None:
        self.socket.close()


_packer = redis.Connection()


class _Socket(FakeSocket):
    """`fileno` is readable while answers are pending, like a socket's."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        self._bell = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        super().__init__(server, db=0, client_class=redis.Redis, lua_modules=set())

    def put_response(self, msg: Any) -> None:
        super().put_response(msg)
        os.eventfd_write(self._bell, 1)

    def take(self) -> Any:
        if self.responses is None:
            raise ConnectionError("the connection is closed")
        try:
            answer = self.responses.get_nowait()
        except queue.Empty:
            raise BlockingIOError("nothing to read") from None
        os.eventfd_read(self._bell)
        return answer

    def fileno(self) -> int:
        return self._bell

    def setblocking(self, _: bool) -> None:
        """Nothing here blocks."""

    def close(self) -> None:
        if self.responses is not None:
            os.close(self._bell)
            super().close()

    def _decode_error(self, error: Any) -> ResponseError:
        """Keeps the error code, which fakeredis strips as redis-py does."""
        return ResponseError(error.value)

    def hrandfield(self, key: Any, *args: Any) -> Any:
        """A server returns an empty list if the hash does not exist and a count is given."""
        found = super().hrandfield(key, *args)
        return [] if found is None and args else found
