"""Servers with a clock that jumps or a disk that fills up."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.drive.server import Server
from tests.support.faults.shifted_clock import ShiftedClock

_MOUNT = 'mount -t tmpfs -o size=4m,mode=700 forq-test "$0" && exec "$@"'


class ClockServer(Server):
    """A server whose wall clock the test sets."""

    def __init__(self, clock: ShiftedClock) -> None:
        super().__init__()
        self._clock = clock

    def _command(self) -> list[str]:
        settings = [f"{name}={value}" for name, value in self._clock.environment.items()]
        # env and unshare exec the program, so the pid is the server's.
        return ["env", *settings, *super()._command()]


class SmallDiskServer(Server):
    """A server whose append-only file is on a private disk of 4 MB that the test can fill."""

    def __init__(self) -> None:
        if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
            pytest.skip("a disk of its own needs a mount namespace (as root)")
        super().__init__(appendonly=True)
        self.disk = self.directory / "disk"
        self.disk.mkdir()

    @property
    def ballast(self) -> Path:
        """As the server sees the file system."""
        return Path(f"/proc/{self.pid}/root{self.disk}/ballast")

    def fill(self) -> None:
        """Takes all remaining space."""
        with open(self.ballast, "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError as exc:
                    if exc.errno == errno.ENOSPC:
                        return
                    raise

    def free(self) -> None:
        os.unlink(self.ballast)

    def _command(self) -> list[str]:
        server = [*super()._command(), "--dir", str(self.disk), "--appendfsync", "everysec"]
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, str(self.disk), *server]
