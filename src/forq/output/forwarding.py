"""Lines for stderr, without ever waiting for whoever reads it: for the supervisor's own log and for the logger.

The descriptor is shared with a shell and others, so it must not be made non-blocking. A pipe or a terminal is opened
once more; a pipe of another user, which cannot be, is asked not to wait with each write, or spliced into where the
kernel does not know that. A socket is asked not to wait, too, and a file does not make anybody wait.
"""

import errno
import os
import select
import socket
import stat
from collections import deque

MAX_WAITING_BYTES = 256 * 1024
# A pipe that has room for a write of this size takes it whole.
PIPE_BUF = select.PIPE_BUF
# Of what may only be looked at before a write: a terminal says that it has room, but not how much.
TERMINAL_BYTES = 256
# What a kernel says that cannot do what it is asked for.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class Forwarder:
    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._socket: socket.socket | None = None
        self._reopened = False
        self._may_block = False
        self._nowait = False
        # The ends of a pipe of our own, and how much is in it.
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
        """What to wait for while lines wait."""
        return self._fd if self._socket is None else self._socket.fileno()

    def send(self, line: bytes) -> None:
        """A line with its end; left out and counted if too much waits already."""
        if self._waiting and self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
            self.dropped += 1
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
        """Until more can go, but no longer than this."""
        _is_writable(self.fileno(), seconds)

    def take_dropped(self) -> int:
        """How many were left out since the last time, once there is room to say so."""
        if self._waiting:
            return 0
        count, self.dropped = self.dropped, 0
        return count

    def close(self) -> None:
        """Gives back what was opened here."""
        if self._socket is not None:
            self._socket.close()
        for fd in (*(self._staging or ()), *((self._fd,) if self._reopened else ())):
            os.close(fd)
        self._socket, self._staging, self._reopened = None, None, False

    def _open(self) -> None:
        try:
            kind = os.fstat(self._fd).st_mode
        except OSError:
            # Closed: every write will say so.
            return
        if stat.S_ISSOCK(kind):
            self._socket = socket.socket(fileno=os.dup(self._fd))
        elif stat.S_ISFIFO(kind) or os.isatty(self._fd):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                self._fd, self._reopened = os.open(f"/proc/self/fd/{self._fd}", flags), True
            except OSError:
                # Of another user, as after `su` and in containers.
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
        """Through a pipe of our own: what cannot go on at once stays there, and is how `line` begins next time."""
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
