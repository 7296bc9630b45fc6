"""A network between forq and its server that loses replies, falls silent, is slow, or is cut.

Each connection is known by the name that forq gives it (CLIENT SETNAME, the first thing it sends), so that a test can
hit the workers and leave the others alone.
"""

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.drive.server import Server

_READ_BYTES = 1 << 16


class Pair:
    """One client's connection and the one that was made to the server for it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.name = b""

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._directory = tempfile.TemporaryDirectory(prefix="forq-")
        path = Path(self._directory.name) / "proxy.sock"
        self.url = f"unix://{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._lock = threading.Lock()
        self._pairs: list[Pair] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._losing: list[bytes] = []
        self.delay_seconds = 0.0
        self.lost: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply(self, name: bytes) -> None:
        """The next reply to a connection whose name begins so is lost with the connection; the call was carried out."""
        with self._lock:
            self._losing.append(name)

    def freeze(self) -> None:
        """Nothing goes through, and nobody is told."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def forget(self, name: bytes) -> int:
        """Connections whose name begins so lose the server's half; their client hears nothing of it. How many."""
        found = self._named(name)
        for pair in found:
            pair.name = b"(half-open)"
            with contextlib.suppress(OSError):
                pair.server.shutdown(socket.SHUT_RDWR)
        return len(found)

    def cut(self, name: bytes = b"") -> int:
        """Both halves of such connections end. How many."""
        found = self._named(name)
        for pair in found:
            pair.close()
        return len(found)

    def close(self) -> None:
        self._listener.close()
        self.thaw()
        self.cut()
        self._directory.cleanup()

    def _named(self, name: bytes) -> list[Pair]:
        with self._lock:
            return [pair for pair in self._pairs if pair.name.startswith(name)]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.socket(socket.AF_UNIX)
            try:
                upstream.connect(str(self._server.socket))
            except OSError:
                client.close()
                upstream.close()
                continue
            pair = Pair(client, upstream)
            with self._lock:
                self._pairs.append(pair)
            threading.Thread(target=self._requests, args=(pair,), daemon=True).start()
            threading.Thread(target=self._replies, args=(pair,), daemon=True).start()

    def _requests(self, pair: Pair) -> None:
        with contextlib.suppress(OSError):
            while chunk := pair.client.recv(_READ_BYTES):
                if not pair.name and b"SETNAME" in chunk:
                    pair.name = chunk.split(b"SETNAME\r\n", 1)[1].split(b"\r\n")[1]
                self._pass()
                pair.server.sendall(chunk)
        self._end(pair)

    def _replies(self, pair: Pair) -> None:
        with contextlib.suppress(OSError):
            while chunk := pair.server.recv(_READ_BYTES):
                self._pass()
                if self._loses(pair):
                    break
                pair.client.sendall(chunk)
        if pair.name != b"(half-open)":
            self._end(pair)

    def _pass(self) -> None:
        self._flowing.wait()
        if self.delay_seconds:
            time.sleep(self.delay_seconds)

    def _loses(self, pair: Pair) -> bool:
        with self._lock:
            for name in self._losing:
                if pair.name.startswith(name):
                    self._losing.remove(name)
                    self.lost.append(pair.name)
                    return True
        return False

    def _end(self, pair: Pair) -> None:
        """Called by both threads of a pair; the second one closes it."""
        pair.close()
        with self._lock:
            first = pair in self._pairs
            if first:
                self._pairs.remove(pair)
        if not first:
            pair.client.close()
            pair.server.close()


@contextmanager
def proxied(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server)
    try:
        yield proxy
    finally:
        proxy.close()
