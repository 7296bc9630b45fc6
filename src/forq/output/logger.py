"""The logger: reads the output of all queues' processes, stores it per queue, and forwards it to stderr.

1. One loop reads the FIFOs, a piece of each in turn, so a flood in one queue does not delay the others.
2. Output above a queue's allowance is read, counted and dropped; one line per second reports how much.
3. It never blocks, except on the disk.
"""

import logging
import os
import resource
import select
import socket
import time
from typing import Any

import orjson

from forq.errors import ExitCode, ForqError
from forq.log_format import Redaction, as_json, iso_time
from forq.output.files import RotatingFile, sweep
from forq.output.format import (
    BURST,
    FIFO_NAME,
    LINE_COST,
    RATE,
    URGENT_BURST,
    URGENT_RATE,
    Allowance,
    OutputParser,
    Record,
    open_fifo,
)
from forq.output.forwarding import Forwarder
from forq.procs.context import Context
from forq.procs.liveness import DISK_SECONDS, expect_busy
from forq.procs.loop import service_loop
from forq.procs.scoreboard import Scoreboard, Slot
from forq.services.rpc import RpcServer

log = logging.getLogger("forq")

READ_BYTES = 64 * 1024
FLOOD_READ_BYTES = 1024 * 1024
# Output of a queue above its allowance is dropped for this long, and reported at this interval.
FLOOD_SECONDS = 1.0


class RunningJobs:
    """Reads the running jobs of a queue from the scoreboard."""

    def __init__(self, board: Scoreboard) -> None:
        self._board = board
        self._slots: list[Slot] = []

    def sole_running_job(self, queue: str) -> str | None:
        while len(self._slots) < self._board.highest:
            self._slots.append(self._board.slot(len(self._slots)))
        running = [slot for slot in self._slots if slot.position & 1 and slot.queue == queue]
        return running[0].job.decode(errors="replace") or None if len(running) == 1 else None


class QueueLog:
    """One queue: its FIFO, its allowance, its files."""

    def __init__(self, name: str, fd: int, file: RotatingFile, now: float) -> None:
        self.name = name
        self.fd = fd
        self._file = file
        self._parser = OutputParser(name)
        self.allowance = Allowance(RATE, BURST, now)
        self._urgent = Allowance(URGENT_RATE, URGENT_BURST, now)
        self._flood_until = 0.0
        self._dropped = self._parser.dropped
        self._report_at = 0.0
        self._disk_failed = False

    @property
    def pending(self) -> bool:
        """Whether `tick` may return records although nothing is read."""
        return self._parser.waiting or any(self._dropped)

    def read(self, jobs: RunningJobs, now: float) -> list[Record] | None:
        """Records of the next piece of output; None when there is none."""
        flooding = now < self._flood_until
        job = None if flooding else jobs.sole_running_job(self.name)
        try:
            chunk = os.read(self.fd, FLOOD_READ_BYTES if flooding else READ_BYTES)
        except BlockingIOError:
            return None
        if not flooding and self.allowance.take(0, now):
            records = self._parser.feed(chunk, job)
            # Charges stored bytes: most of a line of 10 MB is cut.
            self.allowance.spend(sum(len(record["message"]) + LINE_COST for record in records))
            return records
        if not flooding:
            self._flood_until = now + FLOOD_SECONDS
            self._report_at = max(self._report_at, now + FLOOD_SECONDS)
        return self._read_flood(chunk, now)

    def _read_flood(self, chunk: bytes, now: float) -> list[Record]:
        lines, size, urgent = self._parser.feed_flood(chunk)
        passed = [record for record in urgent if self._urgent.take(len(record["message"]) + LINE_COST, now)]
        self._dropped[0] += max(0, lines - len(passed))
        self._dropped[1] += size
        return passed

    def tick(self, now: float) -> list[Record]:
        """Returns overdue incomplete lines and the report of dropped output."""
        records = self._parser.overdue()
        if any(self._dropped) and now >= self._report_at:
            self._report_at = now + FLOOD_SECONDS
            records.append(self._dropped_record())
        return records

    def finish(self) -> list[Record]:
        records = self._parser.finish()
        if any(self._dropped):
            records.append(self._dropped_record())
        return records

    def append(self, records: list[Record]) -> None:
        try:
            self._file.append([_encode(record) for record in records])
        except OSError as exc:
            if not self._disk_failed:
                log.error("failed to write output queue=%s error=%s", self.name, exc)
            self._disk_failed = True
        else:
            self._disk_failed = False

    def close(self) -> None:
        os.close(self.fd)
        self._file.close()

    def _dropped_record(self) -> Record:
        lines, size = self._dropped
        self._dropped[:] = [0, 0]
        message = f"too much output; dropped lines={lines} bytes={size}"
        about = {"time": iso_time(time.time()), "level": "WARNING", "queue": self.name}
        return {**about, "stream": "log", "logger": "forq", "message": message}


def _encode(record: Record) -> bytes:
    try:
        return orjson.dumps(record) + b"\n"
    except TypeError:
        return as_json(record).encode() + b"\n"


