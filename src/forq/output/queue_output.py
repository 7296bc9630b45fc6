"""The output of one queue, as the logger sees it: its FIFO, its allowance, its files."""

import logging
import os
import time

import orjson

from forq.log_format import as_json, iso_time
from forq.output.files import Ring
from forq.output.lines import OutputLines, Record
from forq.output.pipe import BURST, LINE_COST, RATE, URGENT_BURST, URGENT_RATE, Allowance
from forq.procs.scoreboard import Scoreboard, Slot

READ_BYTES = 64 * 1024
SKIP_BYTES = 1024 * 1024
# How long a queue that is above its allowance is left out, and how often that is told.
SKIP_SECONDS = 1.0

log = logging.getLogger("forq")


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
