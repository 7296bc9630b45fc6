"""Reads the stack dumps that a child writes on a signal (Stacks)."""

import os
from collections.abc import Callable

from forq.procs.loop import Loop
from forq.procs.stacks import STACK_FILE, STACK_SIGNAL
from forq.supervisor.child import Child

POLL_SECONDS = 0.003
# A dump is complete when its size has not changed for this many polls: it ends with the main thread, whose outermost
# frame is a module. Without that end, the process may have been preempted while it wrote. Without any output for 0.2 s
# there is no dump.
STABLE_POLLS = 2
STABLE_POLLS_WITHOUT_END = 20
MAX_POLLS = 66
# The last line of a stack that faulthandler has cut is "  ...".
ENDS = (b" in <module>\n", b"  ...\n")
MAX_DUMP_BYTES = 256 * 1024


class Stacks:
    """Reads the stacks of one child: a signal makes it write them to its memory file (workers/child.py). Requests that
    come while a dump is under way share it.

    `request_coroutines` requests the stacks of coroutines; False if there are none. The process puts them into
    `coroutines`. If its interpreter is stuck, the dump does without them."""

    def __init__(self, loop: Loop, child: Child, request_coroutines: Callable[[], bool] = lambda: False) -> None:
        # Of the last dump, by slot number.
        self.coroutines: dict[int, str] = {}
        self._loop = loop
        self._child = child
        self._request_coroutines = request_coroutines
        self._coroutines_requested = False
        self._waiting: list[Callable[[str], None]] = []
        self._file = -1
        self._size = self._polls = self._stable = 0
        self.fd: int | None = None

    def take(self, then: Callable[[str], None]) -> None:
        """Calls `then` soon with the dump, or with "" if the child writes none."""
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        self._size = self._polls = self._stable = 0
        self.coroutines = {}
        self._coroutines_requested = self._request_coroutines()
        try:
            self._file = self._open()
        except OSError:
            # The child is just ending.
            self._file = -1
        if self._file < 0 or not self._child.signal(STACK_SIGNAL):
            self._loop.call_later(0, self._finish)
        else:
            self._loop.call_later(POLL_SECONDS, self._poll)

    def _open(self) -> int:
        """The emptied file; -1 if there is none, as in a process that has exec'd another program."""
        path = f"/proc/{self._child.pid}/fd/{self.fd}"
        if self.fd is None or not os.readlink(path).startswith(f"/memfd:{STACK_FILE}"):
            return -1
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(file, 0)
        return file

    def coroutines_received(self) -> None:
        """The process has sent the stacks of all its coroutines."""
        self._coroutines_requested = False

    def _poll(self) -> None:
        size = os.fstat(self._file).st_size
        self._polls += 1
        self._stable = self._stable + 1 if size and size == self._size else 0
        self._size = size
        complete = self._is_complete() and not self._coroutines_requested
        if complete or self._polls >= MAX_POLLS:
            self._finish()
        else:
            self._loop.call_later(POLL_SECONDS, self._poll)

    def _is_complete(self) -> bool:
        if self._stable < STABLE_POLLS:
            return False
        return self._stable >= STABLE_POLLS_WITHOUT_END or os.pread(self._file, 64, max(0, self._size - 64)).endswith(
            ENDS
        )

    def _finish(self) -> None:
        dump = ""
        if self._file >= 0:
            dump = os.pread(self._file, MAX_DUMP_BYTES, 0).decode("utf-8", "replace")
            os.close(self._file)
            self._file = -1
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(dump)
