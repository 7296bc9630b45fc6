"""The event loop of every process of ours: descriptors, timers, dead children and signals, in one thread.

No asyncio and no threads: both break fork. A descriptor must be removed from the loop before it is closed: as long as a
child holds a copy of it, epoll keeps reporting it. Each pass marks the process as alive (liveness.py) before it waits.
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
MOST_TIMERS = 4096
# Not at once again: what failed once after a pass may fail each time.
FAILED_PASS_SECONDS = 1.0


class Timer:
    """A call that is to be made later, until it is cancelled."""

    __slots__ = ("_callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self._callback: Callback | None = callback

    @property
    def cancelled(self) -> bool:
        return self._callback is None

    def cancel(self) -> None:
        """Safe to repeat, and after the call was made."""
        self._callback = None

    def take(self) -> Callback | None:
        """The callback, once."""
        callback, self._callback = self._callback, None
        return callback


class _Entry:
    """Who waits for one descriptor."""

    __slots__ = ("hangup", "reader", "writer")

    def __init__(self) -> None:
        self.reader: Callback | None = None
        self.writer: Callback | None = None
        self.hangup: Callback | None = None

    def events(self) -> int:
        """Hang-ups and errors are told of in any case."""
        return (select.EPOLLIN if self.reader else 0) | (select.EPOLLOUT if self.writer else 0)

    def wanted(self) -> bool:
        return bool(self.reader or self.writer or self.hangup)


def _do_nothing(signum: int, frame: object) -> None:
    """The interpreter has written the signal's number to the wakeup pipe by now; that is all we need."""


def log_and_go_on(exc: Exception) -> None:
    """For the parent: no callback may end it."""
    log.exception("a callback of the loop failed")


