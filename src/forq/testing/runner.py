"""Runs due jobs in the thread of the test, with the code of a worker: claims, attempts, hooks and settling are those of
workers/. One job at a time; nothing is killed, and only coroutines have timeouts.

1. One call of `JobRunner.run` stands for a process: it enters the lifespans before its first job and leaves them after
   the last.
2. Due jobs are promoted, due ticks are fired, and ends are reported to other queues with the code of pulse.
3. One queue after the other, again and again until none has a job that is due. Within a queue: waiting jobs by
   priority, then fail jobs, then the retry lane.
Coroutines run in the event loop of the test (`arun_all`), else in one of the runner. `arun_all` runs the worker's
blocking code in a greenlet (broker/async_connection.py). Where it waits for a coroutine, the greenlet switches to the
test's event loop.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeGuard

from forq.broker.async_connection import wait_for
from forq.broker.claim import Consumer, Limits, report_progress
from forq.broker.inspect import counts_of
from forq.broker.keys import fail_queue, queue_base
from forq.broker.recovery import WorkerRecovery
from forq.broker.scripts import Fate
from forq.client import Client
from forq.errors import Fenced, ForqError, Reschedule, UnknownQueue
from forq.job import Job, new_id
from forq.procs.scoreboard import Scoreboard, Slot
from forq.workers.attempt import AttemptRunner, FailAttemptRunner, Failure
from forq.workers.event_loop import Advance, Cancelled, Chain, EventLoop, Run
from forq.workers.grant import Grant
from forq.workers.handlers import Handlers
from forq.workers.job_log import FailedAttempt, JobLog, JobLogEntry
from forq.workers.lifespan import LifespanFailed, Lifespans
from forq.workers.loop import TurnNumbers, WorkerLoop
from forq.workers.recycling import Recycling

log = logging.getLogger("forq")

DEFAULT_LIMIT = 1000
# No heartbeats are sent, and tests may move the clock: the worker never counts as dead.
EXPIRY_MS = 1000 * 365 * 86_400_000

Outcome = Literal["done", "retried", "snoozed", "dead", "removed"]
_OUTCOMES: dict[str, Outcome] = {
    "dead": "dead",
    "retried": "retried",
    "lane": "retried",
    "returned": "retried",
    "snoozed": "snoozed",
    "interrupted": "retried",
}
# Passes of the loop before a wait for an event sleeps between them.
QUICK_PASSES = 50
PASS_SECONDS = 0.001


class LimitReached(ForqError):
    """`run_all` has run as many jobs as it may, and more are due."""

    code = "limit_reached"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a job that ran.

    `task`: the name of the task, or the type of the job. `outcome`: done, retried (later), snoozed, dead, or removed
    while it ran. `error`: the exception of the handler. `of_fail_handler`: the fail handler (on_dead) ran for this job.
    """

    queue: str
    id: str
    task: str | None
    number: int
    outcome: Outcome
    error: BaseException | None = None
    of_fail_handler: bool = False


@dataclass(frozen=True, slots=True)
class ServedQueue:
    """What runs the jobs of a queue."""

    name: str
    handlers: Handlers
    fail_handler: Handlers | None = None


class JobRunner:
    """Serves the queues of one Redis. `queues`: those to serve, looked up at the start of each run."""

    def __init__(self, client: Client, queues: Callable[[], Sequence[ServedQueue]]) -> None:
        self.client = client
        self._queues = queues
        self._processor = f"testing-{new_id()}"
        # The thread that runs jobs now.
        self.thread: int | None = None
        # Runs that have ended.
        self.runs = 0

    def run(self, *, limit: int, raises: bool, most: int, outer: AbstractEventLoop | None) -> list[Attempt]:
        """`limit`: LimitReached if more jobs are due. `most`: ends after this many jobs."""
        if self.thread is not None:
            raise ForqError("jobs are being run already; a job cannot run others, nor can two threads")
        self.thread = threading.get_ident()
        process = _Process(self.client, self._processor, self._queues(), LoopHere(outer))
        try:
            for _ in process.attempts():
                process.raise_errors(raises)
                if len(process.ran) >= most:
                    break
                if len(process.ran) >= limit and process.has_work():
                    raise _limit_reached(process.ran, limit)
        finally:
            try:
                failures = process.close()
            finally:
                self.runs += 1
                self.thread = None
        for failed in failures:
            if _interrupts(failed.__cause__):
                raise failed.__cause__
            if raises:
                raise failed
        return process.ran


