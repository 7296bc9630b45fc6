"""The event loop of a queue's process: one thread that runs the coroutines of all its workers.

1. A worker hands over the coroutine of its job and waits. When the job has ended, the loop itself starts the next one
   of the worker's batch: threads change once per batch, not per job. `concurrency` is the number of jobs on the loop,
   and jobs can share locks, sessions and connection pools.
2. A job's asyncio task is cancelled at its deadline, when the job is killed, and at the end of the grace period.
3. While code of a job runs on the loop, its slot shows since when (STEP). If the loop is blocked, all its jobs miss
   their deadlines; the supervisor then finds the job that blocks it, even if C code holds the interpreter.
4. Coroutines that belong to no job (the lifespan of an app) run here, too.
"""

import asyncio
import logging
import os
import select
import selectors
import sys
import threading
import time
from asyncio import AbstractEventLoop, Handle
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from types import FrameType
from typing import Any

from forq.errors import ExitCode
from forq.output.streams import finish_output
from forq.output.writer import CURRENT_JOB
from forq.procs.scoreboard import LENIENCE, STEP
from forq.workers.handlers import exit_if_forked, fork_mark

log = logging.getLogger("forq")

# A coroutine that still runs this long after it was cancelled is killed with its process.
CANCEL_MS = 1000
# A loop that does not deliver a cancellation within this time counts as blocked. Below CANCEL_MS: the blocker must be
# known when the supervisor kills the process.
BLOCKED_SECONDS = 0.5
# A run that ended just before its deadline may take this long until the next one follows: its result is encoded.
FOLLOW_SECONDS = 0.05
# For longer waits a millisecond does not matter. select() takes no larger descriptors.
FINE_BELOW_SECONDS = 0.05
MAX_SELECT_FD = 1024
# For tasks that jobs left behind, and for the thread itself.
CLOSE_SECONDS = 1.0
# Of a coroutine without timeout: threading accepts no infinity.
_NO_TIMEOUT = -1

_monotonic, _monotonic_ns = time.monotonic, time.monotonic_ns
# The frame under which the loop runs a callback or a step of a task.
HANDLE_RUN = getattr(Handle._run, "__code__", None)


class Cancelled(Enum):
    """Why a coroutine was cancelled. Killed by a user, a job is removed or returned to its queue; at the end of the
    grace period it is returned. The values are the kinds of outcomes that the worker settles."""

    TIMEOUT = "timeout"
    REMOVED = "cancelled"
    RETURNED = "interrupted"


