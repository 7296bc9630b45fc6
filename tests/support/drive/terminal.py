"""Runs a program on a pseudo-terminal and reads its screen with a terminal emulator."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable

import pyte


class OnTerminal:
    def __init__(self, command: list[str], env: dict[str, str], columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        self._set_size(columns, lines)
        self.modes = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={"TERM": "xterm", **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.written = b""

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Resizes the terminal, which signals the program. Clears the emulator: only newly drawn text is seen."""
        self.screen.resize(lines, columns)
        self.screen.reset()
        self._set_size(columns, lines)

    def read(self, seconds: float) -> None:
        """Reads the program's output for this time."""
        if select.select([self._ours], [], [], seconds)[0]:
            data = os.read(self._ours, 65536)
            self.written += data
            self._stream.feed(data)

    def read_the_rest(self) -> None:
        """Reads the pending output of a stopped program."""
        while select.select([self._ours], [], [], 0)[0]:
            self.read(0)

    def wait_for(self, condition: str | Callable[[str], object], seconds: float = 20.0) -> str:
        """Waits for this text, or until the function is true; returns the screen."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.text
            if condition in text if isinstance(condition, str) else condition(text):
                return text
            if time.monotonic() > deadline:
                raise AssertionError(f"the screen never showed {condition!r}; last:\n{text}")
            self.read(0.05)

    def end(self, seconds: float = 20.0) -> int:
        """Waits until the program ends; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.05)
        # Its last output.
        self.read(0.05)
        return self.process.wait(1)

    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
