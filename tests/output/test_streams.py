"""Output of a queue's process as it arrives in the FIFO."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import pytest

from forq.errors import ForqError
from forq.output.format import FIFO_NAME, MAX_WRITE, Line, open_fifo, unpack
from forq.output.streams import CapturedStream, CaptureHandler
from forq.output.writer import CURRENT_JOB, OutputWriter


class Fifo:
    """The reading end of a FIFO with an Output at the other end."""

    def __init__(self, directory: Path) -> None:
        self.fd = open_fifo(directory)
        self.output = OutputWriter()
        self.output.open(open_fifo(directory), ())
        self.stdout = CapturedStream(self.output, "stdout", 1)

    def writes(self) -> list[bytes]:
        data = b""
        try:
            while True:
                data += os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return data.splitlines(keepends=True)

    def notes(self) -> list[Line | dict[str, object] | None]:
        return [unpack(write[1:-1]) for write in self.writes()]

    def lines(self) -> list[Line]:
        return [note for note in self.notes() if isinstance(note, Line)]

    def texts(self) -> list[tuple[str | None, str, bool]]:
        return [(line.job, line.text, line.more) for line in self.lines()]


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    token = CURRENT_JOB.set("j")
    fifo = Fifo(tmp_path)
    yield fifo
    CURRENT_JOB.reset(token)


def test_a_print_is_written_as_one_line(fifo: Fifo) -> None:
    print("a", 1, None, file=fifo.stdout)
    print("b", end="", file=fifo.stdout)
    print("c\nd\n\ne", file=fifo.stdout)
    assert fifo.texts() == [("j", "a 1 None", False), ("j", "bc\nd\n", False), ("j", "e", False)]


def test_a_line_has_its_time_stream_thread_and_job(fifo: Fifo) -> None:
    before = time.time() * 1000
    print("x", file=fifo.stdout)
    (line,) = fifo.lines()
    assert before - 1 <= line.millis <= time.time() * 1000
    assert (line.pid, line.thread, line.stream, line.level) == (os.getpid(), threading.get_ident(), "stdout", "INFO")


def test_a_partial_line_waits_for_its_end_or_the_end_of_its_job(fifo: Fifo) -> None:
    fifo.stdout.write("half")
    assert (fifo.writes(), fifo.output.pending) == ([], True)
    fifo.output.finish_jobs()
    assert (fifo.texts(), fifo.output.pending) == ([("j", "half", False)], False)
    fifo.stdout.write("of j")
    CURRENT_JOB.set("k")
    fifo.stdout.write("of k\n")
    assert fifo.texts() == [("j", "of j", False), ("k", "of k", False)]


def test_a_flush_writes_a_partial_line_marked_as_continued(fifo: Fifo) -> None:
    print(".", end="", flush=True, file=fifo.stdout)
    print(" done", file=fifo.stdout)
    assert fifo.texts() == [("j", ".", True), ("j", " done", False)]


def test_threads_do_not_share_partial_lines(fifo: Fifo) -> None:
    def half_and_half(job: str) -> None:
        CURRENT_JOB.set(job)
        for number in range(200):
            fifo.stdout.write(f"{job} ")
            fifo.stdout.write(f"{number}\n")

    threads = [threading.Thread(target=copy_context().run, args=(half_and_half, f"t{n}")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fifo.texts()) == sorted((f"t{n}", f"t{n} {m}", False) for n in range(4) for m in range(200))


@pytest.mark.parametrize("text", ["x" * 8000, "ü" * 8000, "\x01" * 8000, "\ud800" * 5000, "😀" * 8000])
def test_no_write_exceeds_pipe_buf_and_nothing_is_missing(fifo: Fifo, text: str) -> None:
    print(text, file=fifo.stdout)
    writes = fifo.writes()
    assert all(len(write) <= MAX_WRITE for write in writes)
    lines = [unpack(write[1:-1]) for write in writes]
    assert all(isinstance(line, Line) for line in lines)
    joined = "".join(line.text for line in lines if isinstance(line, Line))
    assert joined == text.encode(errors="backslashreplace").decode()
    assert [line.more for line in lines if isinstance(line, Line)] == [True] * (len(lines) - 1) + [False]


def test_a_huge_line_is_truncated_by_its_writer(fifo: Fifo) -> None:
    fifo.stdout.write("x" * 10_000_000)
    fifo.stdout.write("y" * 10_000_000 + "\n")
    assert len("".join(line.text for line in fifo.lines())) == 8193


def test_many_lines_of_one_write_share_writes_and_keep_their_order(fifo: Fifo) -> None:
    text = "\n".join(f"{number} {'z' * (number % 97)}" for number in range(3000))
    fifo.stdout.write(text + "\n")
    lines = fifo.lines()
    assert "\n".join(line.text for line in lines) == text
    assert len(lines) < 300


def test_any_bytes_are_written_as_text(fifo: Fifo) -> None:
    assert fifo.stdout.buffer.write(b"\xff\x00 \xc3\xbc\n") == 6
    assert fifo.texts() == [("j", "\\xff\x00 ü", False)]
    with pytest.raises(TypeError, match="must be str, not bytes"):
        fifo.stdout.write(b"no")  # type: ignore[arg-type]


def test_the_streams_have_the_usual_attributes_of_text_streams(fifo: Fifo) -> None:
    stdout = fifo.stdout
    assert (stdout.fileno(), stdout.isatty(), stdout.encoding, stdout.writable()) == (1, False, "utf-8", True)
    stdout.reconfigure(line_buffering=True)
    stdout.close()
    assert not stdout.closed
    print("still", file=stdout)
    assert fifo.texts() == [("j", "still", False)]


def test_a_flood_is_dropped_and_counted_by_the_writer_and_urgent_messages_pass(fifo: Fifo) -> None:
    began, notes = time.monotonic(), []
    for _ in range(400):
        fifo.stdout.write(("x" * 99 + "\n") * 1000)
        notes += fifo.notes()
    fifo.output.write_message("log", "ERROR", "urgent", job="j")
    notes += fifo.notes()
    assert time.monotonic() - began < 10
    fifo.output.finish_jobs()
    notes += fifo.notes()
    lines = [line for note in notes if isinstance(note, Line) for line in note.text.split("\n")]
    dropped = [note["left_out"] for note in notes if isinstance(note, dict)]
    assert "urgent" in lines
    assert sum(note[0] for note in dropped) + len(lines) - 1 == 400_000  # type: ignore[index]
    assert len(lines) < 200_000
    assert not fifo.output.pending


def test_a_full_fifo_blocks_once_briefly_and_is_reported_afterwards(fifo: Fifo) -> None:
    began = time.monotonic()
    for _ in range(3000):
        print("x" * 800, file=fifo.stdout)
    assert 0.15 < time.monotonic() - began < 3
    fifo.writes()
    print("room again", file=fifo.stdout)
    (note, line) = fifo.notes()
    assert isinstance(note, dict)
    assert note["left_out"][0] > 1000  # type: ignore[index]
    assert isinstance(line, Line)
    assert line.text == "room again"


def test_a_closed_and_reused_descriptor_is_not_written_to(tmp_path: Path) -> None:
    fd = open_fifo(tmp_path)
    output = OutputWriter()
    output.open(fd, ())
    os.close(fd)
    print("to nobody", file=CapturedStream(output, "stdout", 1))
    assert os.open(tmp_path / "mine", os.O_WRONLY | os.O_CREAT) == fd
    print("not here", file=CapturedStream(output, "stdout", 1))
    os.close(fd)
    assert (tmp_path / "mine").read_text() == ""


def test_the_root_handler_writes_level_logger_and_a_traceback_shortened_in_the_middle(fifo: Fifo) -> None:
    logger = logging.Logger("my.lib")
    logger.addHandler(CaptureHandler(fifo.output))
    logger.warning("w %s", 1)
    try:
        raise ValueError("a" * 20_000 + "the end")
    except ValueError:
        logger.exception("caught")
    first, *rest = fifo.lines()
    assert (first.stream, first.level, first.logger, first.job, first.text) == ("log", "WARNING", "my.lib", "j", "w 1")
    message = "".join(line.text for line in rest)
    assert message.startswith("caught\nTraceback")
    assert message.endswith("the end")
    assert len(message) < 8200


def test_a_message_that_cannot_be_formatted_does_not_fail_its_job(fifo: Fifo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", fifo.stdout)
    logger = logging.Logger("my.lib")
    logger.addHandler(CaptureHandler(fifo.output))
    logger.warning("%d", "x")
    assert any("Logging error" in line.text for line in fifo.lines())


def test_a_path_that_is_not_a_fifo_is_refused(tmp_path: Path) -> None:
    (tmp_path / FIFO_NAME).write_text("a file")
    with pytest.raises(ForqError, match="is not a FIFO"):
        open_fifo(tmp_path)
    (tmp_path / FIFO_NAME).unlink()
    (tmp_path / FIFO_NAME).symlink_to("/dev/null")
    with pytest.raises(ForqError, match="cannot open"):
        open_fifo(tmp_path)