class _Process:
    """The workers of one run. They join a queue when it may have work."""

    def __init__(self, client: Client, processor: str, queues: Sequence[ServedQueue], loop: "LoopHere") -> None:
        self.ran: list[Attempt] = []
        self.client = client
        self.processor = processor
        self.loop = loop
        self._queues = queues
        self._recovery = WorkerRecovery(client.link(), client.prefix, processor)
        self._lifespans: dict[int, Lifespans] = {}
        self._workers: dict[str, _QueueWorkers] = {}

    def attempts(self) -> Iterator[None]:
        """Runs one job at each step, until none is due."""
        busy = True
        while busy:
            busy = False
            for queue in self._queues_with_jobs():
                with suppress(UnknownQueue):
                    self._promote(queue)
                while self._serve(queue):
                    busy = True
                    yield
            busy |= self._deliver()

    def has_work(self) -> bool:
        return any(self._may_have_work(queue) for queue in self._queues)

    def _queues_with_jobs(self) -> list[ServedQueue]:
        """Those that have jobs or schedules; in one round trip, because an app may have many queues."""
        prefix = self.client.prefix
        commands: list[tuple[str, ...]] = []
        for queue in self._queues:
            base, fails = queue_base(prefix, queue.name), queue_base(prefix, fail_queue(queue.name))
            names = ("jobs", "resolving", "schedules:next", "checks")
            keys = (*(f"{base}:{name}" for name in names), f"{fails}:jobs")
            commands.append(("EXISTS", *keys))
        found = self.client.link().pipeline(commands) if commands else []
        return [queue for queue, exist in zip(self._queues, found, strict=True) if exist]

    def _serve(self, queue: ServedQueue) -> bool:
        """Runs one job of the queue; False if none is due."""
        workers = self._workers.get(queue.name)
        if workers is None:
            if not self._may_have_work(queue):
                return False
            self._enter_lifespans(queue.handlers)
        try:
            if workers is None:
                workers = self._workers[queue.name] = _QueueWorkers(self, queue)
            return workers.serve()
        except (UnknownQueue, Fenced):
            # It was deleted, and perhaps created again.
            if gone := self._workers.pop(queue.name, None):
                gone.close()
            return False

    def _promote(self, queue: ServedQueue) -> None:
        self._recovery.promote(queue.name)
        # One call tells a part of the held jobs that those have ended that they wait for.
        while self.client.link().call("EXISTS", f"{queue_base(self.client.prefix, queue.name)}:resolving"):
            self._recovery.promote(queue.name)
        if queue.fail_handler is not None:
            self._recovery.promote(fail_queue(queue.name))

    def _deliver(self) -> bool:
        """Reports ends of jobs to the queues that wait for them; False if there were none.

        Also from queues that are not served here: their jobs can be cancelled or released."""
        names = list(self.client.queues())
        commands = [("EXISTS", f"{queue_base(self.client.prefix, name)}:reports") for name in names]
        found = self.client.link().pipeline(commands) if commands else []
        reporting = [name for name, exists in zip(names, found, strict=True) if exists]
        for name in reporting:
            while self._recovery.deliver(name):
                pass
        return bool(reporting)

    def _may_have_work(self, queue: ServedQueue) -> bool:
        fails = fail_queue(queue.name)
        names = [queue.name] if queue.fail_handler is None else [queue.name, fails]
        counts = counts_of(self.client.link(), self.client.prefix, names)
        own, of_fails = counts[queue.name], counts.get(fails)
        return bool(own and (own.waiting or own.retry or (of_fails and of_fails.waiting)))

    def _enter_lifespans(self, handlers: Handlers) -> None:
        for app in handlers.apps:
            if id(app) not in self._lifespans:
                lifespans = Lifespans(app.lifespans, self.loop, _ignore)
                with self.loop.hidden():
                    try:
                        lifespans.enter()
                    except LifespanFailed as failed:
                        if _interrupts(failed.__cause__):
                            raise failed.__cause__ from None
                        raise
                self._lifespans[id(app)] = lifespans

    def raise_errors(self, raises: bool) -> None:
        """Raises what interrupted the test, and with `raises` the exception of the last attempt."""
        if self.loop.interrupted is not None:
            raise self.loop.interrupted
        last = self.ran[-1] if self.ran else None
        if last is None or last.error is None:
            return
        wanted = raises and not issubclass(type(last.error), Reschedule)
        if wanted or _interrupts(last.error):
            raise last.error

    def close(self) -> list[LifespanFailed]:
        """Leaves the lifespans, and returns the failures of that."""
        failures = []
        for workers in self._workers.values():
            workers.close()
        with self.loop.hidden():
            for lifespans in reversed(self._lifespans.values()):
                failures += lifespans.leave()
        self.loop.close()
        return failures


