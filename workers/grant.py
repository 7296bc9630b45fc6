"""A worker's grant: the right to run jobs, which the supervisor grants within its capacity.

The worker's thread and the minder's thread share a grant. Every change happens under one lock, and each message is sent
under that lock before the change it reports, so the supervisor receives changes in order. Messages may cross; three
rules keep both sides consistent:

1. At most one `want` is pending. A `want` with other terms is sent only after the answer to the last one, so a `go`
   always refers to the terms sent last.
2. A `yield` counts only while a grant is held. A `yield` that crossed a `done` referred to the returned grant.
3. A `go` that is no longer needed is answered with `done`.

If sending fails, the supervisor received nothing: it is gone and this process is about to exit, or it will find this
process dead, which returns every grant. `send` must not block for long: the minder may be waiting for the lock.
"""

import threading
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

# A healthy supervisor answers much faster. After this time a worker returns its jobs and waits without any.
ANSWER_SECONDS = 0.05


class _Phase(Enum):
    NONE = "holds no grant, wants none"
    WANTED = "sent want, did not receive go"
    RESERVED = "holds a grant without using it"
    IN_USE = "holds a grant and may be running jobs"


class _Terms(NamedTuple):
    units: int
    priority: int


class Grant:
    """The right of one worker to run jobs. `send` sends a message to the supervisor; `number` is the worker's slot."""

    def __init__(self, send: Callable[[dict[str, object]], None], number: int) -> None:
        # Read by the worker between batches. True: return the grant.
        self.yield_requested = False
        self._send = send
        self._number = number
        self._changed = threading.Condition(threading.Lock())
        self._phase = _Phase.NONE
        self._terms = _Terms(1, 0)  # the worker's current terms
        self._sent_terms = self._terms  # those of the last `want`
        self._wait_received = False
        self._worker_waiting = False
        self._unneeded = False
        self._stopped = False

    def acquire(self, units: int, priority: int) -> bool:
        """Worker: True if it may claim. If not, it must return its jobs and call wait()."""
        with self._changed:
            self._terms = _Terms(units, priority)
            self._unneeded = False
            if self.yield_requested:
                self._send_done()
            if not self._try_use():
                self._wait_for(lambda: self._wait_received or self._answered(), ANSWER_SECONDS)
            return self._try_use()

    def wait(self) -> bool:
        """Worker: blocks until it may claim; False if stopped first."""
        with self._changed:
            self._unneeded = False
            while not self._try_use():
                if self._stopped:
                    return False
                self._wait_for(self._answered)
            return True

    def stop_using(self) -> bool:
        """Worker: stops running jobs. Keeps the grant as a reservation (True), unless a `yield` came."""
        with self._changed:
            if self._phase is _Phase.IN_USE:
                if self.yield_requested or self._stopped:
                    self._send_done()
                else:
                    self._phase = _Phase.RESERVED
            return self._phase is _Phase.RESERVED

    def give_back(self) -> None:
        """Worker: needs no grant. A `go` that is still on its way is returned when it arrives."""
        with self._changed:
            if self._phase in (_Phase.RESERVED, _Phase.IN_USE):
                self._send_done()
            self._unneeded = True

    def receive(self, kind: str) -> None:
        """Minder: handles a message of this kind from the supervisor."""
        with self._changed:
            if kind == "go":
                self._receive_go()
            elif kind == "wait":
                self._wait_received = self._phase is _Phase.WANTED
            elif kind == "yield" and self._phase is _Phase.IN_USE:
                self.yield_requested = True
            elif kind == "yield" and self._phase is _Phase.RESERVED:
                self._send_done()
            self._changed.notify_all()

    def stop(self) -> None:
        """Wakes wait(). Returns an unused grant and withdraws a pending `want`; sends no other."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            if self._phase in (_Phase.WANTED, _Phase.RESERVED):
                self._send_done()

    def _receive_go(self) -> None:
        if self._phase in (_Phase.RESERVED, _Phase.IN_USE):
            return
        wanted = self._phase is _Phase.WANTED
        # In use from now on if the worker waits, not from when its thread wakes up: it still runs one batch after a
        # `yield` that follows at once. Otherwise `go` and `yield` could alternate forever.
        self._phase = _Phase.IN_USE if self._worker_waiting else _Phase.RESERVED
        self.yield_requested = self._wait_received = False
        if not wanted or self._unneeded or self._stopped:
            self._send_done()

    def _try_use(self) -> bool:
        """Whether the worker may run jobs now. If not, its `want` is pending, or it is stopped."""
        held = self._phase in (_Phase.RESERVED, _Phase.IN_USE)
        if held and (self._stopped or self._sent_terms != self._terms):
            self._send_done()
        elif held:
            self._phase = _Phase.IN_USE
        if self._phase is _Phase.NONE and not self._stopped:
            self._send_want()
        return self._phase is _Phase.IN_USE

    def _answered(self) -> bool:
        return self._phase is not _Phase.WANTED or self._stopped

    def _wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        self._worker_waiting = True
        try:
            self._changed.wait_for(condition, seconds)
        finally:
            self._worker_waiting = False

    def _send_want(self) -> None:
        units, priority = self._terms
        self._send({"want": self._number, "units": units, "priority": priority})
        self._phase, self._sent_terms, self._wait_received = _Phase.WANTED, self._terms, False

    def _send_done(self) -> None:
        self._send({"done": self._number})
        self._phase, self.yield_requested, self._wait_received = _Phase.NONE, False, False
