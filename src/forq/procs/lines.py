"""Lines over a byte stream: a buffer with a maximum line length, and a socket that never blocks its loop."""

from __future__ import annotations

from collections import deque
from itertools import islice

from forq.errors import InvalidData

# forqctl imports this module: importing `typing` and `socket` would take longer than a whole request.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from forq.procs.loop import Loop

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 64 * 1024
PIECES_AT_ONCE = 64


class LineBuffer:
    """Collects bytes and returns whole lines.

    After a line over the limit each `pop` raises. With `skip_too_long` only one does, and the next line follows.
    `number`: the line that the last `pop` returned or refused, from 1.
    """

    def __init__(self, limit: int = MAX_LINE_BYTES, *, skip_too_long: bool = False) -> None:
        self.number = 0
        self._limit = limit
        self._skip_too_long = skip_too_long
        self._skipping = False
        self._buffer = bytearray()
        self._searched = 0

    def push(self, data: bytes) -> None:
        self._buffer += data

    def end(self) -> None:
        """End of input: the rest is a line, too."""
        if self._buffer and not self._buffer.endswith(b"\n"):
            self._buffer += b"\n"

    def pop(self) -> bytes | None:
        """The next whole line without its newline, or None. Raises InvalidData for a line over the limit."""
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if not self._skipping:
                break
            self._drop(end)
            if end < 0:
                return None
        length = len(self._buffer) if end < 0 else end
        if length > self._limit:
            self.number += 1
            if self._skip_too_long:
                self._drop(end)
            raise InvalidData(f"line too long: at most {self._limit} bytes are allowed")
        if end < 0:
            self._searched = length
            return None
        self.number += 1
        with memoryview(self._buffer) as view:
            line = bytes(view[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def _drop(self, end: int) -> None:
        """Drops the line that ends at `end`; -1: its end is not here yet."""
        self._skipping = end < 0
        self._searched = 0
        del self._buffer[: len(self._buffer) if end < 0 else end + 1]

    def has_line(self) -> bool:
        """Whether the next `pop` returns or refuses a line."""
        return len(self._buffer) > self._limit or self._buffer.find(b"\n", self._searched) >= 0

    def count(self) -> int:
        """Whole lines in the buffer."""
        return self._buffer.count(b"\n")

    def peek(self, count: int) -> bytes:
        """The first bytes of the buffer."""
        return bytes(self._buffer[:count])

    def clear(self) -> None:
        self._buffer.clear()
        self._searched = 0

    def __len__(self) -> int:
        """Bytes in the buffer."""
        return len(self._buffer)


class LineConnection:
    """A stream socket on a loop. `lines` holds received data; `on_input` is called after each read and at the end.

    `ended`: the input has ended; `error`: the reason, unless it was an end of file. `gone`: nothing can be sent any
    more, and unsent data is dropped. `on_output` is called when all unsent data was sent, or the peer is gone.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_input: Callable[[], None],
        *,
        lines: LineBuffer,
        on_output: Callable[[], None] | None = None,
        read_bytes: int = READ_BYTES,
    ) -> None:
        sock.setblocking(False)
        self.lines = lines
        self.ended = False
        self.error: OSError | None = None
        self.gone = False
        self.reading = False
        self._loop = loop
        self._sock = sock
        self._on_input = on_input
        self._on_output = on_output
        self._read_bytes = read_bytes
        # Kept in pieces, so that long ones are not copied.
        self._output: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self._writing = False
        self.set_reading(True)

    def fileno(self) -> int:
        """-1 if closed."""
        return self._sock.fileno()

    def set_reading(self, wanted: bool) -> None:
        """Starts or pauses reading."""
        wanted = wanted and not self.ended
        if wanted != self.reading:
            self.reading = wanted
            if wanted:
                self._loop.add_reader(self._sock.fileno(), self._readable)
            else:
                self._loop.remove_reader(self._sock.fileno())

    def receive(self) -> int | None:
        """Reads once. Returns the number of bytes, 0 at the end, None if there is nothing yet."""
        try:
            received = self._sock.recv(self._read_bytes)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as exc:
            received, self.error = b"", exc
        if not received:
            self.ended = True
            self.set_reading(False)
        self.lines.push(received)
        return len(received)

    def send(self, data: bytes) -> None:
        """Sends as much as the socket accepts now, and the rest later."""
        if self.gone or not data:
            return
        self._output.append(memoryview(data))
        self.unsent_bytes += len(data)
        if not self._writing:
            self._flush()

    def close(self) -> None:
        if self._sock.fileno() < 0:
            return
        self.gone = self.ended = True
        self.set_reading(False)
        self._drop_output()
        self._wait_to_write(False)
        self._sock.close()

    def _drop_output(self) -> None:
        self._output.clear()
        self.unsent_bytes = 0

    def _readable(self) -> None:
        if self.receive() is not None:
            self._on_input()

    def _flush(self) -> None:
        try:
            # Once per pass: a fast reader must not monopolize the loop.
            self._sent(self._sock.sendmsg(list(islice(self._output, PIECES_AT_ONCE))))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.gone = True
            self._drop_output()
        self._wait_to_write(bool(self._output))

    def _sent(self, count: int) -> None:
        self.unsent_bytes -= count
        while count:
            piece = self._output.popleft()
            if count < len(piece):
                self._output.appendleft(piece[count:])
                return
            count -= len(piece)

    def _wait_to_write(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._sock.fileno(), self._writable)
            else:
                self._loop.remove_writer(self._sock.fileno())

    def _writable(self) -> None:
        self._flush()
        if not self._writing and self._on_output is not None:
            self._on_output()