class _QueueWorkers:
    """The workers of one queue: of its main lane, of its fail queue, and of its retry lane."""

    def __init__(self, process: _Process, queue: ServedQueue) -> None:
        self._process = process
        self._queue = queue
        self._made: dict[str, _Worker] = {}

    def serve(self) -> bool:
        queue = self._queue
        if self._worker("main").serve():
            return True
        if queue.fail_handler is not None and self._worker("fails").serve():
            return True
        lane = self._worker("retry")
        return lane.has_jobs() and lane.serve()

    def _worker(self, kind: str) -> "_Worker":
        if kind not in self._made:
            name, handlers, fail_handler = self._queue.name, self._queue.handlers, self._queue.fail_handler
            if kind == "fails":
                assert fail_handler is not None
                self._made[kind] = _Worker(self._process, fail_queue(name), "retry", fail_handler, fails=True)
            else:
                self._made[kind] = _Worker(self._process, name, kind, handlers, fails=False)
        return self._made[kind]

    def close(self) -> None:
        for worker in self._made.values():
            worker.close()


class _Worker:
    """A worker's loop, one job at a time."""

    def __init__(self, process: _Process, queue: str, lane: str, handlers: Handlers, *, fails: bool) -> None:
        client, processor = process.client, process.processor
        self._board = _scoreboard(os.getpid())
        slot = self._slot = self._board.slot(self._board.take())
        # As long as in workers/child.py, for the same reason.
        slot.worker = new_id() + processor[-16:]
        self._consumer = Consumer(client.url, client.prefix, queue, processor, slot.worker, lane)
        reporter = _Reporter(client, queue, slot)
        kind = _RecordedFailAttempts if fails else _RecordedAttempts
        # A fail handler's attempts name the queue of the original job.
        attempts = kind(queue.partition("#")[0], handlers, slot, reporter, None, process.loop)
        self._recorder = _Recorder(attempts, process.ran)
        self._loop = WorkerLoop(
            self._consumer,
            attempts,
            slot,
            expiry_ms=EXPIRY_MS,
            limits=Limits(0, 1, 0),
            grant=_AlwaysGranted(_ignore, slot.number),
            recycling=Recycling({}, [slot], _ignore),
            on_batch=_ignore,
            on_unguarded=_nothing,
            numbers=TurnNumbers(),
            max_batch=1,
            claims_ahead=False,
            job_log=self._recorder,
        )
        self._loop.join()

    def has_jobs(self) -> bool:
        return self._consumer.lane_has_jobs()

    def serve(self) -> bool:
        """Claims a job, runs it and settles it."""
        if not self._loop.serve_batch():
            return False
        self._loop.settle()
        self._recorder.finish()
        return True

    def close(self) -> None:
        self._loop.leave()
        self._board.give_back(self._slot.number)


