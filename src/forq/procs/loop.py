"""The event loop of all processes: descriptors, timers, dead children and signals, in one thread.

asyncio and threads would break fork. Remove a descriptor from the loop before closing it: epoll keeps reporting it as
long as a child holds a copy. Each pass marks the process as alive (liveness.py) before it waits.
"""

import errno
import heapq
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from itertools import count

from forq.procs.liveness import mark_pass

log = logging.getLogger("forq")

Callback = Callable[[], object]

WAKEUP_READ_BYTES = 65536
MAX_TIMERS = 4096
# Pause after a failure of `after_pass`, which may fail each time.
FAILED_PASS_SECONDS = 1.0


class Timer:
    """A pending call."""

    __slots__ = ("_callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self._callback: Callback | None = callback

    @property
    def cancelled(self) -> bool:
        return self._callback is None

    def cancel(self) -> None:
        """May be repeated, also after the call."""
        self._callback = None

    def take(self) -> Callback | None:
        """Returns the callback once, then None."""
        callback, self._callback = self._callback, None
        return callback


class _Callbacks:
    """The callbacks of one descriptor."""

    __slots__ = ("hangup", "reader", "writer")

    def __init__(self) -> None:
        self.reader: Callback | None = None
        self.writer: Callback | None = None
        self.hangup: Callback | None = None

    def events(self) -> int:
        """Hang-ups and errors are always reported."""
        return (select.EPOLLIN if self.reader else 0) | (select.EPOLLOUT if self.writer else 0)

    def wanted(self) -> bool:
        return bool(self.reader or self.writer or self.hangup)


def _do_nothing(signum: int, frame: object) -> None:
    """The interpreter has already written the signal's number to the wakeup pipe."""


def log_and_continue(exc: Exception) -> None:
    """For the supervisor: no callback may end it."""
    log.exception("a callback of the event loop failed")


class Loop:
    """`poller`: epoll for many descriptors or forked children, else poll, which is cheaper to create. `on_error` gets
    exceptions of callbacks. `max_events`: events per pass of epoll; None: all."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        poller: "select.epoll | select.poll | None" = None,
        on_error: Callable[[Exception], None] = log_and_continue,
        max_events: int | None = None,
    ) -> None:
        self._now = now
        self._poller = poller or select.epoll()
        self._on_error = on_error
        self._max_events = max_events
        self._entries: dict[int, _Callbacks] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        # Above this number cancelled timers are removed.
        self._max_timers = MAX_TIMERS
        self._order = count()
        self._signals: dict[int, Callback] = {}
        self._wakeup: tuple[int, int] | None = None
        self._running = False

    def now(self) -> float:
        """The timers' clock, in seconds."""
        return self._now()

    def add_reader(self, fd: int, callback: Callback) -> None:
        """Calls back whenever fd is readable; replaces its reader."""
        entry = self._entries.get(fd) or _Callbacks()
        entry.reader = callback
        self._update(fd, entry)

    def remove_reader(self, fd: int) -> None:
        if entry := self._entries.get(fd):
            entry.reader = None
            self._update(fd, entry)

    def add_writer(self, fd: int, callback: Callback) -> None:
        """Calls back whenever fd is writable; replaces its writer."""
        entry = self._entries.get(fd) or _Callbacks()
        entry.writer = callback
        self._update(fd, entry)

    def remove_writer(self, fd: int) -> None:
        if entry := self._entries.get(fd):
            entry.writer = None
            self._update(fd, entry)

    def on_hangup(self, fd: int, callback: Callback | None) -> None:
        """Calls back when the other end is closed while fd has no reader; None removes the callback."""
        entry = self._entries.get(fd) or _Callbacks()
        if entry.hangup != callback:
            entry.hangup = callback
            self._update(fd, entry)

    def watch_child(self, pidfd: int, callback: Callback) -> None:
        """Calls back once, when the process has ended; the callback reaps it. remove_reader(pidfd) cancels this."""

        def ended() -> None:
            self.remove_reader(pidfd)
            callback()

        self.add_reader(pidfd, ended)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(self._now() + seconds, callback)
        if len(self._timers) >= self._max_timers:
            self._forget_cancelled()
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def _forget_cancelled(self) -> None:
        """A timer that is reset often would otherwise leave many cancelled ones until the first is due."""
        self._timers = [entry for entry in self._timers if not entry[2].cancelled]
        heapq.heapify(self._timers)
        self._max_timers = max(MAX_TIMERS, 2 * len(self._timers))

    def on_signal(self, signum: int, callback: Callback) -> None:
        """Calls back from the loop after a signal; several signals may be one call."""
        if self._wakeup is None:
            # A pipe buffers 65,536 signals, a socket pair only a few hundred.
            self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
            self.add_reader(self._wakeup[0], self._dispatch_signals)
        self._signals[signum] = callback
        signal.signal(signum, _do_nothing)

    def tick(self, timeout_seconds: float | None) -> None:
        """One pass: waits for events up to the timeout (None: no limit), and makes the calls that are due."""
        for entry, events in self._wait(self._poll_timeout(timeout_seconds)):
            # An earlier callback may have removed the descriptor, which empties its entry; a reused descriptor has
            # another entry. Errors and hang-ups concern reader and writer.
            if events & ~select.EPOLLOUT and entry.reader:
                self._call(entry.reader)
            if events & ~select.EPOLLIN and entry.writer:
                self._call(entry.writer)
            if events & ~(select.EPOLLIN | select.EPOLLOUT) and entry.hangup and not entry.reader:
                self._call(entry.hangup)
        self._call_due_timers()

    def _wait(self, timeout_seconds: float | None) -> list[tuple[_Callbacks, int]]:
        mark_pass()
        if isinstance(self._poller, select.epoll):
            ready = self._poller.poll(timeout_seconds, self._max_events or max(len(self._entries), 1))
        else:
            ready = self._poller.poll(None if timeout_seconds is None else timeout_seconds * 1000)
        return [(self._entries[fd], events) for fd, events in ready if fd in self._entries]

    def run(self, after_pass: Callable[[], float | None] | None = None) -> None:
        """Ticks until stop is called. `after_pass` is called after each pass and returns the longest wait of the next
        one in seconds (None: no limit)."""
        self._running = True
        timeout = None if after_pass is None else 0.0
        while self._running:
            self.tick(timeout)
            if after_pass is not None:
                timeout = self._call_after_pass(after_pass)

    def stop(self) -> None:
        """Lets run return after this pass."""
        self._running = False

    def close(self) -> None:
        """Closes descriptors and resets signal handlers; the loop cannot be used afterwards."""
        self.close_in_child()
        self._signals = {}
        self._entries = {}
        self._timers = []
        self._running = False

    def close_in_child(self) -> None:
        """Releases the loop after a fork, with signals masked.

        Closes the epoll descriptor and unregisters nothing: the epoll set is shared with the parent, which would
        lose its events. The callbacks stay in memory: freeing them would write to their pages and so copy them in
        each of many children.
        """
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            for signum in self._signals:
                signal.signal(signum, signal.SIG_DFL)
            for fd in self._wakeup:
                os.close(fd)
        self._wakeup = None
        if isinstance(self._poller, select.epoll):
            self._poller.close()

    def _update(self, fd: int, entry: _Callbacks) -> None:
        known = fd in self._entries
        if entry.wanted():
            if known:
                self._poller.modify(fd, entry.events())
            else:
                self._poller.register(fd, entry.events())
            self._entries[fd] = entry
        elif known:
            del self._entries[fd]
            try:
                self._poller.unregister(fd)
            except OSError as exc:
                # It was closed before its removal.
                if exc.errno not in (errno.EBADF, errno.ENOENT):
                    raise

    def _poll_timeout(self, timeout_seconds: float | None) -> float | None:
        """The timeout, or the time until the next timer if that is shorter."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return timeout_seconds
        until_due = max(0.0, self._timers[0][0] - self._now())
        return until_due if timeout_seconds is None else min(timeout_seconds, until_due)

    def _call_due_timers(self) -> None:
        """A timer set by one of them waits for the next tick, so that none can starve the rest."""
        now = self._now()
        due: list[Timer] = []
        while self._timers and self._timers[0][0] <= now:
            due.append(heapq.heappop(self._timers)[2])
        for timer in due:
            if callback := timer.take():
                self._call(callback)

    def _dispatch_signals(self) -> None:
        assert self._wakeup is not None
        try:
            arrived = os.read(self._wakeup[0], WAKEUP_READ_BYTES)
        except BlockingIOError:
            return
        for signum in dict.fromkeys(arrived):
            if callback := self._signals.get(signum):
                self._call(callback)

    def _call_after_pass(self, after_pass: Callable[[], float | None]) -> float | None:
        try:
            return after_pass()
        except Exception as exc:
            self._on_error(exc)
            return FAILED_PASS_SECONDS

    def _call(self, callback: Callback) -> None:
        try:
            callback()
        except Exception as exc:
            self._on_error(exc)


def service_loop(*, poller: "select.epoll | select.poll | None" = None, max_events: int | None = None) -> Loop:
    """For services: an exception in a callback ends the process, and the supervisor replaces it."""

    def end(exc: Exception) -> None:
        raise exc

    return Loop(poller=poller or select.poll(), on_error=end, max_events=max_events)
