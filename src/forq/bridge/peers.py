"""The two kinds of peers of a bridge: stdin and stdout, and socket connections."""

import os
import select
import socket
from typing import Protocol

from forq.bridge.messages import Request
from forq.procs.lines import READ_BYTES, LineBuffer, LineConnection
from forq.procs.loop import Loop

# A peer with more unsent output is not read; with more than MAX_UNSENT_BYTES it is disconnected.
PAUSE_UNSENT_BYTES = 1 << 20
MAX_UNSENT_BYTES = 8 << 20

STDIN, STDOUT = 0, 1


class Peer(Protocol):
    """`pending`: line number and request not executed yet. `ended`: no more input. `disconnected`: output is lost."""

    name: str
    lines: LineBuffer
    pending: tuple[int, Request] | None
    ended: bool

    @property
    def disconnected(self) -> bool: ...

    @property
    def unsent(self) -> bool: ...

    def update_reading(self) -> None:
        """Reads only while all received lines are executed, so that a fast sender blocks instead of filling memory."""

    def send(self, line: bytes) -> None: ...

    def stop_reading(self) -> None: ...

    def close(self) -> None: ...


class StandardStreams:
    """stdin and stdout. Writes block: a slow reader delays only its own bridge."""

    unsent = False

    def __init__(self, loop: Loop) -> None:
        self.name = "stdin"
        self.lines = LineBuffer(skip_too_long=True)
        self.pending: tuple[int, Request] | None = None
        self.ended = False
        self.disconnected = False
        self._loop = loop
        self.update_reading()

    def update_reading(self) -> None:
        if self.ended or self.pending is not None or self.lines.has_line():
            self._loop.remove_reader(STDIN)
        else:
            self._loop.add_reader(STDIN, self._read)

    def _read(self) -> None:
        received = os.read(STDIN, READ_BYTES)
        self.lines.push(received)
        if not received:
            self.stop_reading()

    def send(self, line: bytes) -> None:
        left = memoryview(line)
        while left and not self.disconnected:
            try:
                left = left[os.write(STDOUT, left) :]
            except BlockingIOError:
                # Another process made the pipe non-blocking.
                select.select([], [STDOUT], [])
            except OSError:
                self.disconnected = True
                self.stop_reading()

    def stop_reading(self) -> None:
        if not self.ended:
            self.ended = True
            self.lines.end()

    def close(self) -> None:
        """The descriptors belong to the parent process."""


class SocketPeer:
    """A connection to the listening socket."""

    def __init__(self, loop: Loop, connected: socket.socket, name: str) -> None:
        self.name = name
        self.pending: tuple[int, Request] | None = None
        self.ended = False
        self.lines = LineBuffer(skip_too_long=True)
        self._io = LineConnection(loop, connected, self._on_input, lines=self.lines, on_output=self._on_output)

    @property
    def disconnected(self) -> bool:
        return self._io.gone

    @property
    def unsent(self) -> bool:
        return self._io.unsent_bytes > 0

    def update_reading(self) -> None:
        busy = self.ended or self.pending is not None or self.lines.has_line()
        self._io.set_reading(not busy and self._io.unsent_bytes < PAUSE_UNSENT_BYTES)

    def _on_input(self) -> None:
        if self._io.error is not None:
            self._io.close()
        if self._io.ended:
            self.stop_reading()

    def _on_output(self) -> None:
        if self.disconnected:
            self.stop_reading()

    def send(self, line: bytes) -> None:
        self._io.send(line)
        if self._io.unsent_bytes > MAX_UNSENT_BYTES:
            self._io.close()
        self._on_output()

    def stop_reading(self) -> None:
        if not self.ended:
            self.ended = True
            self.lines.end()

    def close(self) -> None:
        self._io.close()
