"""Watching the directories of apps with inotify."""

import os
import shutil
from pathlib import Path

from forq.supervisor.reload import DirectoryWatch
from tests.supervisor.fakes import FakeLoop


def test_a_directory_that_is_deleted_and_created_again_is_watched_again(tmp_path: Path) -> None:
    loop, changed = FakeLoop(), list[str | None]()
    watch = DirectoryWatch(loop, changed.append)  # type: ignore[arg-type]
    ((fd, read),) = loop.readers.items()
    package = tmp_path / "package"
    package.mkdir()
    watch.add(str(package))
    shutil.rmtree(package)
    package.mkdir()
    read()
    assert changed == [None], "the files in it may have changed"
    watch.add(str(package))
    (package / "tasks.py").touch()
    read()
    assert changed == [None, str(package / "tasks.py")]
    os.close(fd)
