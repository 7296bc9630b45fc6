"""Enters the lifespans of an app when a process starts, and leaves them after its last job.

A sync lifespan runs in the main thread. An async one is a single asyncio task on the event loop of the process, so it
is entered and left by the same task. Both may take up to 60 seconds for each half. A process whose lifespan cannot be
entered exits, and the supervisor tries again with growing delays.
"""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any

from forq.errors import CannotImport
from forq.workers.event_loop import Cancelled, Chain, EventLoop, Run
from forq.workers.handlers import describe_exception, exit_if_forked_from, user_traceback

LIMIT_SECONDS = 60.0
# A coroutine is cancelled at the limit. This much later the process is ended: a thread cannot be interrupted.
GRACE_SECONDS = 1.0

log = logging.getLogger("forq")

# Name of the hook with its app, and the generator function.
Lifespan = tuple[str, Callable[[], Any], bool]


class LifespanFailed(CannotImport):
    """A lifespan raised, yielded not exactly once, or took too long."""


class Lifespans:
    """`lifespans`: (description, generator function, whether it is async). `give_up` ends the process with a reason and
    a traceback: for a sync lifespan that does not return."""

    def __init__(
        self,
        lifespans: Sequence[Lifespan],
        event_loop: EventLoop,
        give_up: Callable[[LifespanFailed], None],
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._lifespans = lifespans
        self._event_loop = event_loop
        self._give_up = give_up
        self._limit_seconds = limit_seconds
        self._entered: list[_SyncLifespan | _AsyncLifespan] = []

    def enter(self) -> None:
        """Raises LifespanFailed."""
        for name, hook, is_async in self._lifespans:
            entering = _AsyncLifespan(hook, self._event_loop, self._limit_seconds) if is_async else _SyncLifespan(hook)
            try:
                with _Limit(self._failed, name, "did not yield", self._limit_seconds):
                    entering.enter()
            except BaseException as exc:  # user code may raise anything, even SystemExit
                failed = self._failed(name, "failed", exc)
                # Outside the limit: the others have time limits of their own.
                self.leave()
                raise failed from exc
            self._entered.append(entering)

    def leave(self) -> list[LifespanFailed]:
        """In reverse order. Logs failures and returns them: the jobs have run."""
        failures = []
        while self._entered:
            leaving, (name, _, _) = self._entered.pop(), self._lifespans[len(self._entered)]
            with _Limit(self._failed, name, "did not end", self._limit_seconds):
                try:
                    leaving.leave()
                except BaseException as exc:  # see above
                    failed = self._failed(name, "failed at its end", exc)
                    failed.__cause__ = exc
                    failures.append(failed)
                    log.error("%s\n%s", failed, failed.traceback or "")
        return failures

    def _failed(self, name: str, what: str, exc: BaseException | None, trace: str | None = None) -> LifespanFailed:
        if exc is None:
            failed = LifespanFailed(f"{name} {what} within {self._limit_seconds:g} s", trace)
            self._give_up(failed)
            return failed
        trace, place = user_traceback(exc)
        return LifespanFailed(f"{name} {what}: {describe_exception(exc)}{place}", trace)


class _SyncLifespan:
    def __init__(self, hook: Callable[[], Any]) -> None:
        self._hook = hook
        self._pid = os.getpid()
        self._generator: Generator[object, None, None] | None = None

    def enter(self) -> None:
        try:
            self._generator = self._hook()
            next(self._generator)
        except StopIteration:
            raise RuntimeError("it did not yield") from None
        finally:
            exit_if_forked_from(self._pid)

    def leave(self) -> None:
        assert self._generator is not None
        try:
            next(self._generator)
        except StopIteration:
            return
        finally:
            exit_if_forked_from(self._pid)
        raise RuntimeError("it yielded twice")


class _AsyncLifespan:
    def __init__(self, hook: Callable[[], Any], event_loop: EventLoop, limit_seconds: float) -> None:
        self._hook = hook
        self._event_loop = event_loop
        self._limit_seconds = limit_seconds
        self._entered = threading.Event()
        self._leave: asyncio.Event | None = None
        self._chain: Chain | None = None

    def enter(self) -> None:
        self._chain = self._event_loop.begin(Run(self._live(), None))
        # It releases the event in any case: when it has yielded, or at its end.
        if not self._event_loop.wait(self._entered, self._limit_seconds):
            self._event_loop.cancel(self._chain.run, Cancelled.TIMEOUT)
            late = TimeoutError(f"it did not yield within {self._limit_seconds:g} s")
            try:
                self._finish(self._chain)
            except BaseException as exc:
                # Shows where it was cancelled.
                raise late.with_traceback(exc.__traceback__) from None
            raise late
        if self._leave is None:
            self._finish(self._chain)
            raise RuntimeError("it did not yield")

    def leave(self) -> None:
        assert self._chain is not None
        assert self._leave is not None
        self._event_loop.call(self._leave.set)
        self._chain.run.due = time.monotonic() + self._limit_seconds
        self._finish(self._chain)

    def _finish(self, chain: Chain) -> None:
        self._event_loop.finish(chain)
        chain.run.outcome()

    async def _live(self) -> None:
        try:
            generator: AsyncGenerator[object, None] = self._hook()
            try:
                await anext(generator)
            except StopAsyncIteration:
                return
            self._leave = leave = asyncio.Event()
            self._entered.set()
            await leave.wait()
            try:
                await anext(generator)
            except StopAsyncIteration:
                return
            raise RuntimeError("it yielded twice")
        finally:
            self._entered.set()


class _Limit:
    """Ends the process if the block does not end in time."""

    def __init__(self, failed: Callable[..., LifespanFailed], name: str, what: str, seconds: float) -> None:
        self._failed = failed
        self._name = name
        self._what = what
        self._thread = threading.get_ident()
        self._timer = threading.Timer(seconds + GRACE_SECONDS, self._expired)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    def _expired(self) -> None:
        frame = sys._current_frames().get(self._thread)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        self._failed(self._name, self._what, None, f"Stack (most recent call last):\n{stack}".rstrip())