class EventLoop:
    """Starts its thread with the first coroutine. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = False
        # Runs to start, each in a copy of this context.
        self._pending: deque[tuple[Context, Run]] = deque()
        self._woken = False
        self._wake_fd = -1
        self._pid = os.getpid()
        self._fork_mark = fork_mark()

    @property
    def started(self) -> bool:
        return self._loop is not None

    def begin(self, run: "Run", advance: "Advance | None" = None) -> "Chain":
        """Starts a coroutine, and whatever `advance` returns when it has ended, in copies of the caller's context."""
        try:
            loop = self._loop or self.start()
        except BaseException:
            run.close()
            raise
        chain = Chain(loop, run, copy_context(), advance)
        # Cheaper than call_soon_threadsafe: one wake-up for several runs, and fewer system calls.
        self._pending.append((chain.context, run))
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)
        return chain

    def finish(self, chain: "Chain") -> None:
        """Waits until the chain has ended. Cancels a coroutine at its deadline. All runs of a chain have the same
        timeout, so the deadline of a later one is never earlier."""
        ended = chain.ended
        while not chain.over:
            run = chain.run
            try:
                if run.finished:
                    ended.acquire(timeout=FOLLOW_SECONDS)
                elif run.due is None or run.overdue:
                    # The chain ends with a run that was cancelled.
                    ended.acquire()
                elif not ended.acquire(timeout=max(0.0, run.due - _monotonic())) and not run.finished:
                    run.overdue = True
                    requested_ns = _monotonic_ns()
                    self.cancel(run, Cancelled.TIMEOUT)
                    if not ended.acquire(timeout=BLOCKED_SECONDS) and not run.finished:
                        self._show_blocker(run, requested_ns)
            except BaseException as exc:  # raised in this thread by a signal handler, or by another thread
                # The job that runs now fails with it.
                chain.run.thrown = exc
                self.cancel(chain.run, Cancelled.RETURNED)
        if chain.raised is not None:
            raise chain.raised

    def cancel(self, run: "Run", why: Cancelled, cause: str = "") -> None:
        loop = self._loop
        if loop is not None:
            # The loop is closed: the process is ending.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(run.cancel, why, cause)

    def call(self, callback: Callable[[], object]) -> None:
        """Calls it on the loop."""
        loop = self._loop or self.start()
        loop.call_soon_threadsafe(callback)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Blocks until code on the loop has set the event; False if it has not in time."""
        return event.wait(seconds)

    def close(self) -> None:
        """Cancels what is left on the loop and ends its thread. Tasks that ignore it end with the process."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or os.getpid() != self._pid:
            return
        self._closing = True
        loop.call_soon_threadsafe(lambda: loop.create_task(_shut_down(loop)))
        thread.join(2 * CLOSE_SECONDS)
        if not thread.is_alive():
            loop.remove_reader(self._wake_fd)
            os.close(self._wake_fd)
            loop.close()
            self._loop = None

    def executing_frame(self) -> FrameType | None:
        """The innermost frame of the loop's thread."""
        thread = self._thread
        return None if thread is None or thread.ident is None else sys._current_frames().get(thread.ident)

    def executing_run(self) -> "Run | None":
        """The run whose code the loop executes now, also in a task or callback that it started."""
        frame = self.executing_frame()
        while frame is not None:
            if frame.f_code is HANDLE_RUN:
                run: Run | None = frame.f_locals["self"]._context.get(_RUN)
                return run
            frame = frame.f_back
        return None

    def _show_blocker(self, overdue: "Run", since_ns: int) -> None:
        """If the loop has not delivered the cancellation, another job blocks it. STEP of that job's slot is set while
        its own coroutine runs, but not while a task runs that it started: then it is set here."""
        if overdue.cancelled is not None or (run := self.executing_run()) is None or run is overdue:
            return
        words, loop = run.words, self._loop
        if words is None or loop is None or words[STEP] or not words[LENIENCE]:
            return
        words[STEP] = since_ns
        with suppress(RuntimeError):
            # Runs when the loop is no longer blocked.
            loop.call_soon_threadsafe(words.__setitem__, STEP, 0)

    def start(self) -> AbstractEventLoop:
        """Starts the thread, if it does not run. Raises OSError or RuntimeError if the process has reached a limit."""
        with self._starting:
            if self._loop is None:
                with ExitStack() as undo:
                    loop = _new_loop()
                    undo.callback(loop.close)
                    self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                    undo.callback(os.close, self._wake_fd)
                    loop.add_reader(self._wake_fd, self._start_pending, loop)
                    thread = threading.Thread(target=self._run, args=(loop,), name="forq-event-loop", daemon=True)
                    thread.start()
                    undo.pop_all()
                os.register_at_fork(after_in_child=self._stop_after_fork)
                self._loop, self._thread = loop, thread
            return self._loop

    def _start_pending(self, loop: AbstractEventLoop) -> None:
        os.eventfd_read(self._wake_fd)
        # Before the runs are read: a later one wakes the loop again.
        self._woken = False
        while self._pending:
            context, run = self._pending.popleft()
            context.copy().run(run.start, loop)

    def _run(self, loop: AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while not self._closing:
            # A task that raises SystemExit or KeyboardInterrupt, or calls loop.stop(), ends run_forever. The exception
            # is also that of the task; the other jobs go on.
            with suppress(BaseException):
                loop.run_forever()
            exit_if_forked(self._fork_mark)
            if loop.is_closed():
                log.critical("a handler closed the event loop; ending the process")
                os._exit(ExitCode.FAILED)

    def _stop_after_fork(self) -> None:
        """In a process that a handler forked. If its coroutine suspends there, the loop must not continue: it would run
        the other jobs a second time."""
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None and thread.ident == threading.get_ident():
            loop.stop()
            # stop() lets the loop finish its pass, which may include steps of other jobs. asyncio has no public way to
            # drop them; the IndexError that follows ends run_forever.
            if (ready := getattr(loop, "_ready", None)) is not None:
                ready.clear()


class Chain:
    """Coroutines that a worker runs one after the other. `advance` is called on the loop with the one that has ended,
    and returns the next one, or None: the worker's thread has to continue."""

    __slots__ = ("_advance", "_loop", "context", "ended", "over", "raised", "run")

    def __init__(self, loop: AbstractEventLoop, run: "Run", context: Context, advance: "Advance | None") -> None:
        self.run = run
        self.context = context
        # Of `advance`.
        self.raised: BaseException | None = None
        # Released when `over` is set: an exception may interrupt the thread that has just acquired it.
        self.ended = threading.Lock()
        self.ended.acquire()
        self.over = False
        self._loop = loop
        self._advance = advance
        run.on_end = self._continue

    def _continue(self) -> None:
        try:
            following = None if self._advance is None else self._advance(self.run)
        except BaseException as exc:  # raised by forq's own code: the worker reports it
            self.raised, following = exc, None
        if following is None:
            self.over = True
            self.ended.release()
            return
        following.on_end = self._continue
        self.run = following
        context = self.context.copy()
        if self._loop.get_task_factory() is None:
            context.run(following.start, self._loop)
        else:
            # An eager task would run inside this one.
            self._loop.call_soon(following.start, self._loop, context=context)


class Run:
    """One coroutine on the loop: awaits it, and keeps what it returned or raised.

    It is also the awaitable between the task and the coroutine, so that every step of the coroutine passes here.
    `due`: when it is cancelled, on the monotonic clock; None: never.
    """

    __slots__ = (
        *("_coroutine", "_fork_mark", "_send", "_throw", "cancelled", "cause", "due", "finished", "job_id", "on_end"),
        *("overdue", "raised", "result", "started", "task", "thrown", "words"),
    )

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        job_id: str | None,
        words: "memoryview[int] | None" = None,
        due: float | None = None,
    ) -> None:
        self.job_id = job_id
        self.words = words
        self.due = due
        # It was cancelled at its deadline.
        self.overdue = False
        # Raised in the thread of its worker while that waited.
        self.thrown: BaseException | None = None
        self.on_end: Callable[[], None] = _nothing
        self.result: Any = None
        self.raised: BaseException | None = None
        # Why it was cancelled; set by the loop's thread, or before the start.
        self.cancelled: Cancelled | None = None
        self.cause = ""
        self.task: asyncio.Task[None] | None = None
        self.started = self.finished = False
        self._coroutine = coroutine
        self._send, self._throw = coroutine.send, coroutine.throw
        self._fork_mark = fork_mark()

    @property
    def coroutine(self) -> Coroutine[Any, Any, Any]:
        return self._coroutine

    def outcome(self) -> Any:
        """At the end: returns the result of the coroutine, or raises its exception."""
        raised, self.raised, self.thrown = self.thrown or self.raised, None, None
        if raised is None:
            return self.result
        try:
            raise raised
        finally:
            # The traceback refers to this frame.
            del raised, self

    def start(self, loop: AbstractEventLoop) -> None:
        """On the loop. The context is that of the coroutine: tasks that it starts inherit it, and may outlive it."""
        _RUN.set(self)
        if self.job_id is not None:
            CURRENT_JOB.set(self.job_id)
        try:
            self.task = loop.create_task(self._run())
            self.task.add_done_callback(self._task_done)
            if self.cancelled is not None and self.started and not self.finished:
                # The first step of an eager task is over, and did not know its task.
                self.task.cancel()
        except BaseException as exc:  # a task factory of the user
            self.raised = exc
            self._coroutine.close()
            self._finish()

    def cancel(self, why: Cancelled, cause: str) -> None:
        """On the loop."""
        # A kill by a user overrides a timeout; a task is cancelled once.
        first = self.cancelled is None
        if first or why is not Cancelled.TIMEOUT:
            self.cancelled, self.cause = why, cause
        # A task that is cancelled before its first step would end without running at all.
        if first and self.started and not self.finished and self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        self.started = True
        if self.cancelled is not None and self.task is not None:
            self.task.cancel()
        try:
            self.result = await self
        except BaseException as exc:  # a handler may raise anything; SystemExit would end the loop
            self.raised = exc
        finally:
            exit_if_forked(self._fork_mark)
            self._finish()

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        """Code of the user may cancel any task, even before its first step."""
        if not self.finished:
            self.raised = asyncio.CancelledError()
            self._coroutine.close()
            self._finish()

    def _finish(self) -> None:
        self.finished = True
        # Incomplete lines that this job printed.
        finish_output()
        # No reference cycles: thousands of runs a second would need the garbage collector.
        on_end, self.on_end, self.task = self.on_end, _nothing, None
        on_end()

    def __await__(self) -> "Run":
        return self

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        words = self.words
        if words is not None:
            words[STEP] = _monotonic_ns()
        try:
            return self._send(value)
        finally:
            # First: a forked process shares the slot.
            if not self._fork_mark[0]:
                os._exit(0)
            if words is not None:
                words[STEP] = 0

    def throw(self, *exception: Any) -> Any:
        words = self.words
        if words is not None:
            words[STEP] = _monotonic_ns()
        try:
            return self._throw(*exception)
        finally:
            if not self._fork_mark[0]:
                os._exit(0)
            if words is not None:
                words[STEP] = 0

    def close(self) -> None:
        self._coroutine.close()


