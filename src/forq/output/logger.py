"""The logger: reads what all queues' processes write, keeps it per queue, and passes it on to the supervisor's stderr.

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

from forq import exits
from forq.errors import ForqError
from forq.output.files import Ring, sweep
from forq.output.forwarding import Forwarder
from forq.output.lines import Record
from forq.output.pipe import NAME, RATE, open_pipe
from forq.output.queue_output import QueueOutput, RunningJobs
from forq.procs.liveness import DISK_SECONDS, may_take
from forq.procs.loop import service_loop
from forq.procs.process import Context
from forq.redaction import Redaction
from forq.services.desk import Desk

TOTAL_RATE = 4 * 1024 * 1024
LOOK_SECONDS = 0.1
SWEEP_SECONDS = 86400.0
DRAIN_SECONDS = 0.5
EVENTS = 64

log = logging.getLogger("forq")


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