@cache
def _scoreboard(pid: int) -> Scoreboard:
    """One per process: a forked one must not use its parent's."""
    return Scoreboard.create()


class _RecordedAttempts(AttemptRunner):
    """Remembers the job of the last attempt. Coroutines do not chain: each job is settled before the next."""

    job: Job | None = None
    failed = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.chains = False

    def run(self, job_id: str, record: bytes, fence: int) -> Failure | None:
        loop = self._event_loop
        assert isinstance(loop, LoopHere)
        with loop.hidden():
            failure = super().run(job_id, record, fence)
        self.failed = failure is not None
        return failure

    def _open(self, job_id: str, record: bytes, fence: int) -> tuple[Any, Job]:
        self.job = None
        data, self.job = super()._open(job_id, record, fence)
        return data, self.job


class _RecordedFailAttempts(_RecordedAttempts, FailAttemptRunner):
    pass


class _Recorder(JobLog):
    """Logs in the thread of the test, and makes an Attempt of each attempt."""

    def __init__(self, attempts: _RecordedAttempts, ran: list[Attempt]) -> None:
        super().__init__()
        self._attempts = attempts
        self._ran = ran

    def write(self, entry: JobLogEntry) -> None:
        if log.isEnabledFor(entry.level):
            log.handle(entry.record())
        if isinstance(entry, FailedAttempt) and isinstance(entry.outcome, Fate):
            if entry.raised is not None and not entry.retry_requested:
                with suppress(Exception):  # a class of the user may refuse notes
                    entry.raised.add_note(f"{entry.headline()} queue={entry.queue} job={entry.job}")
            self._add(_OUTCOMES.get(entry.outcome.kind, "removed"), entry.raised)

    def finish(self) -> None:
        """Records an attempt that succeeded."""
        if not self._attempts.failed:
            self._add("done", None)

    def _add(self, outcome: Outcome, error: BaseException | None) -> None:
        attempts, job = self._attempts, self._attempts.job
        if job is None:
            # Its record is broken.
            self._ran.append(Attempt(attempts.queue, "", None, 1, outcome, error, attempts.of_fail_handler))
            return
        id = job.id.rpartition(":")[0] if attempts.of_fail_handler else job.id
        about = (job.type, job.attempt, outcome, error, attempts.of_fail_handler)
        self._ran.append(Attempt(attempts.queue, id, *about))


class _AlwaysGranted(Grant):
    """There is no supervisor whose capacity is shared."""

    def acquire(self, units: int, priority: int) -> bool:
        return True

    def give_back(self) -> None:
        pass


class _Reporter:
    """Stores each report of progress at once."""

    def __init__(self, client: Client, queue: str, slot: Slot) -> None:
        self._client, self._queue, self._slot = client, queue, slot

    def report(self, position: int, job_id: str, fence: int, fraction: float, text: str) -> None:
        # Any thread of the handler may call this; each has its own link.
        link, prefix = self._client.link(), self._client.prefix
        if self._slot.show_progress(position, fraction, text):
            report_progress(link, prefix, self._queue, self._slot.worker, job_id, fence, fraction, text)


def _limit_reached(ran: Sequence[Attempt], limit: int) -> LimitReached:
    counts: dict[str, int] = {}
    for attempt in ran[-100:]:
        name = attempt.task or f"queue {attempt.queue}"
        counts[name] = counts.get(name, 0) + 1
    often = sorted(counts, key=lambda name: -counts[name])[:3]
    last = ", ".join(f"{counts[name]} of {name}" for name in often)
    return LimitReached(
        f"{limit} jobs have run and more are due; of the last {len(ran[-100:])}: {last}. Does a job enqueue itself, or "
        f"snooze for 0 seconds? If not: run_all(limit={10 * limit})"
    )


