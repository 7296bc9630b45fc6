"""Handlers that are programs in any language, called like a function once per job from one worker's thread.

1. ExecHandler keeps one instance of its program running and sends it one job after the other. An instance that exits or
   sends an invalid message is replaced.
2. ExecOnceHandler starts its program for each job.
3. Program is one running program: its process and its pipes. It runs in its own session, so a script's `kill 0` does
   not reach the queue's process. It inherits the tree lock, so it is found if its queue's process and the supervisor
   both die. When the queue's process dies, the program reads end of file on stdin and is killed.

Messages are one JSON object per line (docs/reference/bridge.md). Deadlines are not enforced here: at its timeout the
queue's process is killed with everything below it.
"""

import fcntl
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

import orjson

from forq.errors import ForqError, InvalidData
from forq.job import Job, assignment_payload, new_id
from forq.output.programs import PIPE_WATCHER, READ_BYTES, ProgramOutput
from forq.procs.lines import LineBuffer
from forq.procs.treekill import kill_tree
from forq.queue_spec import ProgramLine
from forq.values import shown

log = logging.getLogger("forq")

MAX_NAME = 200
PERMANENT_EXIT_STATUS = 65  # EX_DATAERR of sysexits.h
# How long a program may run after it closed its stdout.
EXIT_SECONDS = 1.0
# How long a program that is no longer needed may run after end of file on stdin, and then after SIGTERM.
EOF_SECONDS = 1.0
TERM_SECONDS = 0.5

_HOST = socket.gethostname()
_ALIASES = {"worker_finished": "job_finished", "worker_busy": "worker_progress"}
_JOB_TOPICS = ("job_finished", "job_failed", "worker_progress", "job_accepted")
_KINDS = (None, "permanent", "retriable")
_running_pids: set[int] = set()


def running_programs() -> frozenset[int]:
    """Pids of programs that this process has not reaped. Only their owners may reap them."""
    return frozenset(_running_pids)


