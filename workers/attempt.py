"""What a handler returned, as its queue keeps it. Whatever that is, it never fails the job.

One attempt at one job: decode, call the handler, and turn what happened into an outcome.

Only this module turns exceptions into outcomes; everything else returns or raises.
"""

import asyncio
import logging
import math
import os
import traceback
from collections.abc import Coroutine
from contextlib import nullcontext
from datetime import datetime
from types import CoroutineType
from typing import Any, NamedTuple, cast

import orjson

import forq
from forq.broker.enqueue import MAX_SECONDS
from forq.broker.record import pack_data, unpack
from forq.errors import ForqError, InvalidData
from forq.job import Job, Reporter
from forq.output.writer import CURRENT_JOB
from forq.procs.scoreboard import POSITION, Slot
from forq.workers.exec_handlers import MAX_NAME, ProgramFailed
from forq.workers.handlers import Handlers, class_name, exit_if_forked_from, safe_text
from forq.workers.tracing import Tracing

log = logging.getLogger("forq")

# Of the reason why there is no result.
MAX_REASON = 300
# Which a reason begins with.
NO_RESULT = b"!"


def encode_result(value: Any, max_bytes: int) -> bytes:
    """JSON, in one line; or '!' and why there is none."""
    try:
        packed = pack_data(value, "what its handler returned")
    except BaseException as exc:  # the user's own class may raise anything while it is looked at; the job is done
        return _no_result(_reason(exc))
    if len(packed) > max_bytes:
        return _no_result(f"it is longer than max_data = {max_bytes} bytes")
    return packed


def _reason(exc: BaseException) -> str:
    try:
        return str(exc) or type(exc).__name__
    except BaseException as broken:  # even its text is the user's own
        return f"it cannot be written as JSON, and why cannot be told ({type(broken).__name__})"


def _no_result(reason: str) -> bytes:
    """One line, without lone surrogates. The reason may be of a subclass of the user's, with methods of its own."""
    return NO_RESULT + " ".join(str.split(reason))[:MAX_REASON].encode("utf-8", "replace")


MAX_MESSAGE = 2000
# A coroutine is cancelled at its deadline; one that goes on all the same for so long is ended with its process.
CANCEL_MS = 1000
MAX_TRACEBACK = 8000

_NO_SPAN = nullcontext()
_FORQ_AND_ASYNCIO = tuple(f"{os.path.dirname(str(module.__file__))}{os.sep}" for module in (forq, asyncio))


class Failure(NamedTuple):
    """An attempt that failed: the error as JSON, the same without its traceback, and what the exception asks for."""

    error: bytes
    brief: bytes
    kind: str
    retry_at_ms: int | None

    def text(self) -> str:
        """The error in a line, its traceback in those that follow."""
        told = orjson.loads(self.error)
        return f"{told['name']}: {told['message']}\n{told['traceback']}".rstrip()


class _DeadlinePassed(TimeoutError):
    """A coroutine was cancelled because its time was up."""


# In tracebacks it has the name that is stored.
_DeadlinePassed.__module__, _DeadlinePassed.__qualname__ = "builtins", "TimeoutError"


