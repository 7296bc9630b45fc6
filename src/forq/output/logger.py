"""The output of one queue, as the logger sees it: its FIFO, its allowance, its files.

The logger: reads what all queues' processes write, keeps it per queue, and passes it on to the supervisor's stderr.

1. One loop reads the FIFOs, a piece of each in turn, so that a flood in one holds up no other.
2. What a queue writes above its allowance is read, counted and left out; a line says how much, once a second.
3. It never waits for anybody but the disk.
"""

import logging
import os
import resource
import select
import socket
import time
from typing import Any

import orjson

from forq import exits
from forq.errors import ForqError
from forq.log_format import Redaction, as_json, iso_time
from forq.output.files import Ring, sweep
from forq.output.format import (
    BURST,
    LINE_COST,
    NAME,
    RATE,
    URGENT_BURST,
    URGENT_RATE,
    Allowance,
    OutputLines,
    Record,
    open_pipe,
)
from forq.output.forwarding import Forwarder
from forq.procs.liveness import DISK_SECONDS, may_take
from forq.procs.loop import service_loop
from forq.procs.process import Context
from forq.procs.scoreboard import Scoreboard, Slot
from forq.services.rpc import Desk

log = logging.getLogger("forq")

READ_BYTES = 64 * 1024
SKIP_BYTES = 1024 * 1024
# How long a queue that is above its allowance is left out, and how often that is told.
SKIP_SECONDS = 1.0


class RunningJobs:
    """Who of a queue is running a job, as the scoreboard says."""

    def __init__(self, board: Scoreboard) -> None:
        self._board = board
        self._slots: list[Slot] = []

    def only_one(self, queue: str) -> str | None:
        while len(self._slots) < self._board.highest:
            self._slots.append(self._board.slot(len(self._slots)))
        running = [slot for slot in self._slots if slot.word & 1 and slot.queue == queue]
        return running[0].job.decode(errors="replace") or None if len(running) == 1 else None


class QueueOutput:
    """One queue: its FIFO, its allowance, its files."""

    def __init__(self, name: str, fd: int, ring: Ring, now: float) -> None:
        self.name = name
        self.fd = fd
        self._ring = ring
        self._lines = OutputLines(name)
        self.allowance = Allowance(RATE, BURST, now)
        self._urgent = Allowance(URGENT_RATE, URGENT_BURST, now)
        self._skip_until = 0.0
        self._left_out = self._lines.left_out
        self._tell_at = 0.0
        self._disk_failed = False

    @property
    def restless(self) -> bool:
        """Whether it has something to say though nothing is read."""
        return self._lines.waiting or any(self._left_out)

    def read(self, jobs: RunningJobs, now: float) -> list[Record] | None:
        """What the next piece of output says; None when there is none."""
        skipping = now < self._skip_until
        job = None if skipping else jobs.only_one(self.name)
        try:
            chunk = os.read(self.fd, SKIP_BYTES if skipping else READ_BYTES)
        except BlockingIOError:
            return None
        if not skipping and self.allowance.take(0, now):
            records = self._lines.take(chunk, job)
            # What is kept counts: most of a line of 10 MB is not.
            self.allowance.spend(sum(len(record["message"]) + LINE_COST for record in records))
            return records
        if not skipping:
            self._skip_until = now + SKIP_SECONDS
            self._tell_at = max(self._tell_at, now + SKIP_SECONDS)
        return self._skip(chunk, now)

    def _skip(self, chunk: bytes, now: float) -> list[Record]:
        lines, size, urgent = self._lines.skip(chunk)
        passed = [record for record in urgent if self._urgent.take(len(record["message"]) + LINE_COST, now)]
        self._left_out[0] += max(0, lines - len(passed))
        self._left_out[1] += size
        return passed

    def tick(self, now: float) -> list[Record]:
        """What is due: lines that nobody has ended, and how much was left out."""
        records = self._lines.late()
        if any(self._left_out) and now >= self._tell_at:
            self._tell_at = now + SKIP_SECONDS
            records.append(self._told_left_out())
        return records

    def end(self) -> list[Record]:
        records = self._lines.end()
        if any(self._left_out):
            records.append(self._told_left_out())
        return records

    def keep(self, records: list[Record]) -> None:
        try:
            self._ring.append([_encode(record) for record in records])
        except OSError as exc:
            if not self._disk_failed:
                log.error("output cannot be kept queue=%s error=%s", self.name, exc)
            self._disk_failed = True
        else:
            self._disk_failed = False

    def close(self) -> None:
        os.close(self.fd)
        self._ring.close()

    def _told_left_out(self) -> Record:
        lines, size = self._left_out
        self._left_out[:] = [0, 0]
        message = f"too much output, left out lines={lines} bytes={size}"
        about = {"time": iso_time(time.time()), "level": "WARNING", "queue": self.name}
        return {**about, "stream": "log", "logger": "forq", "message": message}


