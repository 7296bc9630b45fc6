"""One attempt of one job: decodes the record, calls the handler, and describes the failure or encodes the result.

Only this module turns exceptions into failures. A result that cannot be encoded never fails the job.
"""

import asyncio
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Coroutine
from datetime import datetime
from types import CoroutineType
from typing import Any, NamedTuple, cast

import orjson

import forq
from forq.broker.claim import Limits
from forq.broker.enqueue import MAX_SECONDS
from forq.broker.record import pack_data, stored_options, unpack
from forq.errors import MAX_SNOOZE_SECONDS, ForqError, InvalidData, Snooze
from forq.job import Inputs, Job, Reporter, TaskResult, claimed_job
from forq.job_options import AttemptOptions
from forq.procs.scoreboard import LENIENCE, POSITION, STARTED, STEP, TIMEOUT, Slot
from forq.workers.coroutine_stacks import coroutine_stack
from forq.workers.event_loop import CANCEL_MS, Cancelled, EventLoop, Run
from forq.workers.exec_handlers import MAX_NAME, ProgramFailed
from forq.workers.handlers import Handler, Handlers, class_name, exit_if_forked, fork_mark, is_app, safe_text
from forq.workers.tracing import Tracing

log = logging.getLogger("forq")

MAX_MESSAGE = 2000
MAX_TRACEBACK = 8000
# Length of the reason why a result is dropped.
MAX_REASON = 300
# Prefix of that reason, in place of a result.
NO_RESULT = b"!"
# Job.should_stop is true when this part of the timeout is left, but not earlier than STOP_EARLY_MS before the end.
STOP_EARLY_PART = 10
STOP_EARLY_MS = 5000
# When a job tries again whose results of other jobs could not be read.
INPUTS_SNOOZE_SECONDS = 1.0
# Of a subclass of Snooze that has no valid `seconds`.
DEFAULT_SNOOZE_SECONDS = 60.0

_CAUSES = {b"killed": "killed by a user", b"interrupted": "its process was stopped"}
_INTERRUPTED = (Cancelled.REMOVED.value, Cancelled.RETURNED.value)
# The flag of records with neither counts nor options, as a number; and those of records with options of their own.
_PLAIN = ord("p")
_OWN_OPTIONS = (b"o", b"O")
_FORQ_AND_ASYNCIO = tuple(f"{os.path.dirname(str(module.__file__))}{os.sep}" for module in (forq, asyncio))


class Failure(NamedTuple):
    """A failed attempt: the error as JSON with and without traceback, its kind, and the requested retry time.

    Of an attempt that was ended on request (`interrupted`): the stack as JSON, and the cause.
    """

    error: bytes
    brief: bytes
    kind: str
    retry_at_ms: int | None

    @property
    def interrupted(self) -> bool:
        return self.kind in _INTERRUPTED

    def text(self) -> str:
        """The error in one line, then its traceback."""
        if self.interrupted:
            return _CAUSES.get(self.brief, self.brief.decode())
        error = orjson.loads(self.error)
        return f"{error['name']}: {error['message']}\n{error['traceback']}".rstrip()


def read_job(queue: str, job_id: str, packed: bytes, fence: int) -> tuple[Any, Job]:
    """Decodes a claimed record."""
    if packed and packed[0] == _PLAIN:
        # The common case, decoded in as few steps as possible: FLAG PRIORITY ' ' ENQUEUED_US '\n' BODY.
        head, _, body = packed.partition(b"\n")
        try:
            # Cheaper than its number, which few handlers read.
            if not head[3:].isdigit():
                raise ValueError(f"{head!r} does not end in the time of its enqueue")
            fields = orjson.loads(body)
            if len(fields) == 3:
                identifier, job_type, data = fields
                return data, claimed_job(queue, job_id, identifier or job_id, job_type, head, fence)
            identifier, job_type, data, trace, *_ = fields
            job = claimed_job(queue, job_id, identifier or job_id, job_type, head, fence)
            job.trace = trace
            return data, job
        except (ValueError, TypeError) as exc:
            raise InvalidData(f"broken job record: {exc}") from exc
    record = unpack(packed)
    counts = (record.retry_count, record.stall_count, record.timeout_count)
    identifier = record.identifier or job_id
    enqueued_at = record.enqueued_us / 1e6
    about = (identifier, record.type, record.priority, enqueued_at)
    more: tuple[Any, ...] = (record.trace, record.snooze_count)
    if (options := record.options) is not None:
        inputs = Inputs(options.input_count, options.input_use) if options.input_count else None
        more = (*more, options.tick_ms, inputs, options.batch, options.member)
    return record.data, Job(queue, job_id, *about, fence, counts, *more)


