"""Jobs in memory: forq on fakeredis in this process, with a clock that tests move. No other process, no network.

Nothing runs jobs beside the test, so a wait for a result that would block says so at once. It goes on while jobs are
being run elsewhere in this process: in another thread, or by `arun_all` in another asyncio task.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from forq import async_client, result_wait
from forq.app import completion
from forq.app.app import App
from forq.errors import UsageError, WaitTimeout
from forq.paths import DEFAULT_PREFIX
from forq.testing.in_thread import GivenHandler, Handler, InThread, closing
from forq.testing.targets import Target, read_apps, redirected
from forq.workers.event_loop import _RUN

try:
    from forq.testing.fake_server import Clock, FakeServer
except ImportError as missing:
    raise ImportError(f"jobs in memory need fakeredis with Lua: pip install 'forq[testing]' ({missing})") from missing

CHECK_SECONDS = 0.02

_places: dict[str, "Memory"] = {}
_lock = threading.Lock()
_wait = result_wait._wait_for_message
_async_wait = async_client._wait_for_message
_wait_for_many = completion._wait_for_messages
_async_wait_for_many = completion._async_wait_for_messages


class Memory(InThread):
    """What `memory()` yields. `clock`: the time of jobs, schedules, tokens and results."""

    def __init__(
        self,
        server: FakeServer,
        apps: Sequence[App],
        handlers: Mapping[str, GivenHandler],
        fail_handlers: Mapping[str, Handler],
    ) -> None:
        super().__init__(server.url, DEFAULT_PREFIX, apps, handlers, fail_handlers)
        self.clock: Clock = server.clock
        self.clock.before_going_back = self._before_going_back

    def _before_going_back(self) -> Callable[[], None]:
        """For the clock. Times in Redis would lie in the future; schedules get new ones afterwards."""
        if jobs := self.jobs():
            raise UsageError(
                f"the clock cannot go back while there are jobs, such as {jobs[0]}; set it before the first enqueue"
            )
        return self._restart_schedules


@contextmanager
def memory(
    *targets: Target,
    handlers: Mapping[str, GivenHandler] | None = None,
    fail_handlers: Mapping[str, Handler] | None = None,
) -> Iterator[Memory]:
    """Jobs in memory: these apps (or clients) use it instead of their Redis until the end of the block.

        with forq.testing.memory(app) as memory:
            send.enqueue("a@b.c")
            memory.run_all()

    An app may be given as "package.module:app". New clients without a URL use it, too. `handlers`: functions
    handle(data, job) of queues without an app, by queue. `fail_handlers`: their fail handlers.
    """
    apps, redirect = read_apps(targets)
    with ExitStack() as stack:
        server = FakeServer()
        stack.enter_context(server.installed())
        place = Memory(server, apps, handlers or {}, fail_handlers or {})
        stack.enter_context(closing(place))
        stack.enter_context(answer_waits(place))
        stack.enter_context(redirected(redirect, server.url, DEFAULT_PREFIX))
        place._create_queues()
        yield place


@contextmanager
def answer_waits(place: Memory) -> Iterator[None]:
    with _lock:
        if not _places:
            _replace(_check_wait, _check_async_wait, _check_wait_for_many, _check_async_wait_for_many)
        _places[place.url] = place
    try:
        yield
    finally:
        with _lock:
            del _places[place.url]
            if not _places:
                _replace(_wait, _async_wait, _wait_for_many, _async_wait_for_many)


def _replace(one: Any, one_async: Any, many: Any, many_async: Any) -> None:
    result_wait._wait_for_message = one
    async_client._wait_for_message = one_async
    completion._wait_for_messages = many
    completion._async_wait_for_messages = many_async


def _check_wait(wait: Any, subscription: Any) -> None:
    place = _places.get(subscription._address.url)
    if place is None:
        _wait(wait, subscription)
        return
    wait.seconds_until(time.monotonic() + CHECK_SECONDS)
    _raise_if_idle(place, wait, wait._job)
    time.sleep(CHECK_SECONDS)


async def _check_async_wait(wait: Any, listener: Any) -> None:
    place = _places.get(listener._subscription._address.url)
    if place is None:
        await _async_wait(wait, listener)
        return
    wait.seconds_until(time.monotonic() + CHECK_SECONDS)
    _raise_if_idle(place, wait, wait._job)
    await asyncio.sleep(CHECK_SECONDS)


def _check_wait_for_many(wait: Any, subscriptions: Any) -> None:
    _check_wait_for_any(wait)
    _wait_for_many(wait, subscriptions)


async def _check_async_wait_for_many(wait: Any, listeners: Any, arrived: asyncio.Event) -> None:
    _check_wait_for_any(wait)
    await _async_wait_for_many(wait, listeners, arrived)


def _check_wait_for_any(wait: Any) -> None:
    """Checks the first memory that has jobs to wait for."""
    if any(server.some_are_due() for server in wait.servers):
        return
    for server in wait.servers:
        if server.url in _places:
            jobs = server.pending()
            what = f"{len(jobs)} of the jobs, such as {jobs[0].ref!r},"
            if not _raise_if_idle(_places[server.url], wait, what):
                server.unsure = jobs
            return


def _raise_if_idle(place: Memory, wait: Any, what: str) -> bool:
    """Returns whether jobs are being run. If a run has ended since the last call, the last check of the job may have
    come before its end: the caller checks again."""
    if place._runner.thread is None:
        seen = (place.url, place._runner.runs)
        if getattr(wait, "runs_seen", None) != seen:
            wait.runs_seen = seen
            return False
        job = next(
            (job for job in place.jobs(state="scheduled") if what == f"job {job.id!r} of queue {job.queue!r}"), None
        )
        if job is not None and job.run_at is not None and job.run_at > place.clock.now():
            times = len(job.attempts)
            failed = f", after {times} failed attempt{'s' * (times > 1)}" if times else ""
            raise WaitTimeout(
                f"{what} is scheduled for {job.run_at.isoformat(timespec='seconds')}{failed}: move the clock, "
                "clock.tick(SECONDS), then call run_all(), or await arun_all()"
            )
        if any(what == f"job {held.id!r} of queue {held.queue!r}" for held in place.jobs(state="held")):
            raise WaitTimeout(
                f"{what} is held: jobs that it waits for have not ended, and nothing runs jobs here: call run_all() "
                "first, or await arun_all(); if one of them is scheduled, move the clock before, clock.tick(SECONDS)"
            )
        raise WaitTimeout(
            f"{what} has not ended, and nothing runs jobs here: call run_all() first, or await arun_all()"
        )
    if _RUN.get(None) is not None or (place._runner.thread == threading.get_ident() and not _in_event_loop()):
        raise WaitTimeout(f"{what} has not ended, and here jobs run one after the other: a job cannot wait for another")
    return True


def _in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None