def _encode(record: Record) -> bytes:
    try:
        return orjson.dumps(record) + b"\n"
    except TypeError:
        return as_json(record).encode() + b"\n"


TOTAL_RATE = 4 * 1024 * 1024
LOOK_SECONDS = 0.1
SWEEP_SECONDS = 86400.0
DRAIN_SECONDS = 0.5
EVENTS = 64


def run_logger(context: Context, leash: socket.socket) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A FIFO and a file per queue.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return Logger(context, leash).run()


class Logger:
    def __init__(self, context: Context, leash: socket.socket, forwarder: Forwarder | None = None) -> None:
        self._context = context
        self._loop = service_loop(poller=select.epoll(), most_events=EVENTS)
        self._desk = Desk(self._loop, leash, {"serve": self._serve, "drain": self._drain})
        self._forwarder = forwarder or Forwarder()
        self._redact = Redaction(context.redact)
        self._jobs = RunningJobs(context.scoreboard)
        self._by_name: dict[str, QueueOutput] = {}
        self._restless: set[QueueOutput] = set()
        self._served: set[str] = set()
        self._sweep_at: float | None = None
        self._shared_at = 0.0
        self._busy: set[QueueOutput] = set()

    def run(self) -> int:
        self._loop.run(self._after_pass)
        self._drain({})
        return exits.STOPPED

    def _after_pass(self) -> float | None:
        self.tick(time.monotonic())
        if self._restless or self._forwarder.waiting:
            return LOOK_SECONDS
        return None if self._sweep_at is None else max(0.0, self._sweep_at - time.monotonic())

    def tick(self, now: float) -> None:
        """Everything that is due."""
        for output in list(self._restless):
            self._put(output, output.tick(now))
            if not output.restless:
                self._restless.discard(output)
        if now - self._shared_at >= 1.0:
            self._share(now)
        if self._sweep_at is not None and now >= self._sweep_at:
            self._sweep(now)
        self._forwarder.flush()
        if count := self._forwarder.take_left_out():
            log.warning("stderr was not read, left out lines=%s", count)

    def _serve(self, params: dict[str, Any]) -> object:
        """Which queues there are from now on."""
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
        """What was written so far is read and kept."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for output in self._by_name.values():
            self._empty(output, deadline)
            self._put(output, output.end())
        self._forwarder.flush()
        return {}

    def _open(self, name: str) -> None:
        directory = self._context.logs_dir / name
        try:
            fd = open_pipe(directory)
        except ForqError as exc:
            log.error("output cannot be read queue=%s error=%s", name, exc)
            return
        output = QueueOutput(name, fd, Ring(directory, self._context.log_max), time.monotonic())
        self._by_name[name] = output
        self._loop.add_reader(fd, lambda: self._read(output, time.monotonic()))

    def _is_current(self, output: QueueOutput) -> bool:
        """A queue of the same name may have been deleted and made again."""
        try:
            return os.path.samestat(os.stat(self._context.logs_dir / output.name / NAME), os.fstat(output.fd))
        except OSError:
            return False

    def _close(self, output: QueueOutput) -> None:
        self._empty(output, time.monotonic() + DRAIN_SECONDS)
        self._put(output, output.end())
        self._loop.remove_reader(output.fd)
        del self._by_name[output.name]
        self._restless.discard(output)
        self._busy.discard(output)
        output.close()

    def _empty(self, output: QueueOutput, deadline: float) -> None:
        while (now := time.monotonic()) < deadline and self._read(output, now):
            pass

    def _read(self, output: QueueOutput, now: float) -> bool:
        records = output.read(self._jobs, now)
        if records is None:
            return False
        self._busy.add(output)
        self._put(output, records)
        if output.restless:
            self._restless.add(output)
        return True

    def _put(self, output: QueueOutput, records: list[Record]) -> None:
        if not records:
            return
        if self._redact:
            records = [{**record, "message": self._redact(record["message"])} for record in records]
        may_take(DISK_SECONDS)
        output.keep(records)
        log_format = self._context.log_format
        for record in records:
            self._forwarder.send(log_format.render(record).encode(errors="backslashreplace") + b"\n")
        self._forwarder.flush()

    def _share(self, now: float) -> None:
        """Those that have written in the last second share what all may write together."""
        rate = min(RATE, TOTAL_RATE / max(1, len(self._busy)))
        for output in self._busy:
            output.allowance.rate = rate
        self._busy.clear()
        self._shared_at = now

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + SWEEP_SECONDS
        may_take(DISK_SECONDS)
        try:
            swept = sweep(self._context.logs_dir, self._served, time.time())
        except OSError as exc:
            log.warning("output of deleted queues cannot be removed error=%s", exc)
            return
        if swept:
            log.info("removed the output of queues that are gone queues=%s", swept)
