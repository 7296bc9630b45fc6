"""Starts a command that ends with this process: see leash.py."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forq.errors import ForqError
from forq.testing import leash

START_SECONDS = 30.0
# Longer than the leash needs in the worst case.
STOP_SECONDS = sum(leash.STOP_SECONDS) + 10.0
POLL_SECONDS = 0.005
_SHOWN_CHARACTERS = 4000


class CannotStart(ForqError):
    """A server or a supervisor for tests did not start. The message contains the end of its log."""

    code = "cannot_start"


class Leashed:
    """A program with a directory of its own. Both are gone after `stop`, and also if this process is killed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None
        # Short: the path of a Unix socket has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="forq-testing-"))

    @property
    def log(self) -> str:
        file = self.directory / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self, command: Sequence[str], environment: Mapping[str, str], is_ready: Callable[[], bool]) -> None:
        """Returns when `is_ready` returns true. CannotStart if the program ends, or is not ready in time."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", leash.__file__, str(self.directory), *command],
            stdin=subprocess.PIPE,
            env=dict(environment),
            # Ctrl-C is for pytest alone.
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        try:
            while not is_ready():
                ended = self.directory / "ended"
                if ended.exists():
                    raise CannotStart(f"{self._what} ended with exit status {ended.read_text()}: {self._end_of_log()}")
                if time.monotonic() > deadline:
                    raise CannotStart(f"{self._what} is not ready after {START_SECONDS:g} s: {self._end_of_log()}")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.stop()
            raise

    def _end_of_log(self) -> str:
        return self.log[-_SHOWN_CHARACTERS:].strip() or "it has logged nothing"

    def stop(self) -> None:
        """Waits until the program has ended."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        # Not only by closing: a process that was forked here may hold a copy.
        with suppress(BrokenPipeError):
            os.write(process.stdin.fileno(), b".")
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