def read_fail_job(queue: str, job_id: str, packed: bytes, fence: int) -> tuple[Any, Job]:
    """Decodes a claimed record of a fail queue."""
    stored, job = read_job(queue, job_id, packed, fence)
    try:
        (identifier, job_type, data, *trace), original, error = stored
        original |= {"identifier": identifier or original["id"], "type": job_type}
        # The fail handler belongs to the same trace.
        job.trace = trace[0] if trace else None
    except (TypeError, ValueError, KeyError) as exc:
        raise InvalidData(f"broken fail job: {exc}") from exc
    return [data, original, error], job


class AttemptRunner:
    """Runs the attempts of one worker.

    `timeout_seconds`: deadline of a coroutine (0: none). `max_result_bytes`: longest result (0: results are not kept,
    unless the job or its task keeps them).
    """

    of_fail_handler = False
    # Decodes a record.
    _read = staticmethod(read_job)

    def __init__(
        self,
        queue: str,
        handlers: Handlers,
        slot: Slot | None = None,
        reporter: Reporter | None = None,
        tracing: Tracing | None = None,
        event_loop: EventLoop | None = None,
    ) -> None:
        self.timeout_seconds = 0.0
        self.max_result_bytes = 0
        # Of the batch; set by the loop.
        self.limits: Limits | None = None
        self.stopping: Callable[[], bool] = _never
        # Reads the results that a job uses (Consumer.read_inputs).
        self.read_inputs: Callable[[str, int], list[bytes] | None] = _none_are_known
        # Position of the job that was asked to end.
        self.killed = 0
        self._kill_cause = ""
        self._killed_as = Cancelled.RETURNED
        # The coroutine of the last attempt, if it ended because of `cancel`.
        self._interrupted: Run | None = None
        # Of the last attempt, if it succeeded and its result is kept.
        self.result: bytes | None = None
        # How long the last attempt's result is kept, by its own options. None: as the queue says. With 0 the result is
        # b"".
        self.keep_done_ms: int | None = None
        # Of the last attempt, if it failed. The loop clears it: it holds the handler's variables.
        self.raised: BaseException | None = None
        self.queue = queue
        self._handlers = handlers.for_worker()
        # The options of the task that ran last. None: it was a plain handler.
        self.task_options: AttemptOptions | None = None
        # Handlers that have run here, and the options of those that are tasks.
        self._known: dict[str | None, tuple[Handler, AttemptOptions | None]] = {}
        tasks = [task for app in handlers.apps for task in app.tasks.values()]
        # If not, a job is not decoded before its position is published.
        self.has_task_timeouts = any(task.options.timeout_ms is not None for task in tasks)
        # Whether the event loop may start the next job of a batch. A span belongs to the worker's thread.
        self.chains = tracing is None and handlers.some_async
        # The record of the running job; and one decoded ahead, with its data and job.
        self._record = b""
        self._decoded: tuple[bytes, Any, Job] | None = None
        self._slot = slot
        self._reporter = reporter
        self._tracing = tracing
        self._owns_event_loop = event_loop is None
        self._event_loop = event_loop or EventLoop()
        # The coroutine of the running job, with the job's position.
        self._run: tuple[int, Run] | None = None
        # Part of the running job's timeout that has passed before its handler starts.
        self._spent_seconds = 0.0
        self._fork_mark = fork_mark()

    def run(self, job_id: str, record: bytes, fence: int) -> Failure | None:
        """None if the handler returned."""
        try:
            data, job = self._open(job_id, record, fence)
            if job._inputs is not None:
                job._inputs = self._fetch(job_id, job._inputs)
            if self._tracing is None:
                handler, own = self._known.get(job.type) or self._look_up(job.type)
                self.task_options = own
                result = handler(data, job)
                # Not isinstance, which a user's class may override.
                if type(result) is CoroutineType:
                    result = self._run_coroutine(job_id, result)
            else:
                result = self._run_traced(self._tracing, data, job)
                own = self.task_options
            if self.max_result_bytes or (own is not None and own.keep_done_ms is not None) or record[0] != _PLAIN:
                self._keep_result(result)
        except BaseException as exc:  # a handler may raise anything, even SystemExit; the worker continues
            return self._fail(exc, fence)
        finally:
            # See exit_if_forked.
            if not self._fork_mark[0]:
                os._exit(0)
            if self._run is not None:
                self.close_run(self._run[1])
        return None

    def _run_traced(self, tracing: Tracing, data: Any, job: Job) -> Any:
        with tracing.attempt(job):
            handler, self.task_options = self._known.get(job.type) or self._look_up(job.type)
            result = handler(data, job)
            return self._run_coroutine(job.id, result) if type(result) is CoroutineType else result

    def _run_coroutine(self, job_id: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        run = self._make_run(job_id, coroutine)
        self._event_loop.finish(self._event_loop.begin(run))
        return self._outcome(run)

    def begin(self, job_id: str, record: bytes, fence: int) -> Run | None:
        """The coroutine of this job, for the event loop; `end` continues when it has ended. None if the job has to be
        run in the worker's thread: its handler is not async, it needs results of other jobs, or `run` will report an
        error."""
        try:
            if self._decoded is None or self._decoded[0] is not record:
                self._decoded = record, *self._read(self.queue, job_id, record, fence)
            if not self._handlers.is_async(self._decoded[2].type) or self._decoded[2]._inputs is not None:
                return None
            if not self._event_loop.started:
                self._event_loop.start()
            data, job = self._open(job_id, record, fence)
            handler, self.task_options = self._known.get(job.type) or self._look_up(job.type)
            # Creates the coroutine, but runs no code of the user.
            return self._make_run(job_id, handler(data, job))
        except (InvalidData, TypeError, OSError, RuntimeError):
            return None

    def end(self, run: Run, fence: int) -> Failure | None:
        """None if the coroutine returned. On the event loop; `close_run` follows."""
        if run.words is not None:
            # Code of the user may encode a result or describe an exception, and block the loop.
            run.words[STEP] = time.monotonic_ns()
        try:
            self._keep_result(self._outcome(run))
        except BaseException as exc:
            return self._fail(exc, fence)
        finally:
            exit_if_forked(self._fork_mark)
        return None

    def run_chain(self, run: Run, advance: Callable[[Run], Run | None]) -> None:
        """Runs this coroutine on the event loop, then those that `advance` returns."""
        self._event_loop.finish(self._event_loop.begin(run, advance))

    def _open(self, job_id: str, record: bytes, fence: int) -> tuple[Any, Job]:
        self.result = self._interrupted = self.keep_done_ms = self.task_options = None
        self._spent_seconds = 0.0
        self._record = record
        if self._decoded is not None and self._decoded[0] is record:
            _, data, job = self._decoded
        else:
            data, job = self._read(self.queue, job_id, record, fence)
        self._decoded = None
        if self._slot is not None:
            job._reporter, job._position, job._attempts = self._reporter, self._slot.words[POSITION], self
        return data, job

    def _fetch(self, job_id: str, inputs: Inputs) -> Inputs:
        """Reads the results that the job uses. Raises Snooze if that is not possible now: the job has not failed."""
        began = time.monotonic()
        try:
            packed = self.read_inputs(job_id, inputs.total)
        except ForqError as exc:
            raise Snooze(INPUTS_SNOOZE_SECONDS, f"the results of its dependencies cannot be read: {exc}") from exc
        if packed is None:
            raise Snooze(INPUTS_SNOOZE_SECONDS, "the results of its dependencies are gone: the job has ended meanwhile")
        self._spent_seconds = time.monotonic() - began
        return inputs._replace(packed=tuple(packed))

    def _fail(self, exc: BaseException, fence: int) -> Failure:
        exit_if_forked(self._fork_mark)
        strip_forq_frames(exc)
        if self._interrupted is not None:
            return _describe_interruption(exc, self._interrupted)
        self.raised = exc
        return describe_failure(exc, self._server_ms(fence))

    def _look_up(self, job_type: str | None) -> tuple[Handler, AttemptOptions | None]:
        found = self._handlers.for_type(job_type), self._handlers.options_of(job_type)
        # An app gets the types that none of its tasks has: any text, so they are not remembered.
        if not is_app(found[0]):
            self._known[job_type] = found
        return found

    def _keep_result(self, result: Any) -> None:
        """Encodes the result if another job uses it, or if the job keeps it, else its task, else the queue."""
        task_options = self.task_options
        if (task_options is None or task_options.keep_done_ms is None) and self._record[:1] not in _OWN_OPTIONS:
            if self.max_result_bytes:
                self.result = encode_result(result, self.max_result_bytes)
            return
        stored = stored_options(self._record)
        for own in (stored, self.task_options):
            if own is not None and own.keep_done_ms is not None:
                self.keep_done_ms = own.keep_done_ms
                break
        # The job that uses the result gets it when this one is settled, so nothing has to keep it.
        is_wanted = stored is not None and stored.is_result_wanted
        if self.keep_done_ms == 0 and not is_wanted:
            self.result = b"" if self.max_result_bytes else None
        elif (is_wanted or self.keep_done_ms is not None) and self.limits is not None:
            self.result = encode_result(result, self.limits.max_result_bytes)
        elif self.max_result_bytes:
            self.result = encode_result(result, self.max_result_bytes)

    def should_stop(self, position: int) -> bool:
        """See Job.should_stop."""
        if self._slot is None:
            return False
        words = self._slot.words
        if self.stopping() or position == self.killed or words[POSITION] != position:
            return True
        timeout_ms = words[TIMEOUT]
        if not timeout_ms:
            return False
        allowed_ms = timeout_ms - min(timeout_ms // STOP_EARLY_PART, STOP_EARLY_MS)
        return time.monotonic_ns() - words[STARTED] >= allowed_ms * 1_000_000

    def max_retries(self) -> int | None:
        """Retries allowed for the running job, in both lanes; None: unknown."""
        limits = self.limits
        in_main = None if limits is None else limits.max_retries
        for own in (self.task_options, stored_options(self._record)):
            if own is not None and own.max_retries is not None:
                in_main = own.max_retries
        return None if in_main is None or limits is None else in_main + limits.retry_lane_retries

    def own_timeout_ms(self, job_id: bytes, record: bytes, fence: int) -> int | None:
        """The timeout that the job or its task sets instead of the queue's. Decodes the job only if a task sets one."""
        try:
            stored = stored_options(record)
            if stored is not None and stored.timeout_ms is not None:
                return stored.timeout_ms
            if not self.has_task_timeouts:
                return None
            data, job = self._read(self.queue, job_id.decode(errors="replace"), record, fence)
            self._decoded = record, data, job
            options = self._handlers.options_of(job.type)
        except (InvalidData, TypeError):
            # A broken record, or a type that is a list or an object. The attempt reports it.
            return None
        return None if options is None else options.timeout_ms

    def _server_ms(self, fence: int) -> int:
        """The server's clock, in epoch ms: a fence is its time at the claim, shortly before the start of the job."""
        if self._slot is None:
            return time.time_ns() // 1_000_000
        return fence // 1000 + (time.monotonic_ns() - self._slot.words[STARTED]) // 1_000_000

    def _make_run(self, job_id: str, coroutine: Coroutine[Any, Any, Any]) -> Run:
        slot = self._slot
        if slot is None:
            return Run(coroutine, job_id)
        slot.words[LENIENCE] = CANCEL_MS
        position = slot.words[POSITION]
        left = self.timeout_seconds - self._spent_seconds
        due = time.monotonic() + left if self.timeout_seconds else None
        run = Run(coroutine, job_id, slot.words, due)
        self._run = position, run
        if self.killed == position:
            # `cancel` came before `_run` was set.
            run.cancelled, run.cause = self._killed_as, self._kill_cause
        return run

    def _outcome(self, run: Run) -> Any:
        """Returns the result of a coroutine that has ended, or raises why it failed."""
        thrown = run.thrown is not None
        try:
            return run.outcome()
        except BaseException as exc:
            if run.cancelled is Cancelled.TIMEOUT:
                # An exception that the handler raised instead is an ordinary failure.
                if type(exc) is asyncio.CancelledError:
                    late = _DeadlinePassed(f"cancelled at its deadline, after {self.timeout_seconds:g} s")
                    # Shows where the handler was cancelled.
                    raise late.with_traceback(exc.__traceback__) from None
            elif run.cancelled is not None and not thrown:
                self._interrupted = run
            raise

    def close_run(self, run: Run) -> None:
        """The slot no longer shows a coroutine."""
        self._run = None
        if run.words is not None:
            run.words[STEP] = run.words[LENIENCE] = 0

    def cancel(self, position: int | None, outcome: Cancelled, cause: str) -> None:
        """Minder: the job at this position (None: any) has to end. Cancels a coroutine; the supervisor kills others."""
        # Read once: meanwhile the worker may start the next job.
        if self._slot is None or position not in (None, at := self._slot.position):
            return
        # In this order: the worker reads `killed` after it has set `_run`.
        self._killed_as, self._kill_cause, self.killed = outcome, cause, at
        if (running := self._run) is not None and position in (None, running[0]):
            self._event_loop.cancel(running[1], outcome, cause)

    def coroutine_stack(self) -> str | None:
        """Minder: where the coroutine of the running job is; None if no coroutine runs."""
        running = self._run
        if running is None:
            return None
        # Coroutines and tasks may be objects of the user.
        return safe_text(lambda: coroutine_stack(running[1], self._event_loop))

    def close(self) -> None:
        """Stops programs."""
        self._handlers.close()
        if self._owns_event_loop:
            self._event_loop.close()


class FailAttemptRunner(AttemptRunner):
    """Runs attempts of the fail handler, whose data is [original data, original job, error]."""

    of_fail_handler = True
    _read = staticmethod(read_fail_job)


def _never() -> bool:
    return False


def _none_are_known(job_id: str, count: int) -> list[bytes] | None:
    return None


class _DeadlinePassed(TimeoutError):
    """A coroutine was cancelled at its deadline."""


# So that tracebacks show the same name as the stored error.
_DeadlinePassed.__module__, _DeadlinePassed.__qualname__ = "builtins", "TimeoutError"


def encode_result(value: Any, max_bytes: int) -> bytes:
    """JSON in one line; or NO_RESULT and the reason why the result is dropped."""
    try:
        if type(value) is TaskResult:
            value = value.pack(value.value)
        packed = pack_data(value, "the handler's result")
    except BaseException as exc:  # encoding may call user code, which may raise anything; the job is done
        return _no_result(_reason(exc))
    if len(packed) > max_bytes:
        return _no_result(f"it is longer than max_data = {max_bytes} bytes")
    return packed


def _reason(exc: BaseException) -> str:
    try:
        return str(exc) or type(exc).__name__
    except BaseException as broken:  # __str__ is user code, too
        return f"it cannot be encoded as JSON, and its error has no text ({type(broken).__name__})"


def _no_result(reason: str) -> bytes:
    """One line, without lone surrogates. `reason` may be a subclass of str that overrides methods."""
    return NO_RESULT + " ".join(str.split(reason))[:MAX_REASON].encode("utf-8", "replace")


def describe_failure(exc: BaseException, now_ms: int = 0) -> Failure:
    """Name, message, kind and traceback of an exception, as text only. `now_ms`: the server's clock, for Snooze."""
    if issubclass(type(exc), Snooze):
        return _describe_snooze(exc, now_ms)
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


def _describe_interruption(exc: BaseException, run: Run) -> Failure:
    """Whatever the coroutine raised after it was cancelled is not its failure. The traceback shows where it was."""
    stack = orjson.dumps(safe_text(lambda: _traceback(exc))[-MAX_TRACEBACK:])
    assert run.cancelled is not None
    return Failure(stack, run.cause.encode(), run.cancelled.value, None)


def _describe_snooze(exc: BaseException, now_ms: int) -> Failure:
    """Without traceback: it is not an error."""
    # A subclass may have no `seconds`, or any value there.
    try:
        seconds = min(max(float(exc.seconds), 0.0), MAX_SNOOZE_SECONDS)  # type: ignore[attr-defined]
    except BaseException:
        seconds = DEFAULT_SNOOZE_SECONDS
    message = safe_text(lambda: str(exc))[:MAX_MESSAGE]
    brief = orjson.dumps({"name": "Snooze", "message": message, "kind": "snooze"})
    error = orjson.dumps({"name": "Snooze", "message": message, "kind": "snooze", "traceback": ""})
    return Failure(error, brief, "snooze", now_ms + math.ceil(seconds * 1000))


def strip_forq_frames(exc: BaseException) -> None:
    """Cuts the leading frames of forq and asyncio from the traceback.

    If there are no others, keeps them all, unless the error is forq's own: then the message is enough.
    """
    # The exception's class may override __traceback__.
    traceback_of: Any = BaseException.__dict__["__traceback__"]
    user_frames = traceback_of.__get__(exc)
    while user_frames is not None and user_frames.tb_frame.f_code.co_filename.startswith(_FORQ_AND_ASYNCIO):
        user_frames = user_frames.tb_next
    if user_frames is not None or issubclass(type(exc), ForqError):
        traceback_of.__set__(exc, user_frames)


def _error_name(exc: BaseException) -> str:
    program = _program_failure(exc)
    return class_name(type(exc)) if program is None else program.name


def _traceback(exc: BaseException) -> str:
    """A program's failure has a trace of its own: the Python stack would not help."""
    program = _program_failure(exc)
    return "".join(traceback.format_exception(exc)) if program is None else program.trace


def _program_failure(exc: BaseException) -> ProgramFailed | None:
    """Not with isinstance, which a user's class may override."""
    return cast(ProgramFailed, exc) if issubclass(type(exc), ProgramFailed) else None


def _retry_at_ms(exc: BaseException) -> int | None:
    """`retry_at` of the exception in epoch ms; None if it has none or an invalid one."""
    try:
        when = getattr(exc, "retry_at", None)
        if isinstance(when, datetime):
            when = when.timestamp() if when.tzinfo is not None else None
        if isinstance(when, bool) or not isinstance(when, int | float):
            return None
        if not 0 <= when <= MAX_SECONDS:
            raise ValueError(f"retry_at = {when} is not a time in epoch seconds")
        return math.ceil(when * 1000)
    except BaseException:  # a property with user code, a date out of range, NaN
        log.warning("invalid retry_at; using the queue's retry delay exception=%s", class_name(type(exc))[:MAX_NAME])
        return None
