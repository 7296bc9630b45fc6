"""Cuts a byte stream into lines. One that is too long is skipped up to its end, and told of once."""

from collections import deque

MAX_LINE_BYTES = 1 << 20


class TooLong:
    """Stands for a line that was over the limit."""


TOO_LONG = TooLong()
Line = tuple[int, bytes | TooLong]


class LineCutter:
    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._skipping = False
        self._lines: deque[Line] = deque()
        self._number = 0

    def __len__(self) -> int:
        """How many whole lines wait here."""
        return len(self._lines)

    def push(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._rest += first
        for part in others:
            self._end_line()
            self._rest += part
        if len(self._rest) > self._limit:
            self._skip()

    def end(self) -> None:
        """No more will come: what is left is a line, too."""
        if self._rest or self._skipping:
            self._end_line()

    def pop(self) -> Line | None:
        """The number of the next line, from 1, and the line."""
        return self._lines.popleft() if self._lines else None

    def _end_line(self) -> None:
        if len(self._rest) > self._limit:
            self._skip()
        if not self._skipping:
            self._number += 1
            self._lines.append((self._number, bytes(self._rest)))
        self._skipping = False
        self._rest.clear()

    def _skip(self) -> None:
        if not self._skipping:
            self._skipping = True
            self._number += 1
            self._lines.append((self._number, TOO_LONG))
        self._rest.clear()
