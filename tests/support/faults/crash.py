"""Starts a supervisor in which one process kills itself at a crash point (crash_points/)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.drive.processes import alive
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

_POINTS = Path(__file__).parent / "crash_points"


class Crash:
    def __init__(self, forq: Forq, file: Path) -> None:
        self.forq = forq
        self._file = file

    @property
    def happened(self) -> bool:
        return self._file.exists()

    def wait(self) -> int:
        """Waits until the process that reached the point is gone; returns its pid."""
        wait_until(lambda: self.happened and self._file.read_text(), what="the crash point is reached")
        pid = int(self._file.read_text())
        wait_until(lambda: not alive({pid}), what="the process is gone")
        return pid


@contextmanager
def crashing(point: str, directory: Path, *, redis: str | None = None, settings: str = "") -> Iterator[Crash]:
    file = directory / "crashed"
    path = os.pathsep.join([str(_POINTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "FORQ_CRASH_AT": point, "FORQ_CRASH_FILE": str(file)}
    with running(redis=redis, settings=settings, environment=environment) as forq:
        yield Crash(forq, file)
