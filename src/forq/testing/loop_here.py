"""Runs the coroutines of jobs in the thread of the test: in the event loop that runs there (`arun_all`), else in one of
its own.

`arun_all` runs the worker's blocking code in a greenlet (broker/async_connection.py). Where it waits for a coroutine,
the greenlet switches to the test's event loop.
"""

import asyncio
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from forq.broker.async_connection import wait_for
from forq.workers.event_loop import Advance, Cancelled, Chain, EventLoop, Run

# Passes of the loop before a wait for an event sleeps between them.
QUICK_PASSES = 50
PASS_SECONDS = 0.001


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
