"""Tells `logging` of attempts that failed, in the process where they did, once it is known what follows.

1. The line goes to the logger `forq` with the exception, so that whatever listens to logging there sees it.
2. It goes there in a thread of its own: a handler of the user's logging may raise, block or take long, and that must
   neither hold up the worker nor change what becomes of a job. By then the job is settled.
3. What logging does not take (it raised, it is stuck, `disable_existing_loggers` has turned forq's logger off) is in
   the queue's log all the same.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace

from forq.errors import RetryAt
from forq.fates import Fate, headline
from forq.workers.attempt import Failure
from forq.workers.exec_messages import ProgramFailed
from forq.workers.handlers import leave_if_copy_of, name_of
from forq.workers.output import lines_of_logging, tell_past_logging
from forq.workers.output_writer import CURRENT_JOB

# How long a worker waits until its line is written, so that lines are in the order of what happened; and if that was in
# vain, for how long it does not wait again.
PATIENT_SECONDS = 0.2
IMPATIENT_SECONDS = 5.0
# Each holds the variables of a handler.
MAX_WAITING = 16
LAST_SECONDS = 1.0

log = logging.getLogger("forq")


@dataclass(slots=True)
class FailedAttempt:
    """One attempt that has to be told. `queue` and `job`: as a user knows them, of a fail job those of its job."""

    queue: str
    job: str
    failure: Failure
    # None once it was told: it holds the variables of the handler.
    raised: BaseException | None
    of_fail_handler: bool
    # What follows, or why nobody knows.
    follows: Fate | str = ""
    # Whether the handler itself wanted to be called again later.
    asked: bool = field(init=False)
    told: bool = False

    def __post_init__(self) -> None:
        self.asked = self.raised is not None and issubclass(type(self.raised), RetryAt)

    @property
    def final(self) -> bool:
        return isinstance(self.follows, Fate) and self.follows.final

    @property
    def level(self) -> int:
        if self.final:
            return logging.ERROR
        return logging.INFO if self.asked else logging.WARNING

    def headline(self) -> str:
        happened = "timed out" if self.failure.kind == "timeout" else "failed"
        if self.asked and not self.final:
            happened = "asked to be tried again"
        return headline(self.queue, self.job, self.follows, happened, of_fail_handler=self.of_fail_handler)


class FailureLog:
    """Of one process. Its thread starts with the first line."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waiting: queue.Queue[tuple[FailedAttempt, Context, threading.Event]] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._impatient_until = 0.0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def tell(self, failed: FailedAttempt, follows: Fate | str) -> None:
        """Tells it with its exception; a second time, when more is known, without."""
        if failed.told and isinstance(follows, Fate) and follows.how == "refused":
            # Its answer was lost: it is settled, and nobody can say how.
            return
        attempt = replace(failed, follows=follows)
        attempt.asked = failed.asked
        failed.raised, failed.told = None, True
        told = threading.Event()
        context = copy_context()
        context.run(CURRENT_JOB.set, attempt.job)
        try:
            self._start()
            self._waiting.put_nowait((attempt, context, told))
        except (queue.Full, RuntimeError):
            # It is stuck, or no more threads are to be had.
            _tell_past(attempt, "logging is stuck")
            return
        if self._now() >= self._impatient_until and not told.wait(PATIENT_SECONDS):
            self._impatient_until = self._now() + IMPATIENT_SECONDS

    def close(self) -> None:
        """Waits a moment for what is not told yet."""
        deadline = self._now() + LAST_SECONDS
        told = threading.Event()
        if self._thread is None:
            return
        try:
            self._waiting.put((_NOTHING, copy_context(), told), timeout=LAST_SECONDS)
        except queue.Full:
            return
        told.wait(max(0.0, deadline - self._now()))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="forq-failures", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            attempt, context, told = self._waiting.get()
            if attempt is not _NOTHING:
                context.run(self._tell_logging, attempt)
            told.set()
            # What a handler has left must not live until the next failure.
            del attempt, context

    def _tell_logging(self, attempt: FailedAttempt) -> None:
        if log.disabled:
            _tell_past(attempt, None)
            return
        lines = lines_of_logging()
        try:
            if log.isEnabledFor(attempt.level):
                log.handle(_record(attempt))
        except BaseException as exc:  # the user's own handlers, filters and formatters; SystemExit too
            if lines_of_logging() == lines:
                _tell_past(attempt, f"logging raised {name_of(type(exc))}")
        finally:
            leave_if_copy_of(self._pid)


_NOTHING = FailedAttempt("", "", Failure(b"", b"", "", None), None, False)


def _record(attempt: FailedAttempt) -> logging.LogRecord:
    asked, raised = attempt.asked and not attempt.final, attempt.raised
    path, line, function, exc_info = "(forq)", 0, None, None
    if raised is not None and not asked:
        tb = BaseException.__dict__["__traceback__"].__get__(raised)
        exc_info = (type(raised), raised, tb)
        while tb is not None:
            # Where it was raised, not where it is told.
            code, line = tb.tb_frame.f_code, tb.tb_lineno
            path, function, tb = code.co_filename, code.co_name, tb.tb_next
    error = attempt.failure.text()
    record = log.makeRecord(
        log.name,
        attempt.level,
        path,
        line,
        "%s queue=%s job=%s error=%s",
        (attempt.headline(), attempt.queue, attempt.job, error.partition("\n")[0]),
        exc_info,
        function,
    )
    if raised is not None and issubclass(type(raised), ProgramFailed):
        # Python's own stack says nothing about a program.
        record.exc_text = error.partition("\n")[2] or error
    fields: dict[str, object] = {"queue": attempt.queue, "job_id": attempt.job}
    if isinstance(attempt.follows, Fate):
        how, wait_ms, number, of = attempt.follows
        again = None if how in ("dead", "removed", "refused") else wait_ms / 1000
        fields |= {"attempt": number, "attempts": of, "retry_in_seconds": again}
    # By hand: `extra` refuses a name that a record factory of the user's has used.
    for name, value in fields.items():
        record.__dict__.setdefault(name, value)
    return record


def _tell_past(attempt: FailedAttempt, why: str | None) -> None:
    reason = "" if why is None else f" ({why})"
    text = attempt.failure.text()
    if attempt.raised is None or (attempt.asked and not attempt.final):
        text = text.partition("\n")[0]
    level = logging.getLevelName(attempt.level)
    tell_past_logging(level, attempt.job, f"{attempt.headline()}{reason} error={text}")
