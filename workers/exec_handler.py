"""Handlers that are programs in any language: called like a function, once per job, from one worker's thread.

1. ExecHandler keeps one instance of its program running and gives it one job after the other. An instance that ends,
   or says what makes no sense, is replaced.
2. ExecOnceHandler starts its program for each job.

Deadlines are not kept here: at its timeout the queue's process is killed with everything below it, programs too.
"""

import logging
import signal
from collections.abc import Sequence
from typing import Any

import orjson

from forq.errors import InvalidData
from forq.job import Job, new_id
from forq.queue_spec import ProgramLine
from forq.workers.exec_messages import (
    EXIT_FOR_GOOD,
    Finished,
    ProgramFailed,
    Progress,
    assignment,
    attempt_number,
    means_nothing,
    read_answer,
)
from forq.workers.program import Program, end_programs

log = logging.getLogger("forq")


class _NothingRead(Exception):
    """The instance ended after an earlier job, without having seen anything of this one."""


class _Ended(Exception):
    """The program has ended and not said what became of its job."""


class ExecHandler:
    def __init__(self, line: ProgramLine, queue: str, *, keep_fds: Sequence[int] = ()) -> None:
        self._line = line
        self._queue = queue
        self._keep_fds = keep_fds
        self._worker = new_id()
        self._program: Program | None = None
        self._jobs = 0

    def another(self) -> "ExecHandler":
        """The same for another worker, with an instance of its own."""
        return ExecHandler(self._line, self._queue, keep_fds=self._keep_fds)

    def __call__(self, data: Any, job: Job) -> Any:
        """The `result` of the program's answer."""
        line = assignment(data, job, self._worker)
        try:
            return self._give(line, job)
        except _NothingRead:
            log.info("replacing a program queue=%s reason=it has ended before it read its next job", self._queue)
            return self._give(line, job)

    def programs(self) -> list[Program]:
        return [] if self._program is None else [self._program]

    def _give(self, line: bytes, job: Job) -> Any:
        program = self._usable(job) or self._start(job)
        answer: Finished | ProgramFailed
        answered = usable = False
        try:
            program.tell(line)
            answer = self._hear(program, job)
            answered = True
            # One that answers before it has read everything would take the rest for its next job.
            usable = program.has_been_told_all
        except InvalidData as exc:
            answer = ProgramFailed("BadMessage", str(exc))
        except _Ended:
            if self._jobs and program.has_read_nothing():
                raise _NothingRead from None
            answer = how_it_ended(program.returncode())
        finally:
            tail = program.output.end()
            self._jobs += 1
            if not usable:
                self._discard()
        if isinstance(answer, ProgramFailed):
            raise _with_output(answer, tail, quote=not answered)
        return answer.result

    def _hear(self, program: Program, job: Job) -> Finished | ProgramFailed:
        """What the program says has become of the job."""
        while (line := program.next_line()) is not None:
            if not line.strip():
                continue
            answer = read_answer(line, job)
            if isinstance(answer, Progress):
                job.progress(answer.fraction, answer.text or "")
            elif answer is not None:
                return answer
        raise _Ended

    def _usable(self, job: Job) -> Program | None:
        """The instance that runs; one that has ended since its last job, or talks without one, is replaced."""
        program = self._program
        if program is None:
            return None
        try:
            said = program.lines_between_jobs()
        except InvalidData as exc:
            said, reason = [], str(exc)
        else:
            reason = "it has ended" if said is None else ""
        if said and not all(means_nothing(line) for line in said):
            reason = f"it spoke without a job: {said[0][:200]!r}"
        if not reason:
            program.output.begin(job.id)
            return program
        log.info("replacing a program queue=%s pid=%s reason=%s", self._queue, program.pid, reason)
        self._discard()
        return None

    def _start(self, job: Job) -> Program:
        self._jobs = 0
        self._program = start(self._line, job, {}, self._keep_fds)
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
        program = start(self._line, job, environ, self._keep_fds)
        try:
            program.tell(orjson.dumps(data) + b"\n")
            failure = None if (code := program.wait()) == 0 else how_it_ended(code, once=True)
        finally:
            tail = program.output.end()
            program.discard()
        if failure is not None:
            raise _with_output(failure, tail, quote=True)


def close_handlers(handlers: Sequence[object]) -> None:
    """Ends the instances of those handlers that are programs, all at the same time."""
    end_programs([program for each in handlers if isinstance(each, ExecHandler) for program in each.programs()])


def start(line: ProgramLine, job: Job, environ: dict[str, str], keep_fds: Sequence[int]) -> Program:
    try:
        return Program(line, job, environ=environ, keep_fds=keep_fds)
    except OSError as exc:
        raise ProgramFailed("CannotStart", f"{line.argv[0]}: {exc.strerror}") from exc


def how_it_ended(code: int | None, *, once: bool = False) -> ProgramFailed:
    too_early = "" if once else ", and had not said what became of the job"
    if code is None:
        return ProgramFailed("ExitStatus", f"it ended, nobody knows how{too_early}")
    if code < 0:
        names = {int(known): known.name for known in signal.Signals}
        return ProgramFailed("ExitSignal", f"it was ended by signal {-code} ({names.get(-code, '?')})")
    kind = "permanent" if once and code == EXIT_FOR_GOOD else "retriable"
    return ProgramFailed("ExitStatus", f"it ended with status {code}{too_early}", kind=kind)


def _with_output(failure: ProgramFailed, tail: list[str], *, quote: bool) -> ProgramFailed:
    """What it wrote last tells more than how it ended."""
    if quote and tail:
        failure.args = (f"{failure.args[0]}; it last wrote: {tail[-1]}",)
    failure.trace = failure.trace or "\n".join(tail)
    return failure
