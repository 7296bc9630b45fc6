"""The FIFOs that the queues' processes write to. Held open here, so that what a process that dies at once has written
is still there when the logger comes to read it, also while there is no logger."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from forq.errors import ForqError
from forq.output import format as output_pipe

log = logging.getLogger("forq")


class Outputs:
    def __init__(self, logs_dir: Path) -> None:
        self._logs_dir = logs_dir
        self._directory = str(logs_dir)
        self._fds: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._fds)

    def open(self, name: str) -> None:
        """Safe to repeat. If it cannot be had, the queue's processes write to our own stdout and stderr."""
        if name in self._fds:
            return
        try:
            self._fds[name] = output_pipe.open_pipe(self._logs_dir / name)
        except ForqError as exc:
            log.error("no log of the queue's output queue=%s error=%s", name, exc)

    def directory(self, name: str) -> str | None:
        """Where the process of a queue finds its FIFO; None if there is none."""
        return f"{self._directory}/{name}" if name in self._fds else None

    def remove(self, name: str) -> None:
        """The queue is deleted. Whoever has the FIFO open can still use it; a queue made later gets another."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)
            with suppress(OSError):
                os.unlink(self._logs_dir / name / output_pipe.NAME)
                # Only if nothing else was kept there.
                os.rmdir(self._logs_dir / name)
