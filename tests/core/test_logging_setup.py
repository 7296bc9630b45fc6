"""forq's own log: it never waits for a reader, says what it dropped, and shows what came with a record."""

import errno
import json
import logging
import os
import pty
import socket
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forq.log_format import LogFormat
from forq.logging_setup import LineFormatter, StderrHandler, WarningThrottle
from forq.output.forwarding import MAX_WAITING_BYTES
from forq.procs.loop import Loop

# What a line takes at most while nobody reads, on a machine whose CPUs are all taken. One that waits, waits for ever.
SOON_SECONDS = 5.0
# As many as fit into a pipe that holds 16 pieces, and is read afterwards.
WORDS = 15


def record(text: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("forq", logging.INFO, "", 0, text, arguments, None)
    made.__dict__.update(extra)
    return made


def emit_all(handler: StderrHandler, count: int) -> float:
    """So many lines of 100 bytes; the longest time that one took."""
    longest = 0.0
    for number in range(count):
        began = time.monotonic()
        handler.emit(record(f"line {number:06} {'x' * 60}"))
        longest = max(longest, time.monotonic() - began)
    return longest


def refuse_to_write(*arguments: object) -> int:
    raise OSError(errno.EOPNOTSUPP, "no RWF_NOWAIT for pipes")


@pytest.fixture(params=["pipe", "foreign pipe", "foreign pipe, old kernel", "terminal", "socket"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A descriptor to read from, and one that is a stderr."""
    if request.param == "socket":
        ours, theirs = socket.socketpair()
        with ours, theirs:
            yield ours.fileno(), theirs.fileno()
        return
    if request.param == "terminal":
        reading, writing = pty.openpty()
        tty.setraw(writing)
    else:
        reading, writing = os.pipe()
    if "old kernel" in request.param:
        monkeypatch.setattr(os, "pwritev", refuse_to_write)
    if "foreign" in request.param:
        real: Callable[..., int] = os.open

        def refuse(path: str, *arguments: int) -> int:
            if path.startswith("/proc/self/fd/"):
                raise PermissionError("a pipe of another user")
            return real(path, *arguments)

        monkeypatch.setattr(os, "open", refuse)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_a_stderr_that_nobody_reads_holds_up_nobody_and_loses_a_count(ends: tuple[int, int]) -> None:
    reading, writing = ends
    loop = Loop()
    handler = StderrHandler(writing)
    handler.setFormatter(LineFormatter(LogFormat(json=False)))
    handler.attach(loop)
    assert emit_all(handler, 20_000) < SOON_SECONDS
    assert os.get_blocking(writing), "others write there, too"
    os.set_blocking(reading, False)
    got = b""
    deadline = time.monotonic() + 20
    while b"dropped log lines" not in got and time.monotonic() < deadline:
        try:
            got += os.read(reading, 1 << 16)
        except BlockingIOError:
            # Nothing more is said: the loop alone takes care of what waits.
            loop.tick(0.01)
    lines = got.decode().splitlines()
    numbers = [int(line.split("line ")[1][:6]) for line in lines[:-1]]
    assert numbers == list(range(len(numbers))), "the first ones, whole and in order"
    assert lines[-1].endswith(f"stderr was not read; dropped log lines count={20_000 - len(numbers)}")
    assert len(got) > MAX_WAITING_BYTES
    handler.emit(record("and on"))
    assert os.read(reading, 1 << 16).endswith(b"and on\n")
    # Nothing waits, so the loop has nothing to do.
    began = time.monotonic()
    loop.tick(0.05)
    assert time.monotonic() - began >= 0.04
    handler.close()


def test_what_a_healthy_reader_is_told_is_there_before_a_crash(ends: tuple[int, int]) -> None:
    reading, writing = ends
    pid = os.fork()
    if pid == 0:
        handler = StderrHandler(writing)
        for number in range(WORDS):
            handler.emit(record(f"word {number}"))
        os.kill(os.getpid(), 9)
    assert os.waitpid(pid, 0)[1] == 9
    got = b""
    while b"word %d\n" % (WORDS - 1) not in got:
        got += os.read(reading, 1 << 16)
    assert got.replace(b"\r", b"").splitlines() == [b"word %d" % number for number in range(WORDS)]


def test_a_forked_process_writes_by_itself_and_not_what_waits_in_its_parent() -> None:
    reading, writing = os.pipe()
    handler = StderrHandler(writing)
    handler.attach(Loop())
    emit_all(handler, 1000)
    os.set_blocking(reading, False)
    while True:
        try:
            os.read(reading, 1 << 16)
        except BlockingIOError:
            break
    pid = os.fork()
    if pid == 0:
        os.closerange(writing + 1, 256)
        handler.emit(record("the child"))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 1 << 16) == b"the child\n"
    handler.emit(record("the parent"))
    assert os.read(reading, 100).startswith(b"line ")
    handler.close()
    os.close(reading)
    os.close(writing)


def test_the_end_of_a_process_waits_for_a_slow_reader_for_a_moment_only() -> None:
    reading, writing = os.pipe()
    handler = StderrHandler(writing)
    emit_all(handler, 1000)
    began = time.monotonic()
    handler.close()
    handler.close()
    assert 0.9 < time.monotonic() - began < 5
    os.close(reading)
    os.close(writing)


def test_one_line_that_is_longer_than_what_may_wait_is_written_whole(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        handler = StderrHandler(file.fileno())
        handler.emit(record("y" * (MAX_WAITING_BYTES + 1)))
        handler.close()
    assert (tmp_path / "log").stat().st_size == MAX_WAITING_BYTES + 2


def test_extra_fields_are_shown_behind_the_message_in_both_formats() -> None:
    made = record("a client %s", "left", uid=1000, pid_of_peer=77)
    assert LineFormatter(LogFormat(json=False)).format(made).endswith("INFO    a client left uid=1000 pid_of_peer=77")
    assert (
        json.loads(LineFormatter(LogFormat(json=True)).format(made))["message"]
        == "a client left uid=1000 pid_of_peer=77"
    )


def test_what_others_can_cause_is_one_line_a_second_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    later: list[Callable[[], None]] = []
    seldom = WarningThrottle(logging.getLogger("forq"), lambda seconds, call: later.append(call))
    for number in range(1000):
        seldom.warn(f"client refused uid={number}")
    assert [each.message for each in caplog.records] == ["client refused uid=0"]
    later.pop()()
    assert caplog.records[1].message == "client refused uid=999 (and 998 more within 1 s)"
    later.pop()()
    assert not later, "when there is nothing to say, nothing is to be done"
    seldom.warn("client refused uid=5")
    assert len(caplog.records) == 3