class Program:
    """Starts a program for a job; raises OSError. Used by one thread, except for its output and its exit."""

    def __init__(
        self, line: ProgramLine, job: Job, *, environ: Mapping[str, str] | None = None, keep_fds: Sequence[int] = ()
    ) -> None:
        self._queue = job.queue
        self._lock = threading.Lock()
        self._returncode: int | None = None
        self._reaped = False
        self._lines = LineBuffer()
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
        _running_pids.add(self.pid)
        try:
            self._open_pipes(line.once, job.id)
        except OSError:
            self._process.kill()
            self._process.wait()
            _running_pids.discard(self.pid)
            raise

    def _open_pipes(self, once: bool, job_id: str) -> None:
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
            PIPE_WATCHER.add(self._pidfd, self._on_exit_event)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: bytes) -> None:
        """Writes as much as possible now; the rest while waiting for the answer."""
        self._unwritten = memoryview(line)
        self._written = 0
        self._write()
        if self._unwritten:
            self._poll.register(self._stdin, select.POLLOUT)
        elif self._stdout is None:
            self.close_stdin()

    @property
    def all_sent(self) -> bool:
        return not self._unwritten

    def next_line(self) -> bytes | None:
        """The next line of its stdout; None when it has exited. Raises InvalidData."""
        while (line := self._lines.pop()) is None:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._stdin in ready:
                self._continue_write()
            if self._stdout in ready:
                if not self._read():
                    return None
            elif self._pidfd in ready:
                return None
        return line

    def read_between_jobs(self) -> list[bytes] | None:
        """Lines since its last answer; None if it has exited."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        if self._pidfd in ready or (self._stdout in ready and not self._read()):
            return None
        lines = []
        while (line := self._lines.pop()) is not None:
            lines.append(line)
        return lines

    def wait(self) -> int | None:
        """Sends the rest and waits for the exit. Returns the exit status, or minus the signal."""
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._stdin in ready:
                self._continue_write()
            if self._pidfd in ready:
                return self.returncode()

    def close_stdin(self) -> None:
        _close(self._process.stdin)

    def has_ended(self, seconds: float = 0.0) -> bool:
        return bool(_ready(self._pidfd, seconds))

    def returncode(self) -> int | None:
        """None if other code of this process has reaped it."""
        self._reap()
        return self._returncode

    def has_read_nothing(self) -> bool:
        """Whether the whole last message is still in the pipe."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self._stdin, termios.FIONREAD, b"\0" * 4))
        return bool(unread >= self._written)

    def terminate(self) -> None:
        with self._lock:
            if not self._reaped:
                os.killpg(self.pid, signal.SIGTERM)

    def discard(self) -> None:
        """Kills it with its descendants if it still runs, and closes its pipes."""
        with self._lock:
            if not self._reaped and not self.has_ended():
                kill_tree(self.pid)
        self._reap()
        PIPE_WATCHER.remove(self._pidfd, self._on_exit_event)
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
            # Ignored: its answer or its exit status makes a better error.
            self._unwritten = memoryview(b"")

    def _continue_write(self) -> None:
        self._write()
        if not self._unwritten:
            self._poll.unregister(self._stdin)
            if self._stdout is None:
                self.close_stdin()

    def _read(self) -> bool:
        """False when it has exited."""
        assert self._stdout is not None
        chunk = os.read(self._stdout, READ_BYTES)
        if chunk:
            self._lines.push(chunk)
            return True
        if self.has_ended(EXIT_SECONDS):
            return False
        raise InvalidData("the program closed its stdout")

    def _on_exit_event(self) -> bool:
        """Called by the pipe watcher, which continues if this returns True: the event may belong to an earlier program
        whose descriptor had the same number."""
        return not self._reap(has_ended=False)

    def _reap(self, *, has_ended: bool = True) -> bool:
        """Whether it has exited. `has_ended`: log an error if it has not."""
        with self._lock:
            if self._reaped:
                return True
            try:
                end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
                if end is None:
                    if has_ended:
                        # For example, it runs as another user and cannot be killed.
                        log.error("failed to kill a program queue=%s pid=%s", self._queue, self.pid)
                    return False
                self._returncode = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            except ChildProcessError:
                log.warning(
                    "a program was reaped elsewhere; its exit status is unknown queue=%s pid=%s", self._queue, self.pid
                )
            self._reaped = True
            # So that subprocess does not wait for it.
            self._process.returncode = self._returncode or 0
            _running_pids.discard(self.pid)
            return True


def stop_programs(programs: Sequence[Program]) -> None:
    """End of file on stdin, then SIGTERM, then kill."""
    for program in programs:
        program.close_stdin()
    _wait_for_exit(programs, EOF_SECONDS)
    for program in programs:
        if not program.has_ended():
            program.terminate()
    _wait_for_exit(programs, TERM_SECONDS)
    for program in programs:
        program.discard()


def _wait_for_exit(programs: Sequence[Program], seconds: float) -> None:
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


class ProgramFailed(ForqError):
    """An attempt of a program failed. `name` and `trace` stand for the class and traceback of a Python exception."""

    def __init__(
        self, name: str, message: str, *, kind: str = "retriable", retry_at: object = None, trace: str = ""
    ) -> None:
        super().__init__(message)
        self.name = name
        self.kind = kind
        self.retry_at = retry_at
        self.trace = trace


class Finished(NamedTuple):
    result: Any


class Progress(NamedTuple):
    fraction: float
    text: str | None


def assignment(data: Any, job: Job, worker: str) -> bytes:
    """The message that sends a program its job."""
    payload = assignment_payload(
        data,
        uuid=job.id,
        queue=job.queue,
        worker=worker,
        identifier=job.identifier,
        type=job.type,
        priority=job.priority,
        counts=(job.retry_count, job.stall_count, job.timeout_count),
        enqueued_at=job.enqueued_at,
        fence=job.fence,
        trace=job.trace,
        results=None if job._inputs is None else job.results(),
    )
    message = {
        "topic": "job_assignment",
        "payload": payload,
        "service_name": "forq",
        "service_uuid": worker,
        "service_host": _HOST,
        "created_at": time.time(),
    }
    return orjson.dumps(message) + b"\n"


def attempt_number(job: Job) -> int:
    return 1 + job.retry_count + job.stall_count + job.timeout_count


