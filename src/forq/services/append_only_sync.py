"""Brings the embedded server's append-only files to the disk, once a second while they grow.

The server writes them before it answers, and leaves the syncing to this. If it synced by itself (everysec) and the disk
was slow, it would hold back what it writes for up to two seconds and answer all the same; a kill would lose what was
acknowledged. So a killed server loses nothing, and a power cut what came in the last second or so.
"""

import logging
import os
import threading
import time
from pathlib import Path

SYNC_SECONDS = 1.0
COMPLAIN_SECONDS = 60.0

log = logging.getLogger("forq")


class AppendOnlySync:
    """`directory`: the server's own. A thread: a sync may take as long as the disk likes; nobody else waits for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._synced: dict[str, tuple[int, int]] = {}
        self._complained_at = -COMPLAIN_SECONDS

    def start(self) -> None:
        threading.Thread(target=self._run, name="append-only-sync", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(SYNC_SECONDS)
            self.sync()

    def sync(self) -> list[str]:
        """One look at all files; those that were synced."""
        synced = []
        for path in sorted(self._directory.glob("**/*.incr.aof")):
            try:
                if self._sync_one(path):
                    synced.append(path.name)
            except FileNotFoundError:
                continue  # the server has put a new one in its place
            except OSError as exc:
                self._complain(path, exc)
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
        # What was written meanwhile makes it larger than this: the next look syncs it.
        self._synced[path.name] = seen
        return True

    def _complain(self, path: Path, exc: OSError) -> None:
        if time.monotonic() - self._complained_at >= COMPLAIN_SECONDS:
            self._complained_at = time.monotonic()
            log.error("the embedded server's data cannot be synced to the disk file=%s error=%s", path, exc)
