"""Those who speak to a bridge: lines in, lines out. A line goes out whole or, when its reader is gone, not at all."""

import os
import select
import socket
from typing import Protocol

from forq.bridge.lines import LineCutter
from forq.bridge.messages import Request

READ_BYTES = 64 * 1024
# So many whole lines are read ahead; what comes after them stays with whoever wrote it.
LINES_AHEAD = 1000
# What a reader may be behind before it is not listened to; and before it is dropped.
SLOW_BYTES = 1 << 20
LOST_BYTES = 8 << 20


class Peer(Protocol):
    """`pending`: the number and the request of a line that Redis has not taken yet."""

    name: str
    lines: LineCutter
    pending: tuple[int, Request] | None
    ended: bool

    @property
    def gone(self) -> bool:
        """Nothing can be said to it any more."""

    @property
    def unsent(self) -> bool: ...

    def interest(self) -> dict[int, int]:
        """The events to wait for, by descriptor."""

    def ready(self, fd: int, events: int) -> None: ...

    def send(self, line: bytes) -> None: ...

    def end(self) -> None:
        """Nothing more is read of it."""

    def close(self) -> None: ...


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = LineCutter()
        self.pending: tuple[int, Request] | None = None
        # No more will come.
        self.ended = False

    def _wants_lines(self) -> bool:
        return not self.ended and self.pending is None and len(self.lines) < LINES_AHEAD

    def _heard(self, received: bytes) -> None:
        if received:
            self.lines.push(received)
        else:
            self.end()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.lines.end()


class Standard(_Reader):
    """stdin and stdout. Whoever reads slowly holds up this bridge, which is his alone."""

    def __init__(self, stdin: int = 0, stdout: int = 1) -> None:
        super().__init__("stdin")
        self._stdin = stdin
        self._stdout = stdout
        self.gone = False
        self.unsent = False

    def interest(self) -> dict[int, int]:
        return {self._stdin: select.POLLIN} if self._wants_lines() else {}

    def ready(self, fd: int, events: int) -> None:
        self._heard(os.read(self._stdin, READ_BYTES))

    def send(self, line: bytes) -> None:
        left = memoryview(line)
        while left and not self.gone:
            try:
                left = left[os.write(self._stdout, left) :]
            except BlockingIOError:
                # Somebody else has made the pipe so.
                select.select([], [self._stdout], [])
            except OSError:
                self.gone = True
                self.end()

    def close(self) -> None:
        """Both belong to whoever started us."""


class Connection(_Reader):
    """A client of the listening socket."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        super().__init__(name)
        connected.setblocking(False)
        self._socket = connected
        self._output = bytearray()
        self.gone = False

    @property
    def unsent(self) -> bool:
        return bool(self._output) and not self.gone

    def interest(self) -> dict[int, int]:
        reads = self._wants_lines() and len(self._output) < SLOW_BYTES
        wanted = select.POLLIN * reads | select.POLLOUT * self.unsent
        return {self._socket.fileno(): wanted} if wanted and not self.gone else {}

    def ready(self, fd: int, events: int) -> None:
        try:
            if events & select.POLLOUT:
                self._flush()
            if events & ~select.POLLOUT:
                self._heard(self._socket.recv(READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self._lose()

    def send(self, line: bytes) -> None:
        if self.gone:
            return
        self._output += line
        try:
            self._flush()
        except BlockingIOError:
            if len(self._output) > LOST_BYTES:
                self._lose()
        except OSError:
            self._lose()

    def close(self) -> None:
        self.gone = True
        self._socket.close()

    def _flush(self) -> None:
        while self._output:
            del self._output[: self._socket.send(self._output)]

    def _lose(self) -> None:
        self.gone = True
        self._output.clear()
        self.end()
