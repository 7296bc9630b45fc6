"""Lines for the supervisor's stderr, without ever waiting for whoever reads it.

The descriptor is shared with the supervisor, a shell and others, so it must not be made non-blocking. A pipe or a
terminal is opened once more, a socket is asked not to wait, and a file does not make anybody wait.
"""

import os
import select
import socket
import stat
from collections import deque

MAX_WAITING_BYTES = 256 * 1024


class Forwarder:
    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._socket: socket.socket | None = None
        self._may_block = False
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.left_out = 0
        self._open()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def send(self, line: bytes) -> None:
        """A line with its end; left out and counted if too much waits already."""
        if self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.left_out += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    def flush(self) -> None:
        """As much as goes at once."""
        while self._waiting:
            # A large write is split by whoever is at the other end; a part of a line must not be followed by another.
            line = self._waiting[0]
            try:
                count = self._write(line)
            except BlockingIOError:
                return
            except OSError:
                # Nobody is there any more.
                self.left_out += len(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                return
            self._waiting_bytes -= count
            if count == len(line):
                self._waiting.popleft()
            else:
                self._waiting[0] = line[count:]

    def take_left_out(self) -> int:
        """How many were left out since the last time, once there is room to say so."""
        if self._waiting:
            return 0
        count, self.left_out = self.left_out, 0
        return count

    def _open(self) -> None:
        try:
            kind = os.fstat(self._fd).st_mode
            if stat.S_ISSOCK(kind):
                self._socket = socket.socket(fileno=os.dup(self._fd))
            elif stat.S_ISFIFO(kind) or os.isatty(self._fd):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._fd = os.open(f"/proc/self/fd/{self._fd}", flags)
        except OSError:
            # A terminal of another user, say: then we look before we write.
            self._may_block = True

    def _write(self, line: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(line, socket.MSG_DONTWAIT)
        if self._may_block and not select.select([], [self._fd], [], 0)[1]:
            raise BlockingIOError
        return os.write(self._fd, line)
