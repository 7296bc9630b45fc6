"""Logs failed attempts and dropped results in the process where they happened.

1. The entry goes to the logger `forq`, a failure with its exception, once the outcome for the job is known.
2. A thread of its own calls `logging`: the user's logging handlers may raise, block or be slow, and must neither delay
   the worker nor change the outcome. The job is settled by then.
3. If `logging` does not accept the entry (it raised, is stuck, or `disable_existing_loggers` disabled the logger), the
   entry is written to the queue's log directly.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace

from forq.broker.scripts import Fate, headline
from forq.errors import Reschedule
from forq.output.streams import count_logged_lines, write_past_logging
from forq.output.writer import CURRENT_JOB
from forq.workers.attempt import Failure
from forq.workers.exec_handlers import ProgramFailed
from forq.workers.handlers import class_name, exit_if_forked_from

# A worker waits this long for its entry to be written, which keeps entries in order. After a timeout, workers do not
# wait at all for NO_WAIT_SECONDS.
WRITE_WAIT_SECONDS = 0.2
NO_WAIT_SECONDS = 5.0
# Small: each entry holds the variables of a handler.
MAX_QUEUED = 16
CLOSE_SECONDS = 1.0

log = logging.getLogger("forq")

# By the kind of a failure.
_HAPPENED = {"timeout": "timed out", "interrupted": "interrupted", "cancelled": "cancelled"}


@dataclass(slots=True)
class FailedAttempt:
    """`queue` and `job` are those of the original job, also for an attempt of the fail handler."""

    queue: str
    job: str
    failure: Failure
    # None once logged: it holds the variables of the handler.
    raised: BaseException | None
    of_fail_handler: bool
    # The outcome, or why it is unknown.
    outcome: Fate | str = ""
    # The handler raised Snooze or RetryAt.
    retry_requested: bool = field(init=False)
    logged: bool = False

    def __post_init__(self) -> None:
        self.retry_requested = self.raised is not None and issubclass(type(self.raised), Reschedule)

    @property
    def final(self) -> bool:
        return isinstance(self.outcome, Fate) and self.outcome.final

    @property
    def level(self) -> int:
        if self.final:
            return logging.ERROR
        return logging.INFO if self.retry_requested or self.failure.interrupted else logging.WARNING

    def headline(self) -> str:
        happened = _HAPPENED.get(self.failure.kind, "failed")
        if self.retry_requested and not self.final:
            happened = "snoozed" if self.failure.kind == "snooze" else "requested a retry"
        return headline(self.queue, self.job, self.outcome, happened, of_fail_handler=self.of_fail_handler)

    @property
    def _label(self) -> str:
        return "reason" if self.failure.interrupted else "error"

    def record(self) -> logging.LogRecord:
        raised = None if self.retry_requested and not self.final else self.raised
        error = self.failure.text()
        # The constant part is the message, by which tools group records; the rest are arguments.
        what, _, follows = self.headline().partition(": ")
        about = (follows, self.queue, self.job, error.partition("\n")[0])
        record = _make_record(self.level, f"{what}: %s queue=%s job=%s {self._label}=%s", about, raised)
        if raised is not None and issubclass(type(raised), ProgramFailed):
            # The Python stack would not help: the failure is in a program.
            record.exc_text = error.partition("\n")[2] or error
        fields: dict[str, object] = {"queue": self.queue, "job_id": self.job}
        if isinstance(self.outcome, Fate):
            kind, wait_ms, number, max_attempts = self.outcome
            again = None if kind in ("dead", "removed", "refused") else wait_ms / 1000
            fields |= {"attempt": number, "attempts": max_attempts, "retry_in_seconds": again}
        return _add_fields(record, fields)

    def text(self, remark: str) -> str:
        error = self.failure.text()
        if self.raised is None or (self.retry_requested and not self.final):
            error = error.partition("\n")[0]
        return f"{self.headline()}{remark} {self._label}={error}"


@dataclass(frozen=True, slots=True)
class DroppedResult:
    """A done job whose result cannot be stored. `more`: other such jobs since the last entry."""

    queue: str
    job: str
    reason: str
    more: int = 0
    level: int = logging.WARNING

    def headline(self) -> str:
        more = f" (and {self.more} more since the last message)" if self.more else ""
        return f"job is done, but its result is not kept{more}"

    def record(self) -> logging.LogRecord:
        about = (self.queue, self.job, self.reason)
        record = _make_record(self.level, f"{self.headline()} queue=%s job=%s reason=%s", about, None)
        return _add_fields(record, {"queue": self.queue, "job_id": self.job})

    def text(self, remark: str) -> str:
        return f"{self.headline()}{remark} reason={self.reason}"


JobLogEntry = FailedAttempt | DroppedResult


class JobLog:
    """Shared by the workers of one process. Its thread starts with the first entry."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._queue: queue.Queue[tuple[JobLogEntry | None, Context, threading.Event]] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._no_wait_until = 0.0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def log_failure(self, failed: FailedAttempt, outcome: Fate | str) -> None:
        """Logs with the exception; a second time, when the outcome is known, without."""
        if failed.logged and isinstance(outcome, Fate) and outcome.kind == "refused":
            # The reply was lost: the job is settled, with an unknown outcome.
            return
        attempt = replace(failed, outcome=outcome)
        attempt.retry_requested = failed.retry_requested
        failed.raised, failed.logged = None, True
        self.write(attempt)

    def write(self, entry: JobLogEntry) -> None:
        written = threading.Event()
        context = copy_context()
        context.run(CURRENT_JOB.set, entry.job)
        try:
            self._start()
            self._queue.put_nowait((entry, context, written))
        except (queue.Full, RuntimeError):
            # Logging is stuck, or no thread can be started.
            _write_past_logging(entry, " (logging is stuck)")
            return
        if self._now() >= self._no_wait_until and not written.wait(WRITE_WAIT_SECONDS):
            self._no_wait_until = self._now() + NO_WAIT_SECONDS

    def close(self) -> None:
        """Waits a moment for entries that are not written yet."""
        deadline = self._now() + CLOSE_SECONDS
        written = threading.Event()
        if self._thread is None:
            return
        try:
            self._queue.put((None, copy_context(), written), timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        written.wait(max(0.0, deadline - self._now()))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="forq-job-log", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            entry, context, written = self._queue.get()
            if entry is not None:
                context.run(self._write_to_logging, entry)
            written.set()
            # The handler's variables must not live until the next entry.
            del entry, context

    def _write_to_logging(self, entry: JobLogEntry) -> None:
        if log.disabled:
            _write_past_logging(entry)
            return
        logged = count_logged_lines()
        try:
            if log.isEnabledFor(entry.level):
                log.handle(entry.record())
        except BaseException as exc:  # the user's handlers, filters and formatters may raise anything, even SystemExit
            if count_logged_lines() == logged:
                _write_past_logging(entry, f" (logging raised {class_name(type(exc))})")
        finally:
            exit_if_forked_from(self._pid)


def _make_record(
    level: int, message: str, arguments: tuple[object, ...], raised: BaseException | None
) -> logging.LogRecord:
    path, line, function, exc_info = "(forq)", 0, None, None
    if raised is not None:
        tb = BaseException.__dict__["__traceback__"].__get__(raised)
        exc_info = (type(raised), raised, tb)
        while tb is not None:
            # Where it was raised, not where it is logged.
            code, line = tb.tb_frame.f_code, tb.tb_lineno
            path, function, tb = code.co_filename, code.co_name, tb.tb_next
    return log.makeRecord(log.name, level, path, line, message, arguments, exc_info, function)


def _add_fields(record: logging.LogRecord, fields: dict[str, object]) -> logging.LogRecord:
    """Not with `extra`, which refuses a name that the user's record factory has set."""
    for name, value in fields.items():
        record.__dict__.setdefault(name, value)
    return record


def _write_past_logging(entry: JobLogEntry, remark: str = "") -> None:
    # Not isEnabledFor, which is False for a disabled logger.
    if entry.level < log.getEffectiveLevel():
        return
    write_past_logging(logging.getLevelName(entry.level), entry.job, entry.text(remark))
