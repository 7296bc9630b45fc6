"""A worker of a peer under measurement: its start, the lines of its jobs, and its end by pid."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.processes import tree
from benchmarks.roster import Peer
from benchmarks.servers import BenchServer

_STOP_SECONDS = 20


class Failed(Exception):
    """A trial without a result; the text gives the reason."""


class Record(NamedTuple):
    """A job's line: when it started, when it was sent (0: unknown), and where it ran."""

    started_ns: int
    sent_ns: int
    pid: int


class Bench:
    """One trial of one peer: its own directory, the peer's programs, and the file that their jobs write to."""

    def __init__(
        self, peer: Peer, server: BenchServer, *, concurrency: int = 0, durable: bool = False, block: int = 1
    ) -> None:
        self.peer = peer
        self.server = server
        self.block = block
        self._directory = Path(tempfile.mkdtemp(prefix="forq-bench-"))
        self._trace = self._directory / "trace"
        self._read_to = 0
        self._records: list[Record] = []
        self._settings = {
            "BENCH_SOCKET": server.address,
            "BENCH_TRACE": str(self._trace),
            "BENCH_CONCURRENCY": str(concurrency),
            "BENCH_DURABLE": "1" if durable else "0",
            "BENCH_BLOCK": str(block),
        }
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            self._stop(worker)
        shutil.rmtree(self._directory, ignore_errors=True)

    def enqueue(self, *verb: object, timeout_seconds: float) -> tuple[int, float]:
        """Runs a verb that enqueues; returns the number of jobs and the seconds."""
        environ = self.peer.full_environ(**self._settings)
        try:
            done = subprocess.run(
                self.peer.verb(*verb),
                env=environ,
                cwd=self.peer.cwd,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise Failed(f"{verb[0]} took more than {timeout_seconds:.0f} s") from exc
        if done.returncode:
            raise Failed(f"{verb[0]} ended with {done.returncode}: {_last_line(done.stderr)}")
        words = done.stdout.split()
        return (int(words[0]), float(words[1])) if words else (0, 0.0)

    def fill(self, count: int, timeout_seconds: float = 120.0) -> tuple[int, float]:
        return self.enqueue("bulk", count, timeout_seconds=timeout_seconds)

    def arrive(self, times_ns: list[int], service_ms: float = 0.0) -> None:
        """Sends jobs at these times; returns when the last was sent."""
        self.enqueue("arrivals", self._times(times_ns), service_ms, timeout_seconds=times_ns[-1] / 1e9 * 3 + 30)

    @contextmanager
    def arriving(self, times_ns: list[int]) -> Iterator[None]:
        """Sends jobs at these times meanwhile."""
        command = self.peer.verb("arrivals", self._times(times_ns), 0)
        with open(self._directory / "log", "ab") as log:
            sender = subprocess.Popen(
                command,
                env=self.peer.full_environ(**self._settings),
                cwd=self.peer.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield
            if sender.wait(_STOP_SECONDS):
                raise Failed(f"arrivals ended with {sender.returncode}: {self.log_end()}")
        except subprocess.TimeoutExpired as exc:
            raise Failed("arrivals did not end") from exc
        finally:
            sender.kill()
            sender.wait()

    def _times(self, times_ns: list[int]) -> Path:
        path = self._directory / "arrivals"
        path.write_text("".join(f"{at}\n" for at in times_ns))
        return path

    def work(self) -> subprocess.Popen[bytes]:
        # A killed one is replaced by one in the same place, as after a restart of its service.
        state = self._directory / f"worker{len(self.workers)}"
        state.mkdir(exist_ok=True)
        environ = self.peer.full_environ(**self._settings, BENCH_STATE=str(state))
        with open(self._directory / "log", "ab") as log:
            worker = subprocess.Popen(
                self.peer.verb("work"),
                env=environ,
                cwd=self.peer.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.workers.append(worker)
        return worker

    def warm(self, timeout_seconds: float = 30.0) -> None:
        """Returns when the worker has run a job."""
        known = len(self.records())
        self.arrive([0])
        self.wait_for_records(known + 1, timeout_seconds)

    def records(self) -> list[Record]:
        if self._trace.exists():
            with open(self._trace, "rb") as file:
                file.seek(self._read_to)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_to += len(whole + newline)
            self._records += [Record(*map(int, line.split())) for line in whole.splitlines()]
        return self._records

    def wait_for_records(self, count: int, timeout_seconds: float, look_seconds: float = 0.005) -> list[Record]:
        deadline = time.monotonic() + timeout_seconds
        while len(self.records()) < count:
            for worker in self.workers:
                if worker.poll() is not None:
                    raise Failed(f"the worker ended with {worker.returncode}: {self.log_end()}")
            if time.monotonic() > deadline:
                found = len(self._records)
                raise Failed(f"{found} of {count} records within {timeout_seconds:.0f} s; {self.log_end()}")
            time.sleep(look_seconds)
        return self._records

    def pids(self) -> list[int]:
        """Every process of its workers."""
        return [process.pid for worker in self.workers for process in tree(worker.pid)]

    def log_end(self) -> str:
        path = self._directory / "log"
        return _last_line(path.read_text(errors="replace")) if path.exists() else "no log"

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """Kills all its processes at once, like a lost container."""
        end(tree(worker.pid))
        worker.wait()
        self.workers.remove(worker)

    def _stop(self, worker: subprocess.Popen[bytes]) -> None:
        processes = tree(worker.pid)
        if self.peer.polite and worker.poll() is None:
            worker.send_signal(signal.SIGTERM)
            try:
                worker.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                processes = tree(worker.pid)
        end(processes)
        worker.wait()


def end(processes: list[psutil.Process]) -> None:
    """Kills these, each by its pid and start time, and reaps those that this process has adopted."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for process in processes[1:]:
        try:
            os.waitpid(process.pid, 0)
        except ChildProcessError:  # reaped by another process
            continue


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
