"""The right of one worker to run jobs, as the supervisor sees it: wanted, kept between jobs, given back when asked for.

Two threads use it: the worker's own, and the minder's, which hears the supervisor. All changes happen under one lock,
and each message is sent under it before the change that it tells of, so that the supervisor hears of changes in their
order. Three rules keep what both sides believe the same, though messages cross:

1. At most one wish is under way. A wish with other terms is sent only after the answer to the one before, so that a
   `go` can only mean the terms that were sent last.
2. A `yield` counts only while a grant is held. One that crossed a `done` was for the grant that is back already.
3. A `go` that nobody waits for any more is answered with `done`.

If sending fails the supervisor has heard nothing. It is gone then, and this process is about to end; or it will find
this process dead, which gives back everything. `tell` must not block for long, since the
minder may be waiting for the lock.
"""

import threading
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

# A supervisor that is well answers in far less; after this a worker hands back its jobs and waits without any.
ANSWER_SECONDS = 0.05


class _Phase(Enum):
    NONE = "holds nothing, wants nothing"
    WANTED = "has said want, and was not told go"
    RESERVED = "holds a grant and does not use it"
    IN_USE = "holds a grant and may be running jobs"


class _Terms(NamedTuple):
    units: int
    priority: int


class Grant:
    """The right of one worker to run jobs. `tell` sends one message up the leash; `number` is the worker's slot."""

    def __init__(self, send: Callable[[dict[str, object]], None], number: int) -> None:
        # Read by the worker between batches: it should stop using the grant (rest, or begin anew).
        self.yield_requested = False
        self._send = send
        self._number = number
        self._changed = threading.Condition(threading.Lock())
        self._phase = _Phase.NONE
        self._terms = _Terms(1, 0)  # what the worker needs now
        self._sent_terms = self._terms  # what the last want said
        self._wait_received = False
        self._worker_waiting = False
        self._unneeded = False
        self._stopped = False

    def acquire(self, units: int, priority: int) -> bool:
        """Worker: may it claim? If not, it must hand back what it has and call wait()."""
        with self._changed:
            self._terms = _Terms(units, priority)
            self._unneeded = False
            if self.yield_requested:
                self._send_done()
            if not self._try_use():
                self._wait_for(lambda: self._wait_received or self._answered(), ANSWER_SECONDS)
            return self._try_use()

    def wait(self) -> bool:
        """Worker: blocks until it may claim; False if it was stopped meanwhile."""
        with self._changed:
            self._unneeded = False
            while not self._try_use():
                if self._stopped:
                    return False
                self._wait_for(self._answered)
            return True

    def stop_using(self) -> bool:
        """Worker: it uses the grant no more. Kept as a reservation (True), unless somebody asked for it."""
        with self._changed:
            if self._phase is _Phase.IN_USE:
                if self.yield_requested or self._stopped:
                    self._send_done()
                else:
                    self._phase = _Phase.RESERVED
            return self._phase is _Phase.RESERVED

    def give_back(self) -> None:
        """Worker: it wants nothing. A go that is still to come is given back when it comes."""
        with self._changed:
            if self._phase in (_Phase.RESERVED, _Phase.IN_USE):
                self._send_done()
            self._unneeded = True

    def receive(self, word: str) -> None:
        """Minder: what the supervisor says."""
        with self._changed:
            if word == "go":
                self._receive_go()
            elif word == "wait":
                self._wait_received = self._phase is _Phase.WANTED
            elif word == "yield" and self._phase is _Phase.IN_USE:
                self.yield_requested = True
            elif word == "yield" and self._phase is _Phase.RESERVED:
                self._send_done()
            self._changed.notify_all()

    def stop(self) -> None:
        """Wakes wait(). What is not in use is given back, and a wish withdrawn; no other will follow."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            if self._phase in (_Phase.WANTED, _Phase.RESERVED):
                self._send_done()

    def _receive_go(self) -> None:
        if self._phase in (_Phase.RESERVED, _Phase.IN_USE):
            return
        wanted = self._phase is _Phase.WANTED
        # Used from here on if the worker waits for it, not from when its thread wakes up: a yield that follows closely
        # then lets it run a batch first. Else the two could be repeated for ever.
        self._phase = _Phase.IN_USE if self._worker_waiting else _Phase.RESERVED
        self.yield_requested = self._wait_received = False
        if not wanted or self._unneeded or self._stopped:
            self._send_done()

    def _try_use(self) -> bool:
        """Whether the worker may run jobs now. If not, its wish is under way, or it is stopped."""
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
