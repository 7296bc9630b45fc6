"""The terminal while top has it: the other screen, keys one at a time, signals as events; and given back as it was.

Signal handlers do nothing: the interpreter writes their numbers to a pipe, which is waited for like the keys are.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from types import TracebackType
from typing import NamedTuple

ENTER = b"\x1b[?1049h\x1b[?25l\x1b[2J"
LEAVE = b"\x1b[?25h\x1b[?1049l"
# What a terminal sends for one key arrives within this, also over a slow line.
KEY_SECONDS = 0.05
SIGNALS = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT)
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
DEFAULT_SIZE = os.terminal_size((80, 24))
_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page_up",
    b"\x1b[6~": "page_down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1bOH": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\x1bOF": "end",
}
_SINGLE = {b"\r": "enter", b"\n": "enter", b"k": "up", b"j": "down", b"g": "home", b"G": "end"}


class Events(NamedTuple):
    keys: list[str]
    signals: list[int]
    readable: bool
    hung_up: bool


class Terminal:
    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._keys = Keys()
        self._shown = b""

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._in)
        self._bell, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_fd = signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda signum, frame: None) for number in SIGNALS}
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._bell)
        os.close(self._ring)

    def size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            return DEFAULT_SIZE
        # Some terminals do not say how large they are.
        return size if size.columns and size.lines else DEFAULT_SIZE

    def draw(self, lines: list[str]) -> None:
        """The whole screen at once; nothing if it is what is there already."""
        shown = b"\x1b[H" + b"\r\n".join(line.encode("utf-8", "replace") + b"\x1b[K" for line in lines) + b"\x1b[J"
        if shown != self._shown:
            self._shown = shown
            self._write(shown)

    def wait(self, fd: int | None, seconds: float) -> Events:
        """Until a key, a signal, something to read at `fd`, or so long."""
        until = time.monotonic() + max(0.0, seconds)
        watched = [self._in, self._bell, *([] if fd is None else [fd])]
        patience = KEY_SECONDS if self._keys.incomplete else max(0.0, until - time.monotonic())
        ready = select.select(watched, [], [], patience)[0]
        keys, hung_up = self._read_keys(self._in in ready)
        signals = list(os.read(self._bell, 256)) if self._bell in ready else []
        if signal.SIGWINCH in signals or signal.SIGCONT in signals:
            self._shown = b""
        return Events(keys, signals, fd is not None and fd in ready, hung_up)

    def suspend(self) -> None:
        """Ctrl-Z: the shell gets its terminal back, until it says to go on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _read_keys(self, ready: bool) -> tuple[list[str], bool]:
        if not ready:
            return self._keys.give_up(), False
        try:
            data = os.read(self._in, 1024)
        except OSError:
            return [], True
        return self._keys.feed(data), not data

    def _take(self) -> None:
        tty.setcbreak(self._in)
        self._shown = b""
        self._write(ENTER)

    def _give_back(self) -> None:
        try:
            self._write(LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)
        except (OSError, termios.error) as exc:
            # The terminal itself is gone: there is nothing to give back.
            sys.stderr.write(f"forqctl: the terminal is gone: {exc}\n")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]


class Keys:
    """Keys out of the bytes that a terminal sends. A byte of escape may be a key or the beginning of one, so what is
    incomplete waits for more, and `give_up` says that nothing follows."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def incomplete(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> list[str]:
        """The keys in it; what nobody uses is "" and does nothing."""
        self._held += data
        keys = []
        while self._held:
            length = _length(self._held)
            if length is None:
                break
            piece, self._held = self._held[:length], self._held[length:]
            keys.append(_named(piece))
        return keys

    def give_up(self) -> list[str]:
        alone, self._held = self._held == b"\x1b", b""
        return ["escape"] if alone else []


def _length(data: bytes) -> int | None:
    """How many bytes the first key has; None if more are needed to know."""
    if data[:1] != b"\x1b":
        return 1
    if len(data) == 1:
        return None
    if data[1:2] == b"O":
        return 3 if len(data) >= 3 else None
    if data[1:2] != b"[":
        # Escape, and then something else (or another escape).
        return 1
    for position in range(2, len(data)):
        if 0x40 <= data[position] <= 0x7E:
            return position + 1
    return None


def _named(piece: bytes) -> str:
    if piece == b"\x1b":
        return "escape"
    if len(piece) == 1:
        return _SINGLE.get(piece) or piece.decode("ascii", "ignore")
    return _SEQUENCES.get(piece, "")