TOTAL_RATE = 4 * 1024 * 1024
TICK_SECONDS = 0.1
SWEEP_SECONDS = 86400.0
DRAIN_SECONDS = 0.5
MAX_EVENTS = 64


def run_logger(context: Context, leash: socket.socket) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A FIFO and a file per queue.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return Logger(context, leash).run()


class Logger:
    def __init__(self, context: Context, leash: socket.socket, forwarder: Forwarder | None = None) -> None:
        self._context = context
        self._loop = service_loop(poller=select.epoll(), max_events=MAX_EVENTS)
        self._rpc = RpcServer(self._loop, leash, {"serve": self._serve, "drain": self._drain})
        self._forwarder = forwarder or Forwarder()
        self._redact = Redaction(context.redact)
        self._jobs = RunningJobs(context.scoreboard)
        self._by_name: dict[str, QueueLog] = {}
        self._pending: set[QueueLog] = set()
        self._served: set[str] = set()
        self._sweep_at: float | None = None
        self._rate_shared_at = 0.0
        self._busy: set[QueueLog] = set()

    def run(self) -> int:
        self._loop.run(self._after_pass)
        self._drain({})
        return ExitCode.STOPPED

    def _after_pass(self) -> float | None:
        self.tick(time.monotonic())
        if self._pending or self._forwarder.waiting:
            return TICK_SECONDS
        return None if self._sweep_at is None else max(0.0, self._sweep_at - time.monotonic())

    def tick(self, now: float) -> None:
        """Does everything that is due."""
        for output in list(self._pending):
            self._store(output, output.tick(now))
            if not output.pending:
                self._pending.discard(output)
        if now - self._rate_shared_at >= 1.0:
            self._share_rate(now)
        if self._sweep_at is not None and now >= self._sweep_at:
            self._sweep(now)
        self._forwarder.flush()
        if count := self._forwarder.take_dropped():
            log.warning("stderr was not read; dropped lines=%s", count)

    def _serve(self, params: dict[str, Any]) -> object:
        """Sets the queues to read."""
        names = self._served = set(params["queues"])
        gone = [output for name, output in self._by_name.items() if name not in names or not self._is_current(output)]
        for output in gone:
            self._close(output)
        for name in names - set(self._by_name):
            self._open(name)
        if gone or self._sweep_at is None:
            self._sweep_at = 0.0
        return {}

    def _drain(self, params: dict[str, Any]) -> object:
        """Reads and stores everything written so far."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for output in self._by_name.values():
            self._drain_fifo(output, deadline)
            self._store(output, output.finish())
        self._forwarder.flush()
        return {}

    def _open(self, name: str) -> None:
        directory = self._context.logs_dir / name
        try:
            fd = open_fifo(directory)
        except ForqError as exc:
            log.error("failed to open the output FIFO; output is not captured queue=%s error=%s", name, exc)
            return
        output = QueueLog(name, fd, RotatingFile(directory, self._context.log_max), time.monotonic())
        self._by_name[name] = output
        self._loop.add_reader(fd, lambda: self._read(output, time.monotonic()))

    def _is_current(self, output: QueueLog) -> bool:
        """False if a queue of the same name was deleted and created again."""
        try:
            return os.path.samestat(os.stat(self._context.logs_dir / output.name / FIFO_NAME), os.fstat(output.fd))
        except OSError:
            return False

    def _close(self, output: QueueLog) -> None:
        self._drain_fifo(output, time.monotonic() + DRAIN_SECONDS)
        self._store(output, output.finish())
        self._loop.remove_reader(output.fd)
        del self._by_name[output.name]
        self._pending.discard(output)
        self._busy.discard(output)
        output.close()

    def _drain_fifo(self, output: QueueLog, deadline: float) -> None:
        while (now := time.monotonic()) < deadline and self._read(output, now):
            pass

    def _read(self, output: QueueLog, now: float) -> bool:
        records = output.read(self._jobs, now)
        if records is None:
            return False
        self._busy.add(output)
        self._store(output, records)
        if output.pending:
            self._pending.add(output)
        return True

    def _store(self, output: QueueLog, records: list[Record]) -> None:
        if not records:
            return
        if self._redact:
            records = [{**record, "message": self._redact(record["message"])} for record in records]
        expect_busy(DISK_SECONDS)
        output.append(records)
        log_format = self._context.log_format
        for record in records:
            self._forwarder.send(log_format.render(record).encode(errors="backslashreplace") + b"\n")
        self._forwarder.flush()

    def _share_rate(self, now: float) -> None:
        """Queues that wrote in the last second share the total rate."""
        rate = min(RATE, TOTAL_RATE / max(1, len(self._busy)))
        for output in self._busy:
            output.allowance.rate = rate
        self._busy.clear()
        self._rate_shared_at = now

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + SWEEP_SECONDS
        expect_busy(DISK_SECONDS)
        try:
            swept = sweep(self._context.logs_dir, self._served, time.time())
        except OSError as exc:
            log.warning("failed to remove output of deleted queues error=%s", exc)
            return
        if swept:
            log.info("removed output of deleted queues queues=%s", swept)
