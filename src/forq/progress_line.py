"""Shows the progress of a long command on stderr."""

from __future__ import annotations

import sys
import time

REDRAW_SECONDS = 0.1
LINE_SECONDS = 10.0
BAR_WIDTH = 30

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class ProgressLine:
    """On a terminal one line that is redrawn. Elsewhere, if `lines`, one line every ten seconds."""

    def __init__(self, *, lines: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self.on_terminal = sys.stderr.isatty()
        self._lines = lines and not self.on_terminal
        self._now = now
        self._next_draw = 0.0
        self._next_line = now() + LINE_SECONDS

    def draw_bar(self, part: int, whole: int, text: str) -> None:
        """`part` of `whole`; only the text if the whole is unknown (0)."""
        percent = f"{100 * min(part, whole) // whole:3}% " if whole > 0 else ""
        if self._lines:
            self._line(f"{percent.lstrip()}{text}")
        if not self.on_terminal or self._now() < self._next_draw:
            return
        self._next_draw = self._now() + REDRAW_SECONDS
        self._draw(f"{bar_text(part, whole)} {percent}{text}" if whole > 0 else text)

    def update(self, text: str) -> None:
        if self._lines:
            self._line(text)
        if self.on_terminal:
            self._draw(text)

    def clear(self) -> None:
        if self.on_terminal:
            self._draw("")

    def _line(self, text: str) -> None:
        if self._now() >= self._next_line:
            self._next_line = self._now() + LINE_SECONDS
            print(f"forqctl: {text}", file=sys.stderr, flush=True)

    def _draw(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def bar_text(part: float, whole: float) -> str:
    filled = int(BAR_WIDTH * min(part, whole) / whole)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
