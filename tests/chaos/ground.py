"""The evidence of a run: files outside Redis, each of them append-only."""

import os
from dataclasses import dataclass
from pathlib import Path

# Passes the directory of the run to the processes that leave evidence.
GROUND = "CHAOS_GROUND"


@dataclass(frozen=True)
class Ground:
    directory: Path

    @property
    def trace(self) -> Path:
        """Trace of the handlers (tests/support/handlers/traced.py)."""
        return self.directory / "trace"

    @property
    def joined(self) -> Path:
        """PID PROCESSOR, for each worker that registered."""
        return self.directory / "joined"

    @property
    def crashed(self) -> Path:
        """POINT PID, before the process that reached it kills itself."""
        return self.directory / "crashed"

    @property
    def armed(self) -> Path:
        """A directory: one file per armed crash point."""
        return self.directory / "armed"

    @property
    def verdicts(self) -> Path:
        """A directory: one file per producer, VERDICT QUEUE ID ID …"""
        return self.directory / "verdicts"

    @property
    def taken_away(self) -> Path:
        """cancel|remove ID, of calls that succeeded or whose answer was lost."""
        return self.directory / "taken-away"

    @property
    def plans(self) -> Path:
        """JOB FLOW WHEN NEEDED …, for jobs of flows, callbacks and members of batches, before they are enqueued."""
        return self.directory / "plans"

    @property
    def story(self) -> Path:
        """What the nemesis did, one line each."""
        return self.directory / "story"

    def prepare(self) -> None:
        self.armed.mkdir(parents=True)
        self.verdicts.mkdir()


def append(path: Path, line: str) -> None:
    """Appends one line in one write, so that lines of several processes do not mix and a kill leaves no half line."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def lines(path: Path) -> list[list[str]]:
    """The words of each line; none if the file was never written."""
    return [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []
