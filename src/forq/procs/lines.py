"""Lines over a byte stream: cutting it into lines with a cap, and a socket that never blocks its loop."""

from __future__ import annotations

from collections import deque
from itertools import islice

from forq.errors import InvalidData

# forqctl imports this module: `typing` and `socket` would cost more than the whole conversation.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from forq.procs.loop import Loop

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 64 * 1024
PIECES_AT_ONCE = 64


class LineBuffer:
    """Takes bytes as they come, gives whole lines one at a time.

    A line over the limit is the last one: each `pop` raises. With `skip_too_long` only the first does; the rest of that
    line is dropped, and the next one follows. `number`: of the line that the last `pop` gave or refused, from 1.
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
        """No more will come: what is left is a line, too."""
        if self._buffer and not self._buffer.endswith(b"\n"):
            self._buffer += b"\n"

    def pop(self) -> bytes | None:
        """The next whole line without its newline, or None. Raises InvalidData when a line is over the limit."""
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
        """The line that ends there; -1: it goes on."""
        self._skipping = end < 0
        self._searched = 0
        del self._buffer[: len(self._buffer) if end < 0 else end + 1]

    def has_line(self) -> bool:
        """Whether the next `pop` gives or refuses one."""
        return len(self._buffer) > self._limit or self._buffer.find(b"\n", self._searched) >= 0

    def count(self) -> int:
        """How many whole lines wait here."""
        return self._buffer.count(b"\n")

    def peek(self, count: int) -> bytes:
        """The first bytes of what waits here."""
        return bytes(self._buffer[:count])

    def clear(self) -> None:
        self._buffer.clear()
        self._searched = 0

    def __len__(self) -> int:
        """How many bytes wait here."""
        return len(self._buffer)


class LineConnection:
    """A stream socket on a loop. `lines` has what was read; `on_input` is called after each read and at the end.

    `ended`: no more will come; `error`: why, if that was no orderly end. `gone`: nothing can be sent any more; what was
    not sent is dropped. `on_output` is called when the loop has sent all that was left, or has found it gone.
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
        # Pieces as they were given: a long one is not copied.
        self._output: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self._writing = False
        self.read(True)

    def fileno(self) -> int:
        """-1 when it is closed."""
        return self._sock.fileno()

    def read(self, wanted: bool) -> None:
        """Whether the loop reads on."""
        wanted = wanted and not self.ended
        if wanted != self.reading:
            self.reading = wanted
            if wanted:
                self._loop.add_reader(self._sock.fileno(), self._readable)
            else:
                self._loop.remove_reader(self._sock.fileno())

    def receive(self) -> int | None:
        """Reads once: how many bytes, 0 at the end, None if there is nothing yet."""
        try:
            received = self._sock.recv(self._read_bytes)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as exc:
            received, self.error = b"", exc
        if not received:
            self.ended = True
            self.read(False)
        self.lines.push(received)
        return len(received)

    def send(self, data: bytes) -> None:
        """Now, as far as the other side takes it; the rest when it does."""
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
        self.read(False)
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
            # Once: a reader that keeps up with us must not keep the loop to itself.
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
