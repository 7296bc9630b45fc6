"""Sends fuzz inputs to a unix socket over several connections, and waits until each batch is processed."""

import random
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.fuzz_inputs import Inputs

BATCH = 40
# Limit for the answer to the last line of a batch: earlier lines may delay it (64 requests that wait).
PATIENCE_SECONDS = 5.0


@dataclass
class Sent:
    lines: int = 0
    connections: int = 0
    cut_off: int = 0
    held: int = 0


class Driver:
    """`ask` makes a request with a unique answer; `answer` recognizes that answer. Both take a number."""

    def __init__(
        self, path: Path, inputs: Inputs, ask: Callable[[int], bytes], answer: Callable[[int], bytes], seed: int
    ) -> None:
        self._path = path
        self._inputs = inputs
        self._ask = ask
        self._answer = answer
        self._random = random.Random(seed)
        self.sent = Sent()

    def send(self, count: int) -> None:
        while count > 0:
            with self._connection() as sock:
                for _ in range(self._random.randint(1, 50)):
                    batch = min(BATCH, count)
                    if batch <= 0 or not self._send_batch(sock, batch):
                        break
                    count -= batch
                else:
                    self._leave(sock)
                count -= 1

    def _connection(self) -> socket.socket:
        self.sent.connections += 1
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self._path))
        sock.settimeout(PATIENCE_SECONDS)
        return sock

    def _send_batch(self, sock: socket.socket, batch: int) -> bool:
        """Returns False when this connection is no longer usable."""
        number = self.sent.lines
        data = b"".join(self._inputs.lines(batch)) + self._ask(number)
        self.sent.lines += batch
        wanted, seen = self._answer(number), b""
        view = memoryview(data)
        deadline = time.monotonic() + PATIENCE_SECONDS
        sock.setblocking(False)
        while time.monotonic() < deadline:
            try:
                if view:
                    with suppress(BlockingIOError):
                        view = view[sock.send(view[: 1 << 18]) :]
                received = sock.recv(1 << 18)
                if not received:
                    self.sent.cut_off += 1
                    return False
                seen = (seen + received)[-(1 << 19) :]
                if wanted in seen:
                    return True
            except BlockingIOError:
                time.sleep(0.0005)
            except OSError:
                self.sent.cut_off += 1
                return False
        self.sent.held += 1
        return False

    def _leave(self, sock: socket.socket) -> None:
        """Disconnects, sometimes in the middle of a line or with unread answers."""
        with suppress(OSError):
            sock.sendall(self._inputs.lines(1)[0][: self._random.randint(0, 30)])
            self.sent.lines += 1


def open_many(path: Path, count: int) -> tuple[int, int]:
    """Opens `count` connections, as many at a time as this process may have, each with an unfinished line; returns how
    many were accepted and how many refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    at_once = min(count, (hard if hard > 0 else soft) - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    let_in = turned_away = 0
    try:
        while count > 0:
            socks = [_begin(path) for _ in range(min(at_once, count))]
            count -= len(socks)
            for sock in socks:
                if _was_turned_away(sock):
                    turned_away += 1
                else:
                    let_in += 1
                sock.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return let_in, turned_away


def _begin(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    while True:
        try:
            sock.connect(str(path))
            break
        except BlockingIOError:
            time.sleep(0.001)
    with suppress(OSError):
        sock.send(b'{"half a line')
    return sock


def _was_turned_away(sock: socket.socket) -> bool:
    sock.settimeout(0.001)
    try:
        return sock.recv(1) != b"" or True
    except TimeoutError:
        return False
    except OSError:
        return True
