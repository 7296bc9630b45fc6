"""Writes lines to stderr without ever blocking: for the supervisor's own log and for the logger.

The descriptor is shared with a shell and others, so it must not be made non-blocking. A pipe or terminal is opened
again. A pipe of another user, which cannot be opened, is written with RWF_NOWAIT, or by splice where the kernel lacks
that. A socket is written with MSG_DONTWAIT. A file never blocks.
"""

import errno
import os
import select
import socket
import stat
from collections import deque

MAX_WAITING_BYTES = 256 * 1024
# A pipe accepts a write of this size completely or not at all.
PIPE_BUF = select.PIPE_BUF
# Size of writes to a descriptor that may block: poll shows that there is room, but not how much.
TERMINAL_BYTES = 256
# Errors of a kernel without the requested feature.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class Forwarder:
    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._socket: socket.socket | None = None
        self._reopened = False
        self._may_block = False
        self._nowait = False
        # The ends of a private pipe, and the number of bytes in it.
        self._staging: tuple[int, int] | None = None
        self._staged = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.dropped = 0
        self._open()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def fileno(self) -> int:
        """The descriptor to poll while lines wait."""
        return self._fd if self._socket is None else self._socket.fileno()

    def send(self, line: bytes) -> None:
        """Queues a line that ends in a newline; drops and counts it if too much waits."""
        if self._waiting and self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.dropped += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    def flush(self) -> None:
        """Writes as much as possible without blocking."""
        while self._waiting:
            # One line at a time: a write may be partial, and the rest of a line must follow it.
            line = self._waiting[0]
            try:
                count = self._write(line)
            except BlockingIOError:
                return
            except OSError:
                # The reader is gone.
                self.dropped += len(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                return
            self._waiting_bytes -= count
            if count == len(line):
                self._waiting.popleft()
            else:
                self._waiting[0] = line[count:]

    def wait(self, seconds: float) -> None:
        """Waits until more can be written, at most this long."""
        _is_writable(self.fileno(), seconds)

    def take_dropped(self) -> int:
        """How many lines were dropped since the last call; 0 while lines still wait."""
        if self._waiting:
            return 0
        count, self.dropped = self.dropped, 0
        return count

    def close(self) -> None:
        """Closes the descriptors opened here."""
        if self._socket is not None:
            self._socket.close()
        for fd in (*(self._staging or ()), *((self._fd,) if self._reopened else ())):
            os.close(fd)
        self._socket, self._staging, self._reopened = None, None, False

    def _open(self) -> None:
        try:
            kind = os.fstat(self._fd).st_mode
        except OSError:
            # Closed: every write will fail.
            return
        if stat.S_ISSOCK(kind):
            self._socket = socket.socket(fileno=os.dup(self._fd))
        elif stat.S_ISFIFO(kind) or os.isatty(self._fd):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                self._fd, self._reopened = os.open(f"/proc/self/fd/{self._fd}", flags), True
            except OSError:
                # It belongs to another user, as after `su` and in containers.
                self._nowait = stat.S_ISFIFO(kind)
                self._may_block = not self._nowait

    def _write(self, line: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(line, socket.MSG_DONTWAIT)
        if self._nowait:
            try:
                return os.pwritev(self._fd, [line], -1, os.RWF_NOWAIT)
            except OSError as exc:
                if exc.errno not in _UNSUPPORTED:
                    raise
            self._nowait, self._staging = False, os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._staging is not None:
            return self._splice(line, *self._staging)
        if self._may_block:
            if not _is_writable(self._fd, 0.0):
                raise BlockingIOError
            line = line[:TERMINAL_BYTES]
        return os.write(self._fd, line)

    def _splice(self, line: bytes, reading: int, writing: int) -> int:
        """Writes through a private pipe. Bytes that cannot move on stay there; `line` begins with them next time."""
        if not self._staged:
            self._staged = os.write(writing, line[:PIPE_BUF])
        try:
            moved = os.splice(reading, self._fd, self._staged, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            raise
        except OSError as exc:
            os.read(reading, self._staged)
            self._staged = 0
            if exc.errno in _UNSUPPORTED:
                self._staging, self._may_block = None, True
                raise BlockingIOError from exc
            raise
        self._staged -= moved
        return moved


def _is_writable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))