Advance = Callable[[Run], Run | None]


def _nothing() -> None:
    pass


# The run to which the code on the loop belongs.
_RUN: ContextVar[Run] = ContextVar("forq_run")


class FineSelector(selectors.EpollSelector):
    """Waits for timers to the microsecond. epoll rounds up to a millisecond, which would delay each of many short
    timers by half of that."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and 0 < timeout < FINE_BELOW_SECONDS and self.fileno() < MAX_SELECT_FD:
            if not select.select([self.fileno()], [], [], timeout)[0]:
                return []
            timeout = 0
        return super().select(timeout)


def _new_loop() -> AbstractEventLoop:
    """The user may have chosen another kind of loop, with a policy."""
    loop = asyncio.new_event_loop()
    if type(loop) is not asyncio.SelectorEventLoop:
        return loop
    loop.close()
    return asyncio.SelectorEventLoop(FineSelector())


async def _shut_down(loop: AbstractEventLoop) -> None:
    this = asyncio.current_task()
    tasks = {task for task in asyncio.all_tasks(loop) if task is not this}
    for task in tasks:
        task.cancel()
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        await asyncio.wait_for(loop.shutdown_asyncgens(), CLOSE_SECONDS)
        await asyncio.wait_for(loop.shutdown_default_executor(), CLOSE_SECONDS)
    except TimeoutError:
        log.warning("code that a handler left running on the event loop does not end; it ends with the process")
    finally:
        loop.stop()