class AttemptRunner:
    """Runs the attempts of one worker. `timeout_seconds`: what a coroutine may take (0: as long as it likes).
    `max_result_bytes`: how long what a handler returns may be (0: it is not kept)."""

    of_fail_handler = False

    def __init__(
        self,
        queue: str,
        handlers: Handlers,
        slot: Slot | None = None,
        reporter: Reporter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.timeout_seconds = 0.0
        self.max_result_bytes = 0
        # Of the last attempt, if it succeeded and that is to be kept.
        self.result: bytes | None = None
        # Of the last attempt, if it failed. Whoever takes it clears it: it holds the handler's variables.
        self.raised: BaseException | None = None
        self.queue = queue
        self._handlers = handlers.for_worker()
        self._slot = slot
        self._reporter = reporter
        self._tracing = tracing
        self._runner: asyncio.Runner | None = None
        self._pid = os.getpid()

    def run(self, job_id: str, record: bytes, fence: int) -> Failure | None:
        """None if the handler returned, else what went wrong."""
        self.result = None
        try:
            data, job = self._read(job_id, record, fence)
            if self._slot is not None:
                job._reporter, job._position = self._reporter, self._slot.words[POSITION]
            with _NO_SPAN if self._tracing is None else self._tracing.attempt(job):
                result = self._handlers.for_type(job.type)(data, job)
                # Not isinstance: that asks the object, and what a handler returns may answer with an exception.
                if type(result) is CoroutineType:
                    result = self._run_async(_tagged_with_job(job_id, result))
            if self.max_result_bytes:
                self.result = encode_result(result, self.max_result_bytes)
        except BaseException as exc:  # a handler may raise anything, SystemExit too; the worker must outlive it
            exit_if_forked_from(self._pid)
            strip_forq_frames(exc)
            self.raised = exc
            return describe_failure(exc)
        finally:
            exit_if_forked_from(self._pid)
        return None

    def _read(self, job_id: str, record: bytes, fence: int) -> tuple[Any, Job]:
        return read_job(self.queue, job_id, record, fence)

    def close(self) -> None:
        """Ends programs; cancels what coroutines have left running. What refuses ends with the process."""
        self._handlers.close()
        if self._runner is None:
            return
        loop = self._runner.get_loop()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            _, tasks = loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_MS / 1000))
        if not tasks:
            self._runner.close()

    def _run_async(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        if self._slot is None or not self.timeout_seconds:
            return self._runner.run(coroutine)
        self._slot.lenience_ms = CANCEL_MS
        try:
            return self._runner.run(_with_deadline(coroutine, self.timeout_seconds))
        finally:
            self._slot.lenience_ms = 0


class FailAttemptRunner(AttemptRunner):
    """Runs the fail handler: its data is [original data, original job, error]."""

    of_fail_handler = True

    def _read(self, job_id: str, record: bytes, fence: int) -> tuple[Any, Job]:
        stored, job = read_job(self.queue, job_id, record, fence)
        try:
            (identifier, job_type, data, *trace), original, error = stored
            original |= {"identifier": identifier or original["id"], "type": job_type}
            # The fail handler runs within the same trace.
            job.trace = trace[0] if trace else None
        except (TypeError, ValueError, KeyError) as exc:
            raise InvalidData(f"broken fail job: {exc}") from exc
        return [data, original, error], job


async def _tagged_with_job(job_id: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
    # Tasks that it starts inherit this, and may outlive it.
    CURRENT_JOB.set(job_id)
    return await coroutine


async def _with_deadline(coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await coroutine
    except TimeoutError as exc:
        # The handler may raise a TimeoutError of its own, which is a failure like others.
        if not deadline.expired():
            raise
        # With the place at which the handler was cancelled; how asyncio did that interests nobody.
        late = _DeadlinePassed(f"cancelled at its deadline, after {seconds:g} s")
        cancelled = exc.__cause__
        raise late.with_traceback(None if cancelled is None else cancelled.__traceback__) from None


def read_job(queue: str, job_id: str, packed: bytes, fence: int) -> tuple[Any, Job]:
    """The data and the job of a claimed record."""
    if packed[:1] == b"p":
        # The common case, in as few steps as possible: FLAG PRIORITY ' ' ENQUEUED_MS '\n' BODY.
        newline = packed.find(b"\n", 3)
        try:
            identifier, job_type, data, *rest = orjson.loads(packed[newline + 1 :])
            enqueued_at = int(packed[3:newline]) / 1000
            job = Job(queue, job_id, identifier or job_id, job_type, packed[1] - 48, enqueued_at, fence)
            if rest:
                job.trace = rest[0]
            return data, job
        except (ValueError, TypeError) as exc:
            raise InvalidData(f"broken job record: {exc}") from exc
    record = unpack(packed)
    counts = (record.retry_count, record.stall_count, record.timeout_count)
    identifier = record.identifier or job_id
    enqueued_at = record.enqueued_ms / 1000
    about = (identifier, record.type, record.priority, enqueued_at)
    return record.data, Job(queue, job_id, *about, fence, counts, record.trace)


def strip_forq_frames(exc: BaseException) -> None:
    """The traceback of an exception begins with the first frame that is neither forq's nor asyncio's.

    Without such a frame it stays as it is, unless the error is one of forq's, whose text says all.
    """
    # Past what the class of the exception may say itself.
    traceback_of: Any = BaseException.__dict__["__traceback__"]
    users = traceback_of.__get__(exc)
    while users is not None and users.tb_frame.f_code.co_filename.startswith(_FORQ_AND_ASYNCIO):
        users = users.tb_next
    if users is not None or issubclass(type(exc), ForqError):
        traceback_of.__set__(exc, users)


def describe_failure(exc: BaseException) -> Failure:
    """Name, message, kind and traceback of an exception: text only, nothing that could be rebuilt into code."""
    late = issubclass(type(exc), _DeadlinePassed)
    name = "TimeoutError" if late else safe_text(lambda: _error_name(exc))[:MAX_NAME]
    kind = "permanent" if safe_text(lambda: getattr(exc, "kind", None)) == "permanent" else "retriable"
    if late:
        kind = "timeout"
    brief = {
        "name": name,
        "message": safe_text(lambda: str(exc))[:MAX_MESSAGE],
        "kind": kind,
    }
    error = {**brief, "traceback": safe_text(lambda: _traceback(exc))[-MAX_TRACEBACK:]}
    return Failure(orjson.dumps(error), orjson.dumps(brief), kind, _retry_at_ms(exc))


def _error_name(exc: BaseException) -> str:
    program = _program_failure(exc)
    return class_name(type(exc)) if program is None else program.name


def _traceback(exc: BaseException) -> str:
    """Of a program, what it says itself: our own stack tells nothing about it."""
    program = _program_failure(exc)
    return "".join(traceback.format_exception(exc)) if program is None else program.trace


def _program_failure(exc: BaseException) -> ProgramFailed | None:
    """Not by isinstance: that asks the exception itself."""
    return cast(ProgramFailed, exc) if issubclass(type(exc), ProgramFailed) else None


def _retry_at_ms(exc: BaseException) -> int | None:
    """When the exception asks for the next attempt; None if it does not, or not in a way that can be understood."""
    try:
        when = getattr(exc, "retry_at", None)
        if isinstance(when, datetime):
            when = when.timestamp() if when.tzinfo is not None else None
        if isinstance(when, bool) or not isinstance(when, int | float):
            return None
        if not 0 <= when <= MAX_SECONDS:
            raise ValueError(f"retry_at = {when} is not a time in epoch seconds")
        return math.ceil(when * 1000)
    except BaseException:  # the user's own property, a date out of range, NaN
        log.warning("retry_at of an exception cannot be used exception=%s", class_name(type(exc))[:MAX_NAME])
        return None