def _interrupts(exc: BaseException | None) -> TypeGuard[BaseException]:
    """Ctrl-C, or what pytest.fail and pytest.skip raise. pytest-timeout raises that in the job that runs."""
    outcomes = sys.modules.get("_pytest.outcomes")
    return isinstance(exc, KeyboardInterrupt | getattr(outcomes, "OutcomeException", KeyboardInterrupt))


def _ignore(_: object) -> None:
    pass


def _nothing() -> None:
    pass


class LoopHere(EventLoop):
    """`outer`: the loop that runs in this thread; None: there is none."""

    def __init__(self, outer: AbstractEventLoop | None) -> None:
        super().__init__()
        self._outer = outer
        self._own: asyncio.Runner | None = None
        # Raised in this thread while it waited: Ctrl-C, or the cancellation of the test.
        self.interrupted: BaseException | None = None

    @property
    def started(self) -> bool:
        return True

    def start(self) -> AbstractEventLoop:
        if self._outer is not None:
            return self._outer
        if self._own is None:
            self._own = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        return self._own.get_loop()

    def begin(self, run: Run, advance: Advance | None = None) -> Chain:
        loop = self.start()
        chain = _AwaitedChain(loop, run, advance)
        with self._shown():
            chain.context.copy().run(run.start, loop)
        return chain

    def finish(self, chain: Chain) -> None:
        assert isinstance(chain, _AwaitedChain)
        timer = None
        if chain.run.due is not None:
            delay = max(0.0, chain.run.due - time.monotonic())
            timer = self.start().call_later(delay, chain.run.cancel, Cancelled.TIMEOUT, "")
        try:
            if not chain.over:
                self._drive(chain.future)
        except BaseException as exc:
            self.interrupted = exc
            chain.run.cancel(Cancelled.RETURNED, "interrupted")
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if chain.raised is not None:
            raise chain.raised

    def cancel(self, run: Run, why: Cancelled, cause: str = "") -> None:
        run.cancel(why, cause)

    def call(self, callback: Callable[[], object]) -> None:
        self.start().call_soon(callback)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        async def pass_by() -> None:
            until, passes = time.monotonic() + seconds, 0
            while not event.is_set() and time.monotonic() < until:
                passes += 1
                await asyncio.sleep(0 if passes < QUICK_PASSES else PASS_SECONDS)

        self._drive(pass_by())
        return event.is_set()

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Code inside sees no running event loop, as in the thread of a worker."""
        if self._outer is None:
            yield
            return
        asyncio._set_running_loop(None)
        try:
            yield
        finally:
            asyncio._set_running_loop(self._outer)

    def _drive(self, awaitable: Awaitable[Any]) -> None:
        if self._outer is None:
            loop = self.start()
            loop.run_until_complete(awaitable)
            return
        with self._shown():
            wait_for(awaitable)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Inside `hidden`: the event loop runs."""
        hidden = self._outer is not None and asyncio._get_running_loop() is None
        if hidden:
            asyncio._set_running_loop(self._outer)
        try:
            yield
        finally:
            if hidden:
                asyncio._set_running_loop(None)


class _AwaitedChain(Chain):
    """`future`: done when the chain is over."""

    __slots__ = ("future",)

    def __init__(self, loop: AbstractEventLoop, run: Run, advance: Advance | None) -> None:
        super().__init__(loop, run, copy_context(), advance)
        self.future: asyncio.Future[None] = loop.create_future()

    def _continue(self) -> None:
        super()._continue()
        if self.over and not self.future.done():
            self.future.set_result(None)


def running_loop() -> AbstractEventLoop | None:
    return asyncio._get_running_loop()