def read_answer(line: bytes, job: Job) -> Finished | Progress | ProgramFailed | None:
    """A program's message about its job; None for those without effect. Raises InvalidData for others."""
    topic, payload = _read_message(line)
    if topic == "worker_idle":
        return None
    if topic not in _JOB_TOPICS:
        raise InvalidData(f"unknown topic {shown(topic)}")
    if payload.get("uuid") != job.id or payload.get("queue_name", job.queue) != job.queue:
        raise InvalidData(f"{topic} is about another job, uuid {shown(payload.get('uuid'))}")
    if topic == "job_finished":
        return Finished(payload.get("result"))
    if topic == "job_failed":
        return _failure(payload)
    return _progress(payload) if topic == "worker_progress" else None


def allowed_between_jobs(line: bytes) -> bool:
    """Whether a program may send this while it has no job."""
    try:
        return not line.strip() or _read_message(line)[0] == "worker_idle"
    except InvalidData:
        return False


def _read_message(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        message = orjson.loads(line)
    except ValueError as exc:
        raise InvalidData(f"not JSON: {shown(line.decode(errors='backslashreplace'))}") from exc
    if not isinstance(message, dict):
        raise InvalidData(f"not an object: {shown(message)}")
    topic, payload = message.get("topic"), message.get("payload")
    if not isinstance(topic, str) or not isinstance(payload, dict):
        raise InvalidData('a message needs a "topic" (a string) and a "payload" (an object)')
    return _ALIASES.get(topic, topic), payload


def _progress(payload: dict[str, Any]) -> Progress:
    fraction, text = payload.get("progress"), payload.get("text")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise InvalidData(f"progress = {shown(fraction)} is not a number from 0 to 1")
    if not isinstance(text, str | None):
        raise InvalidData(f"text = {shown(text)} is not a string")
    return Progress(float(fraction), text)


def _failure(payload: dict[str, Any]) -> ProgramFailed:
    error, kind = payload.get("error"), payload.get("kind")
    fields = {"message": error} if isinstance(error, str) else {} if error is None else error
    if not isinstance(fields, dict):
        raise InvalidData(f"error = {shown(error)} is neither a string nor an object with name and message")
    if kind not in _KINDS:
        raise InvalidData(f'kind = {shown(kind)} is not allowed: "permanent" or "retriable"')
    texts = {key: fields.get(key) or "" for key in ("name", "message", "traceback")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise InvalidData(f"{key} = {shown(text)} of an error is not a string")
    return ProgramFailed(
        texts["name"][:MAX_NAME] or "JobFailed",
        texts["message"],
        kind=kind or "retriable",
        retry_at=payload.get("retry_at"),
        trace=texts["traceback"],
    )


class _NothingRead(Exception):
    """The instance exited after an earlier job, without having read this one."""


class _Ended(Exception):
    """The program exited without an answer."""


class ExecHandler:
    def __init__(self, line: ProgramLine, queue: str, *, keep_fds: Sequence[int] = ()) -> None:
        self._line = line
        self._queue = queue
        self._keep_fds = keep_fds
        self._worker = new_id()
        self._program: Program | None = None
        self._jobs = 0

    def for_another_worker(self) -> "ExecHandler":
        """A copy with its own instance."""
        return ExecHandler(self._line, self._queue, keep_fds=self._keep_fds)

    def __call__(self, data: Any, job: Job) -> Any:
        """Returns the `result` of the program's answer."""
        line = assignment(data, job, self._worker)
        try:
            return self._run_job(line, job)
        except _NothingRead:
            log.info("replacing a program queue=%s reason=it exited before it read its next job", self._queue)
            return self._run_job(line, job)

    def programs(self) -> list[Program]:
        return [] if self._program is None else [self._program]

    def _run_job(self, line: bytes, job: Job) -> Any:
        program = self._reusable(job) or self._start(job)
        answer: Finished | ProgramFailed
        answered = usable = False
        try:
            program.send(line)
            answer = self._wait_for_answer(program, job)
            answered = True
            # A program that answers before it has read everything would take the rest for its next job.
            usable = program.all_sent
        except InvalidData as exc:
            answer = ProgramFailed("BadMessage", str(exc))
        except _Ended:
            if self._jobs and program.has_read_nothing():
                raise _NothingRead from None
            answer = describe_exit(program.returncode())
        finally:
            tail = program.output.end()
            self._jobs += 1
            if not usable:
                self._discard()
        if isinstance(answer, ProgramFailed):
            raise _with_output(answer, tail, quote=not answered)
        return answer.result

    def _wait_for_answer(self, program: Program, job: Job) -> Finished | ProgramFailed:
        """Passes on progress until the program reports the outcome."""
        while (line := program.next_line()) is not None:
            if not line.strip():
                continue
            answer = read_answer(line, job)
            if isinstance(answer, Progress):
                job.progress(answer.fraction, answer.text or "")
            elif answer is not None:
                return answer
        raise _Ended

    def _reusable(self, job: Job) -> Program | None:
        """The running instance. Discards one that has exited, or that sent a message without a job."""
        program = self._program
        if program is None:
            return None
        try:
            lines = program.read_between_jobs()
        except InvalidData as exc:
            lines, reason = [], str(exc)
        else:
            reason = "it has exited" if lines is None else ""
        if lines and not all(allowed_between_jobs(line) for line in lines):
            reason = f"it sent a message without a job: {lines[0][:200]!r}"
        if not reason:
            program.output.begin(job.id)
            return program
        log.info("replacing a program queue=%s pid=%s reason=%s", self._queue, program.pid, reason)
        self._discard()
        return None

    def _start(self, job: Job) -> Program:
        self._jobs = 0
        self._program = start_program(self._line, job, {}, self._keep_fds)
        return self._program

    def _discard(self) -> None:
        if self._program is not None:
            self._program.discard()
            self._program = None


class ExecOnceHandler:
    def __init__(self, line: ProgramLine, keep_fds: Sequence[int] = ()) -> None:
        self._line = line
        self._keep_fds = keep_fds

    def __call__(self, data: Any, job: Job) -> None:
        environ = {
            "FORQ_JOB_ID": job.id,
            "FORQ_IDENTIFIER": job.identifier.replace("\0", ""),
            "FORQ_TYPE": job.type or "",
            "FORQ_ATTEMPT": str(attempt_number(job)),
            "FORQ_FENCE": str(job.fence),
        }
        lines = orjson.dumps(data) + b"\n"
        if job._inputs is not None:
            lines += orjson.dumps(job.results()) + b"\n"
        program = start_program(self._line, job, environ, self._keep_fds)
        try:
            program.send(lines)
            failure = None if (code := program.wait()) == 0 else describe_exit(code, once=True)
        finally:
            tail = program.output.end()
            program.discard()
        if failure is not None:
            raise _with_output(failure, tail, quote=True)


def close_handlers(handlers: Sequence[object]) -> None:
    """Stops the instances of all exec handlers together."""
    stop_programs([program for each in handlers if isinstance(each, ExecHandler) for program in each.programs()])


def start_program(line: ProgramLine, job: Job, environ: dict[str, str], keep_fds: Sequence[int]) -> Program:
    try:
        return Program(line, job, environ=environ, keep_fds=keep_fds)
    except OSError as exc:
        raise ProgramFailed("CannotStart", f"{line.argv[0]}: {exc.strerror}") from exc


def describe_exit(code: int | None, *, once: bool = False) -> ProgramFailed:
    too_early = "" if once else " before it reported the outcome of the job"
    if code is None:
        return ProgramFailed("ExitStatus", f"the program exited with an unknown status{too_early}")
    if code < 0:
        names = {int(known): known.name for known in signal.Signals}
        return ProgramFailed("ExitSignal", f"the program was killed by signal {-code} ({names.get(-code, '?')})")
    kind = "permanent" if once and code == PERMANENT_EXIT_STATUS else "retriable"
    return ProgramFailed("ExitStatus", f"the program exited with status {code}{too_early}", kind=kind)


def _with_output(failure: ProgramFailed, tail: list[str], *, quote: bool) -> ProgramFailed:
    """Adds the last output, which usually explains the failure."""
    if quote and tail:
        failure.args = (f"{failure.args[0]}; last output: {tail[-1]}",)
    failure.trace = failure.trace or "\n".join(tail)
    return failure
