"""The log of actions: two lines each, durable, and no action without the first."""

import asyncio
import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from forq.errors import ForqError, UnknownJob, UsageError
from forq.web.access import User
from forq.web.action_log import ActionLog, ActionLogError

ALICE = User("alice", "act", "password", "10.0.0.9")
KILL = "job.kill"
TARGET = {"queue": "mails", "job": "7f3a"}
NOW = 1_800_000_000.5


def run(log: ActionLog, *, fail: BaseException | None = None, user: User = ALICE, **given: Any) -> None:
    async def act() -> None:
        async with log.recorded(user, KILL, given.get("target", TARGET), given.get("params")):
            if fail is not None:
                raise fail

    asyncio.run(act())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "actions.jsonl"


def test_an_action_is_logged_before_and_after(path: Path) -> None:
    log = ActionLog(path, clock=lambda: NOW)

    async def act() -> None:
        async with log.recorded(ALICE, KILL, TARGET, {"force": True}) as entry:
            assert len(lines(path)) == 1
            entry.detail = "killed"

    asyncio.run(act())
    log.close()
    first, second = lines(path)
    entry_id = first["id"]
    assert len(entry_id) == 16
    at = "2027-01-15T08:00:00.500Z"
    assert first == {
        "id": entry_id,
        "at": at,
        "user": "alice",
        "via": "password",
        "from": "10.0.0.9",
        "action": "job.kill",
        "target": {"queue": "mails", "job": "7f3a"},
        "params": {"force": True},
    }
    assert second == {"id": entry_id, "at": at, "result": "done", "detail": "killed"}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("fail", "result", "detail"),
    [
        (UnknownJob("there is no job 7f3a"), "refused", "there is no job 7f3a"),
        (ValueError("a bug"), "failed", "ValueError: a bug"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt: "),
    ],
)
def test_an_error_is_logged_and_raised(path: Path, fail: BaseException, result: str, detail: str) -> None:
    log = ActionLog(path)
    with pytest.raises(type(fail)):
        run(log, fail=fail)
    log.close()
    assert lines(path)[1] | {"id": "", "at": ""} == {"id": "", "at": "", "result": result, "detail": detail}


def test_a_request_that_is_cancelled_has_its_second_line(path: Path) -> None:
    log = ActionLog(path)

    async def act() -> None:
        async def hang() -> None:
            async with log.recorded(ALICE, KILL, TARGET):
                started.set()
                await asyncio.Event().wait()

        started = asyncio.Event()
        task = asyncio.create_task(hang())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(act())
    log.close()
    assert lines(path)[1]["result"] == "unknown"


