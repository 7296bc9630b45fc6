"""One running program of an exec handler: its process, its pipes, its end.

It has a session of its own, so that a script's `kill 0` does not reach the queue's process, and the descriptor of the
tree's lock, so that it is found when both its queue's process and the supervisor are gone. It reads end of file on
stdin when its queue's process dies, and is killed with everything else below that.
"""

import fcntl
import logging
import os
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from forq.errors import InvalidData
from forq.job import Job
from forq.output.programs import READ_BYTES, WATCH, ProgramOutput
from forq.procs.lines import Lines
from forq.procs.treekill import kill_tree
from forq.queue_spec import ProgramLine

# How long a program that has closed its stdout gets to end.
LAST_SECONDS = 1.0
# How long one that is not needed any more gets after end of file on stdin, and then after TERM.
EOF_SECONDS = 1.0
TERM_SECONDS = 0.5

log = logging.getLogger("forq")

_pids: set[int] = set()


def running_programs() -> frozenset[int]:
    """Those that this process has started and not reaped. Nobody else may reap them."""
    return frozenset(_pids)


class Program:
    """Started for a job; raises OSError if it cannot be. All but its output and its end belong to one thread."""

    def __init__(
        self, line: ProgramLine, job: Job, *, environ: Mapping[str, str] | None = None, keep_fds: Sequence[int] = ()
    ) -> None:
        self._queue = job.queue
        self._lock = threading.Lock()
        self._returncode: int | None = None
        self._reaped = False
        self._lines = Lines()
        self._unwritten = memoryview(b"")
        self._written = 0
        self._process = subprocess.Popen(
            line.argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if line.once else subprocess.PIPE,
            env={**os.environ, "FORQ_QUEUE": job.queue, **(environ or {})},
            start_new_session=True,
            pass_fds=keep_fds,
        )
        _pids.add(self.pid)
        try:
            self._attend(line.once, job.id)
        except OSError:
            self._process.kill()
            self._process.wait()
            _pids.discard(self.pid)
            raise

    def _attend(self, once: bool, job_id: str) -> None:
        process = self._process
        self._pidfd = os.pidfd_open(self.pid)
        self._stdin = _fd_of(process.stdin)
        self._stdout = None if once else _fd_of(process.stdout)
        written = process.stdout if once else process.stderr
        assert written is not None
        self.output = ProgramOutput(written, self._queue, job_id)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        if self._stdout is not None:
            self._poll.register(self._stdout, select.POLLIN)
            WATCH.add(self._pidfd, self._ended_meanwhile)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: bytes) -> None:
        """Writes as much as goes at once; the rest goes while it is listened to."""
        self._unwritten = memoryview(line)
        self._written = 0
        self._write()
        if self._unwritten:
            self._poll.register(self._stdin, select.POLLOUT)
        elif self._stdout is None:
            self.close_stdin()

    @property
    def has_been_told_all(self) -> bool:
        return not self._unwritten

    def next_line(self) -> bytes | None:
        """The next line that it says; None when it has ended. InvalidData if it says what is no line."""
        while (line := self._lines.pop()) is None:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._stdin in ready:
                self._write_on()
            if self._stdout in ready:
                if not self._read():
                    return None
            elif self._pidfd in ready:
                return None
        return line

    def lines_between_jobs(self) -> list[bytes] | None:
        """What it has said since its last answer; None if it has ended."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        if self._pidfd in ready or (self._stdout in ready and not self._read()):
            return None
        said = []
        while (line := self._lines.pop()) is not None:
            said.append(line)
        return said

    def wait(self) -> int | None:
        """Its return code (minus the signal that ended it), once all is written and it has ended."""
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._stdin in ready:
                self._write_on()
            if self._pidfd in ready:
                return self.returncode()

    def close_stdin(self) -> None:
        _close(self._process.stdin)

    def has_ended(self, seconds: float = 0.0) -> bool:
        return bool(_ready(self._pidfd, seconds))

    def returncode(self) -> int | None:
        """Of a program that has ended; None if somebody else has reaped it."""
        self._reap()
        return self._returncode

    def has_read_nothing(self) -> bool:
        """Whether all that it was told last is still in the pipe."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self._stdin, termios.FIONREAD, b"\0" * 4))
        return bool(unread >= self._written)

    def terminate(self) -> None:
        with self._lock:
            if not self._reaped:
                os.killpg(self.pid, signal.SIGTERM)

    def discard(self) -> None:
        """Kills it, with all that is below it, if it has not ended."""
        with self._lock:
            if not self._reaped and not self.has_ended():
                kill_tree(self.pid)
        self._reap()
        WATCH.remove(self._pidfd, self._ended_meanwhile)
        self.output.close()
        self.close_stdin()
        if self._stdout is not None:
            _close(self._process.stdout)
        os.close(self._pidfd)

    def _write(self) -> None:
        try:
            while self._unwritten:
                count = os.write(self._stdin, self._unwritten)
                self._written += count
                self._unwritten = self._unwritten[count:]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # What it says, or its end, will tell more.
            self._unwritten = memoryview(b"")

    def _write_on(self) -> None:
        self._write()
        if not self._unwritten:
            self._poll.unregister(self._stdin)
            if self._stdout is None:
                self.close_stdin()

    def _read(self) -> bool:
        """False when it has ended."""
        assert self._stdout is not None
        chunk = os.read(self._stdout, READ_BYTES)
        if chunk:
            self._lines.push(chunk)
            return True
        if self.has_ended(LAST_SECONDS):
            return False
        raise InvalidData("it has closed its stdout")

    def _ended_meanwhile(self) -> bool:
        """From the watch, which goes on if this is True: the event may have been that of an earlier program, whose
        descriptor had the same number."""
        return not self._reap(has_ended=False)

    def _reap(self, *, has_ended: bool = True) -> bool:
        """Whether it has ended. `has_ended`: it is an error if it has not."""
        with self._lock:
            if self._reaped:
                return True
            try:
                end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
                if end is None:
                    if has_ended:
                        # It runs as another user, say: its parent's end is all that it will see.
                        log.error("cannot end a program queue=%s pid=%s", self._queue, self.pid)
                    return False
                self._returncode = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            except ChildProcessError:
                log.warning("somebody else has reaped a program queue=%s pid=%s", self._queue, self.pid)
            self._reaped = True
            # So that subprocess does not look after it either.
            self._process.returncode = self._returncode or 0
            _pids.discard(self.pid)
            return True


def end_programs(programs: Sequence[Program]) -> None:
    """They are not needed any more: end of file, TERM, kill."""
    for program in programs:
        program.close_stdin()
    _wait_for(programs, EOF_SECONDS)
    for program in programs:
        if not program.has_ended():
            program.terminate()
    _wait_for(programs, TERM_SECONDS)
    for program in programs:
        program.discard()


def _wait_for(programs: Sequence[Program], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for program in programs:
        program.has_ended(max(0.0, deadline - time.monotonic()))


def _fd_of(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()


def _ready(fd: int, seconds: float) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll.poll(seconds * 1000)
