"""One line on a terminal's stderr that says how far a long command has come. Silent anywhere else."""

from __future__ import annotations

import sys
import time

REDRAW_SECONDS = 0.1
BAR_WIDTH = 30


class ProgressLine:
    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()
        self._next_draw = 0.0

    def bar(self, part: int, whole: int, text: str) -> None:
        """`part` of `whole`; only the text when the whole is not known."""
        if not self.shown or time.monotonic() < self._next_draw:
            return
        self._next_draw = time.monotonic() + REDRAW_SECONDS
        if whole <= 0:
            self._draw(text)
            return
        self._draw(f"{drawn_bar(part, whole)} {100 * min(part, whole) // whole:3}% {text}")

    def say(self, text: str) -> None:
        if self.shown:
            self._draw(text)

    def clear(self) -> None:
        if self.shown:
            self._draw("")

    def _draw(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def drawn_bar(part: float, whole: float) -> str:
    filled = int(BAR_WIDTH * min(part, whole) / whole)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