@pytest.mark.parametrize("written", ["nothing", "part"])
def test_an_action_that_cannot_be_logged_is_not_carried_out(path: Path, written: str) -> None:
    full = True

    def write(fd: int, data: bytes) -> int:
        if not full:
            return os.write(fd, data)
        if written == "part":
            return os.write(fd, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = ActionLog(path, write=write)
    carried_out = []

    async def act() -> None:
        async with log.recorded(ALICE, KILL, TARGET):
            carried_out.append(1)

    with pytest.raises(ActionLogError, match=r"was not carried out.*(No space left|disk full)"):
        asyncio.run(act())
    assert carried_out == []
    full = False
    asyncio.run(act())
    log.close()
    # A half line has an end of its own and spoils none after it.
    assert [json.loads(line).keys() >= {"id"} for line in path.read_text().splitlines()[-2:]] == [True, True]
    assert len(path.read_text().splitlines()) == (3 if written == "part" else 2)


def test_the_end_of_an_action_that_cannot_be_logged_goes_to_the_log_of_forq(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def write(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.write(fd, data)

    log = ActionLog(path, write=write)
    run(log)
    log.close()
    assert len(lines(path)) == 1
    assert '"result":"done"' in caplog.text


@pytest.mark.parametrize("name", ['a"}\n{"id":"forged"}', "a\u2028b", "a\x00\x1b[31mb", "\udc80", "a\u202eb"])
def test_no_name_can_forge_a_line(path: Path, name: str) -> None:
    log = ActionLog(path)
    user = User(name, "act", "proxy", name)
    run(log, user=user, target={"queue": name, name: "x"}, params={"value": name})
    log.close()
    content = path.read_bytes()
    assert content.count(b"\n") == 2
    assert content.isascii()
    assert not any(byte < 32 and byte != 10 for byte in content)
    assert lines(path)[0]["user"] == name


def test_long_text_is_cut_and_nested_values_are_refused(path: Path) -> None:
    log = ActionLog(path)
    run(log, user=User("x" * 9000, "act", "proxy", "y" * 9000), params={"value": "z" * 9000})
    assert path.stat().st_size < 2000
    # They could be the data of a job.
    for params in (
        {"data": {"card": "4111"}},
        {"data": ["4111"]},
        {"data": b"4111"},
        dict.fromkeys(map(str, range(99))),
    ):
        with pytest.raises(UsageError):
            run(log, params=params)
    log.close()
    assert "4111" not in path.read_text()


def test_it_rotates_at_its_size_and_keeps_one_earlier_file(path: Path) -> None:
    log = ActionLog(path, max_bytes=2000)
    for _ in range(40):
        run(log)
    log.close()
    assert sorted(os.listdir(path.parent)) == ["actions.jsonl", "actions.jsonl.1"]
    earlier = path.with_name("actions.jsonl.1")
    for file in (path, earlier):
        assert 0 < file.stat().st_size <= 2000
        assert file.stat().st_mode & 0o777 == 0o600
    ids = [line["id"] for line in lines(earlier) + lines(path)]
    assert len(ids) == len(lines(earlier)) + len(lines(path))


def test_a_file_that_is_moved_or_removed_is_created_again(path: Path) -> None:
    log = ActionLog(path)
    run(log)
    path.rename(path.with_name("kept"))
    run(log)
    path.unlink()
    run(log)
    log.close()
    assert len(lines(path)) == len(lines(path.with_name("kept"))) == 2


def test_a_line_that_an_earlier_run_did_not_end_is_ended(path: Path) -> None:
    path.write_bytes(b'{"id":"half')
    log = ActionLog(path)
    run(log)
    log.close()
    assert path.read_text().splitlines()[0] == '{"id":"half'
    assert len(path.read_text().splitlines()) == 3


def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    path.touch(0o644)
    log = ActionLog(path)
    run(log)
    log.close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "directory", "fifo", "nothing"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "link":
        path.symlink_to(tmp_path / "target")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = tmp_path / "nothing" / "log"
    log = ActionLog(path)
    with pytest.raises(ActionLogError):
        run(log)
    log.close()
    assert not (tmp_path / "target").exists()


def test_the_event_loop_does_not_wait_for_the_disk_and_lines_keep_their_order(path: Path) -> None:
    slow = threading.Event()

    def write(fd: int, data: bytes) -> int:
        slow.wait(20)
        return os.write(fd, data)

    log = ActionLog(path, write=write)

    async def act() -> list[str]:
        begun = [asyncio.ensure_future(log.begin(ALICE, KILL, {"n": n})) for n in range(50)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(each.done() for each in begun)
        slow.set()
        return [await each for each in begun]

    ids = asyncio.run(act())
    log.close()
    assert [line["id"] for line in lines(path)] == ids
    assert [line["target"]["n"] for line in lines(path)] == list(range(50))


def test_each_line_is_one_write(path: Path) -> None:
    writes: list[bytes] = []

    def write(fd: int, data: bytes) -> int:
        writes.append(data)
        return os.write(fd, data)

    log = ActionLog(path, write=write)
    run(log)
    log.close()
    assert b"".join(writes) == path.read_bytes()
    assert [data.endswith(b"}\n") and data.count(b"\n") == 1 for data in writes] == [True, True]


def test_without_a_file_the_lines_go_to_a_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "forq.web.actions"):
        log = ActionLog(None)
        run(log)
        log.close()
    found = [json.loads(record.getMessage()) for record in caplog.records if record.name == "forq.web.actions"]
    assert [line.get("action") or line.get("result") for line in found] == ["job.kill", "done"]


def test_an_error_of_the_log_is_an_error_of_forq() -> None:
    assert issubclass(ActionLogError, ForqError)
