"""Those who speak to a bridge: lines in, lines out. A line goes out whole or, when its reader is gone, not at all."""

import os
import select
import socket
from typing import Protocol

from forq.bridge.messages import Request
from forq.procs.lines import READ_BYTES, LineConnection, Lines
from forq.procs.loop import Loop

# What a reader may be behind before it is not listened to; and before it is dropped.
SLOW_BYTES = 1 << 20
LOST_BYTES = 8 << 20


class Peer(Protocol):
    """`pending`: the number and the request of a line that Redis has not taken yet. `ended`: no more will come. `gone`:
    nothing can be said to it any more."""

    name: str
    lines: Lines
    pending: tuple[int, Request] | None
    ended: bool

    @property
    def gone(self) -> bool: ...

    @property
    def unsent(self) -> bool: ...

    def listen(self) -> None:
        """Reads on if all that was read is dealt with; what comes later stays with whoever writes it."""

    def send(self, line: bytes) -> None: ...

    def end(self) -> None:
        """Nothing more is read of it."""

    def close(self) -> None: ...


class Standard:
    """stdin and stdout. Whoever reads slowly holds up this bridge, which is his alone."""

    unsent = False

    def __init__(self, loop: Loop, stdin: int = 0, stdout: int = 1) -> None:
        self.name = "stdin"
        self.lines = Lines(skip_too_long=True)
        self.pending: tuple[int, Request] | None = None
        self.ended = False
        self.gone = False
        self._loop = loop
        self._stdin = stdin
        self._stdout = stdout
        self.listen()

    def listen(self) -> None:
        if self.ended or self.pending is not None or self.lines.has_line():
            self._loop.remove_reader(self._stdin)
        else:
            self._loop.add_reader(self._stdin, self._read)

    def _read(self) -> None:
        received = os.read(self._stdin, READ_BYTES)
        self.lines.push(received)
        if not received:
            self.end()

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

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.lines.end()

    def close(self) -> None:
        """Both belong to whoever started us."""


class Client:
    """Of the listening socket."""

    def __init__(self, loop: Loop, connected: socket.socket, name: str) -> None:
        self.name = name
        self.pending: tuple[int, Request] | None = None
        self.ended = False
        self.lines = Lines(skip_too_long=True)
        self._io = LineConnection(loop, connected, self._heard, lines=self.lines, on_output=self._sent)

    @property
    def gone(self) -> bool:
        return self._io.gone

    @property
    def unsent(self) -> bool:
        return self._io.unsent_bytes > 0

    def listen(self) -> None:
        busy = self.ended or self.pending is not None or self.lines.has_line()
        self._io.read(not busy and self._io.unsent_bytes < SLOW_BYTES)

    def _heard(self) -> None:
        if self._io.error is not None:
            self._io.close()
        if self._io.ended:
            self.end()

    def _sent(self) -> None:
        if self.gone:
            self.end()

    def send(self, line: bytes) -> None:
        self._io.send(line)
        if self._io.unsent_bytes > LOST_BYTES:
            self._io.close()
        self._sent()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.lines.end()

    def close(self) -> None:
        self._io.close()
