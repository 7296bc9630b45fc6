"""Syncs the embedded server's append-only files to disk, once a second while they grow.

The server writes them before it replies and never syncs. With `everysec` and a slow disk it would hold back writes for
up to two seconds but reply at once, so a kill would lose acknowledged jobs. This way a killed server loses nothing,
and a power failure loses about the last second.
"""

import logging
import os
import threading
import time
from pathlib import Path

SYNC_SECONDS = 1.0
LOG_SECONDS = 60.0

log = logging.getLogger("forq")


class AppendOnlySync:
    """Runs in a thread: a sync may block for as long as the disk takes. `directory`: the server's data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._synced: dict[str, tuple[int, int]] = {}
        self._logged_at = -LOG_SECONDS

    def start(self) -> None:
        threading.Thread(target=self._run, name="append-only-sync", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(SYNC_SECONDS)
            self.sync()

    def sync(self) -> list[str]:
        """Syncs the files that have changed and returns their names."""
        synced = []
        for path in sorted(self._directory.glob("**/*.incr.aof")):
            try:
                if self._sync_one(path):
                    synced.append(path.name)
            except FileNotFoundError:
                continue  # the server has replaced it
            except OSError as exc:
                self._log_failure(path, exc)
        return synced

    def _sync_one(self, path: Path) -> bool:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            about = os.fstat(fd)
            seen = (about.st_ino, about.st_size)
            if self._synced.get(path.name) == seen:
                return False
            os.fdatasync(fd)
        finally:
            os.close(fd)
        # Later writes make the file larger than this; the next call syncs them.
        self._synced[path.name] = seen
        return True

    def _log_failure(self, path: Path, exc: OSError) -> None:
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = time.monotonic()
            log.error("cannot sync the data of the embedded server to disk file=%s error=%s", path, exc)
