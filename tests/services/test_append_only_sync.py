"""The embedded server's append-only files are synced when they have grown, and only then."""

import os
from pathlib import Path

import pytest

from forq.services.scribe import AppendOnlySync


def test_a_file_is_synced_when_it_has_grown_or_was_replaced_and_only_then(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    (folder / "appendonly.aof.1.base.rdb").write_bytes(b"base")
    file = folder / "appendonly.aof.1.incr.aof"
    sync = AppendOnlySync(tmp_path)
    assert sync.sync() == []
    file.write_bytes(b"one")
    assert sync.sync() == [file.name]
    assert sync.sync() == []
    with file.open("ab") as stream:
        stream.write(b"two")
    assert sync.sync() == [file.name]
    other = folder / "appendonly.aof.2.incr.aof"
    other.write_bytes(b"three")
    file.unlink()
    assert sync.sync() == [other.name]
    os.replace(_copy(other), other)
    assert sync.sync() == [other.name], "a new file with the same name"


def test_a_failed_sync_is_logged_once_a_minute_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.incr.aof").write_bytes(b"one")
    sync = AppendOnlySync(tmp_path)

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", refuse)
        assert sync.sync() == sync.sync() == []
    assert [record.message for record in caplog.records] == [
        f"cannot sync the data of the embedded server to disk file={tmp_path}/a.incr.aof "
        "error=[Errno 5] Input/output error"
    ]
    assert sync.sync() == ["a.incr.aof"]


def _copy(path: Path) -> Path:
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    return copy
