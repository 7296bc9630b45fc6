"""The logger without a supervisor: it reads FIFOs and writes files and stderr."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forq.log_format import LogFormat
from forq.output.format import Line, open_fifo, pack_line, pack_notice
from forq.output.forwarding import Forwarder
from forq.output.logger import Logger
from forq.procs import jsonrpc
from forq.procs.scoreboard import Scoreboard
from tests.support.drive.contexts import context
from tests.support.drive.wait import wait_until, whole_lines

pytestmark = pytest.mark.timeout(60)


class Running:
    """A logger in a thread, and the other end of each of its connections."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.board = Scoreboard.create(8)
        self.stderr = directory / "stderr"
        self._leash, theirs = socket.socketpair()
        log_format = LogFormat(json=False)
        given = context(logs_dir=directory / "logs", log_format=log_format, scoreboard=self.board)
        forwarder = Forwarder(os.open(self.stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        self._thread = threading.Thread(target=Logger(given, theirs, forwarder).run)
        self._thread.start()
        self._asked = 0

    def ask(self, method: str, **params: Any) -> None:
        self._asked += 1
        self._leash.sendall(jsonrpc.request(self._asked, method, params))
        number, answer = jsonrpc.read_answer(self._leash.recv(65536).strip())
        assert (number, answer) == (self._asked, {})

    def fifo(self, queue: str) -> int:
        return open_fifo(self.directory / "logs" / queue, blocking=True)

    def records(self, queue: str) -> list[dict[str, Any]]:
        path = self.directory / "logs" / queue / "output.jsonl"
        return [json.loads(line) for line in whole_lines(path)]

    def messages(self, queue: str) -> list[str]:
        return [record["message"] for record in self.records(queue)]

    def job(self, queue: str, job: str) -> None:
        """A worker of the queue runs this job."""
        slot = self.board.slot(self.board.take())
        slot.queue, slot.job, slot.position = queue, job.encode(), 1

    def end(self) -> None:
        self._leash.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.end()


def tagged(text: str, level: str = "INFO", stream: str = "stdout") -> bytes:
    return b"".join(pack_line(Line(stream, level, int(time.time() * 1000), 1, 2, "t", None, False, text)))


def test_lines_go_to_the_file_of_the_queue_and_to_stderr(logger: Running) -> None:
    os.write(logger.fifo("a"), b"before the request\n")
    logger.ask("serve", queues=["a", "b"])
    os.write(logger.fifo("b"), tagged("of b"))
    wait_until(lambda: (logger.messages("a"), logger.messages("b")) == (["before the request"], ["of b"]))
    wait_until(lambda: logger.stderr.read_text().endswith(" INFO    b t: of b\n"))
    assert " INFO    a: before the request\n" in logger.stderr.read_text()


def test_a_raw_line_belongs_to_a_job_only_if_no_other_job_runs(logger: Running) -> None:
    logger.ask("serve", queues=["a"])
    logger.job("other", "elsewhere")
    logger.job("a", "one")
    os.write(logger.fifo("a"), b"first\n")
    wait_until(lambda: logger.messages("a") == ["first"])
    logger.job("a", "two")
    os.write(logger.fifo("a"), b"second\n")
    wait_until(lambda: len(logger.messages("a")) == 2)
    os.write(logger.fifo("a"), b"third\n" + pack_notice({"end": "marked"}))
    wait_until(lambda: len(logger.messages("a")) == 3)
    assert [record.get("job") for record in logger.records("a")] == ["one", None, "marked"]


def test_a_flood_is_dropped_except_urgent_lines_and_delays_no_other_queue(logger: Running) -> None:
    logger.ask("serve", queues=["flood", "calm"])
    flood, calm = logger.fifo("flood"), logger.fifo("calm")
    block = b"x" * 99 + b"\n"
    longest = 0.0
    for number in range(100):
        for _ in range(16):
            os.write(flood, block * 640)
        began = time.monotonic()
        os.write(calm, f"{number}\n".encode())
        wait_until(lambda number=number: logger.messages("calm")[-1:] == [str(number)])  # type: ignore[misc]
        longest = max(longest, time.monotonic() - began)
    os.write(flood, tagged("urgent", "ERROR", "log"))
    wait_until(lambda: "urgent" in logger.messages("flood"))
    wait_until(
        lambda: any(message.startswith("too much output; dropped lines=") for message in logger.messages("flood"))
    )
    assert longest < 3.0
    sizes = [path.stat().st_size for path in (logger.directory / "logs" / "flood").glob("output*.jsonl")]
    assert all(size <= 64 * 1024 for size in sizes)
    assert logger.stderr.stat().st_size < 60 << 20


def test_a_recreated_queue_is_read_from_its_new_fifo(logger: Running) -> None:
    logger.ask("serve", queues=["a"])
    old = logger.fifo("a")
    os.write(old, b"last words")
    (logger.directory / "logs" / "a" / "output.fifo").unlink()
    new = logger.fifo("a")
    # The logger was not notified of the deletion.
    logger.ask("serve", queues=["a"])
    assert logger.messages("a") == ["last words"]
    os.write(new, b"first words\n")
    wait_until(lambda: logger.messages("a") == ["last words", "first words"])


def test_written_lines_are_kept_when_the_logger_stops_or_loses_its_supervisor(tmp_path: Path) -> None:
    logger = Running(tmp_path)
    logger.ask("serve", queues=["a"])
    os.write(logger.fifo("a"), b"one\nhalf")
    logger.ask("drain")
    assert logger.messages("a") == ["one", "half"]
    os.write(logger.fifo("a"), b"two\n")
    logger.end()
    assert logger.messages("a") == ["one", "half", "two"]


def test_an_unwritable_disk_is_reported_once_and_lines_still_reach_stderr(
    logger: Running, caplog: pytest.LogCaptureFixture
) -> None:
    logger.ask("serve", queues=["a"])
    blocked = logger.directory / "logs" / "a" / "output.jsonl"
    blocked.symlink_to("/dev/full")
    for number in range(3):
        os.write(logger.fifo("a"), f"line {number}\n".encode())
        wait_until(lambda number=number: f"a: line {number}\n" in logger.stderr.read_text())  # type: ignore[misc]
    assert caplog.text.count("failed to write output queue=a") == 1
    blocked.unlink()
    os.write(logger.fifo("a"), b"again\n")
    wait_until(lambda: logger.messages("a") == ["again"])


def test_a_fifo_that_cannot_be_opened_affects_no_other_queue(logger: Running, caplog: pytest.LogCaptureFixture) -> None:
    (logger.directory / "logs" / "bad").mkdir(parents=True)
    (logger.directory / "logs" / "bad" / "output.fifo").write_text("mine")
    logger.ask("serve", queues=["bad", "good"])
    assert "failed to open the output FIFO; output is not captured queue=bad" in caplog.text
    os.write(logger.fifo("good"), b"fine\n")
    wait_until(lambda: logger.messages("good") == ["fine"])
    assert (logger.directory / "logs" / "bad" / "output.fifo").read_text() == "mine"
