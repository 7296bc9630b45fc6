"""A wall clock that a test sets for the programs that it starts: shifted_clock.c, if there is a compiler."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parent / "shifted_clock.c"


class ShiftedClock:
    """Programs started with `environment` see the time shifted by this many seconds."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("a clock that can be set needs a C compiler (cc)")
        self._file = directory / "clock"
        self._library = directory / "shifted_clock.so"
        self.shift(0)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a clock that can be set cannot be compiled here: {done.stderr.strip()[:200]}")

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "FORQ_TEST_CLOCK": str(self._file)}

    def shift(self, seconds: int) -> None:
        """Writes in place, because the programs have the file mapped."""
        with open(self._file, "r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", seconds))
