"""Reading the stacks of a child: a signal makes it write them to its memory file (workers/stack.py)."""

import os
from collections.abc import Callable

from forq.procs.loop import Loop
from forq.procs.process import STACK_FILE, STACK_SIGNAL
from forq.supervisor.child import Child

LOOK_SECONDS = 0.003
# The dump is there when it has stopped growing; a child that does not answer for 0.2 s has none to give. Less would be
# enough on an idle machine.
STILL_LOOKS = 2
MAX_LOOKS = 66
MAX_DUMP_BYTES = 256 * 1024


class Stacks:
    """The stacks of one child; whoever asks while a dump is under way gets the same one."""

    def __init__(self, loop: Loop, child: Child) -> None:
        self._loop = loop
        self._child = child
        self._waiting: list[Callable[[str], None]] = []
        self._file = -1
        self._size = self._looks = self._still = 0
        self.fd: int | None = None

    def take(self, then: Callable[[str], None]) -> None:
        """Calls `then` with the dump, soon; with nothing if there is none to be had."""
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        self._size = self._looks = self._still = 0
        try:
            self._file = self._open()
        except OSError:
            # It is just ending.
            self._file = -1
        if self._file < 0 or not self._child.signal(STACK_SIGNAL):
            self._loop.call_later(0, self._finish)
        else:
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _open(self) -> int:
        """The file, emptied; -1 if there is none, as in a process that has become another program."""
        path = f"/proc/{self._child.pid}/fd/{self.fd}"
        if self.fd is None or not os.readlink(path).startswith(f"/memfd:{STACK_FILE}"):
            return -1
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(file, 0)
        return file

    def _look(self) -> None:
        size = os.fstat(self._file).st_size
        self._looks += 1
        self._still = self._still + 1 if size and size == self._size else 0
        self._size = size
        if self._still >= STILL_LOOKS or self._looks >= MAX_LOOKS:
            self._finish()
        else:
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _finish(self) -> None:
        dump = os.pread(self._file, MAX_DUMP_BYTES, 0).decode("utf-8", "replace") if self._file >= 0 else ""
        self._close()
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(dump)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