class Loop:
    """`poller`: epoll where there are many descriptors or children are forked, else poll, which is cheaper to make.
    `on_error` gets what a callback raises. `most_events`: how many of them one pass of epoll takes; None: all."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        poller: "select.epoll | select.poll | None" = None,
        on_error: Callable[[Exception], None] = log_and_go_on,
        most_events: int | None = None,
    ) -> None:
        self._now = now
        self._poller = poller or select.epoll()
        self._on_error = on_error
        self._most_events = most_events
        self._entries: dict[int, _Entry] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        # Above this many the cancelled ones among them are thrown away.
        self._most_timers = MOST_TIMERS
        self._order = count()
        self._signals: dict[int, Callback] = {}
        self._wakeup: tuple[int, int] | None = None
        self._running = False

    def now(self) -> float:
        """The clock of the timers, in seconds."""
        return self._now()

    def add_reader(self, fd: int, callback: Callback) -> None:
        """Call back whenever fd is readable; replaces the reader it had."""
        entry = self._entries.get(fd) or _Entry()
        entry.reader = callback
        self._update(fd, entry)

    def remove_reader(self, fd: int) -> None:
        if entry := self._entries.get(fd):
            entry.reader = None
            self._update(fd, entry)

    def add_writer(self, fd: int, callback: Callback) -> None:
        """Call back whenever fd is writable; replaces the writer it had."""
        entry = self._entries.get(fd) or _Entry()
        entry.writer = callback
        self._update(fd, entry)

    def remove_writer(self, fd: int) -> None:
        if entry := self._entries.get(fd):
            entry.writer = None
            self._update(fd, entry)

    def on_hangup(self, fd: int, callback: Callback | None) -> None:
        """Call back when the other end is closed while nobody reads from fd; None: not any more."""
        entry = self._entries.get(fd) or _Entry()
        if entry.hangup != callback:
            entry.hangup = callback
            self._update(fd, entry)

    def watch_child(self, pidfd: int, callback: Callback) -> None:
        """Call back once, when the process has ended; the callback reaps it. remove_reader(pidfd) takes it back."""

        def ended() -> None:
            self.remove_reader(pidfd)
            callback()

        self.add_reader(pidfd, ended)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(self._now() + seconds, callback)
        if len(self._timers) >= self._most_timers:
            self._forget_cancelled()
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def _forget_cancelled(self) -> None:
        """A timer that is set anew again and again would leave as many behind until the first of them is due."""
        self._timers = [entry for entry in self._timers if not entry[2].cancelled]
        heapq.heapify(self._timers)
        self._most_timers = max(MOST_TIMERS, 2 * len(self._timers))

    def on_signal(self, signum: int, callback: Callback) -> None:
        """Call back from the loop after the signal has come; several at once may be one call."""
        if self._wakeup is None:
            # A pipe holds 65,536 signals that are not yet read; a socket pair only a few hundred.
            self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
            self.add_reader(self._wakeup[0], self._dispatch_signals)
        self._signals[signum] = callback
        signal.signal(signum, _do_nothing)

    def tick(self, timeout_seconds: float | None) -> None:
        """Wait for something to happen, at most so long (None: for ever), and make the calls that are due."""
        for entry, events in self._wait(self._patience(timeout_seconds)):
            # A callback of this round may have removed the descriptor, which empties its entry; one that was closed and
            # registered again has another entry. Errors and hang-ups concern both.
            if events & ~select.EPOLLOUT and entry.reader:
                self._call(entry.reader)
            if events & ~select.EPOLLIN and entry.writer:
                self._call(entry.writer)
            if events & ~(select.EPOLLIN | select.EPOLLOUT) and entry.hangup and not entry.reader:
                self._call(entry.hangup)
        self._call_due_timers()

    def _wait(self, patience_seconds: float | None) -> list[tuple[_Entry, int]]:
        """Who waits for what has happened, as of now."""
        mark_pass()
        if isinstance(self._poller, select.epoll):
            happened = self._poller.poll(patience_seconds, self._most_events or max(len(self._entries), 1))
        else:
            happened = self._poller.poll(None if patience_seconds is None else patience_seconds * 1000)
        return [(self._entries[fd], events) for fd, events in happened if fd in self._entries]

    def run(self, after_pass: Callable[[], float | None] | None = None) -> None:
        """Tick until stop is called. `after_pass` is called after each full pass and says how long the next may wait
        for something to happen (None: for ever)."""
        self._running = True
        patience = None if after_pass is None else 0.0
        while self._running:
            self.tick(patience)
            if after_pass is not None:
                patience = self._after(after_pass)

    def stop(self) -> None:
        """From a callback: let run return after this round."""
        self._running = False

    def close(self) -> None:
        """Give back descriptors and signal handlers; the loop cannot be used any more."""
        self.close_in_child()
        self._signals = {}
        self._entries = {}
        self._timers = []
        self._running = False

    def close_in_child(self) -> None:
        """Let go of the loop after a fork, with signals masked.

        The epoll descriptor is closed and nothing is unregistered: the epoll set is shared with the parent, so that an
        unregister here would make the parent deaf. Whoever waits in the loop, or for a signal, stays in memory: to drop
        them would write to the pages of all of them, and so copy those, in each of many children.
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

    def _update(self, fd: int, entry: _Entry) -> None:
        """Tell the poller what is waited for at fd now."""
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
                # Closed before it was removed.
                if exc.errno not in (errno.EBADF, errno.ENOENT):
                    raise

    def _patience(self, timeout_seconds: float | None) -> float | None:
        """How long select may wait: until the next timer is due, if that is sooner."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return timeout_seconds
        until_due = max(0.0, self._timers[0][0] - self._now())
        return until_due if timeout_seconds is None else min(timeout_seconds, until_due)

    def _call_due_timers(self) -> None:
        """Those that are due now; a timer set by one of them waits for the next tick, so none can starve the rest."""
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

    def _after(self, after_pass: Callable[[], float | None]) -> float | None:
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


def service_loop(*, poller: "select.epoll | select.poll | None" = None, most_events: int | None = None) -> Loop:
    """Of a process that ends when a callback fails: the supervisor replaces it."""

    def end(exc: Exception) -> None:
        raise exc

    return Loop(poller=poller or select.poll(), on_error=end, most_events=most_events)
