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
    KEPT = "holds a grant and does not use it"
    USED = "holds a grant and may be running jobs"


class _Terms(NamedTuple):
    units: int
    priority: int


class Grant:
    """The right of one worker to run jobs. `tell` sends one message up the leash; `number` is the worker's slot."""

    def __init__(self, tell: Callable[[dict[str, object]], None], number: int) -> None:
        # Read by the worker between batches: it should stop using the grant (rest, or begin anew).
        self.yielding = False
        self._tell = tell
        self._number = number
        self._changed = threading.Condition(threading.Lock())
        self._phase = _Phase.NONE
        self._terms = _Terms(1, 0)  # what the worker needs now
        self._told = self._terms  # what the last want said
        self._told_to_wait = False
        self._worker_waits = False
        self._unneeded = False
        self._stopped = False

    def begin(self, units: int, priority: int) -> bool:
        """Worker: may it claim? If not, it must hand back what it has and call wait()."""
        with self._changed:
            self._terms = _Terms(units, priority)
            self._unneeded = False
            if self.yielding:
                self._return()
            if not self._take_up():
                self._await(lambda: self._told_to_wait or self._answered(), ANSWER_SECONDS)
            return self._take_up()

    def wait(self) -> bool:
        """Worker: blocks until it may claim; False if it was stopped meanwhile."""
        with self._changed:
            self._unneeded = False
            while not self._take_up():
                if self._stopped:
                    return False
                self._await(self._answered)
            return True

    def rest(self) -> bool:
        """Worker: it uses the grant no more. Kept as a reservation (True), unless somebody asked for it."""
        with self._changed:
            if self._phase is _Phase.USED:
                if self.yielding or self._stopped:
                    self._return()
                else:
                    self._phase = _Phase.KEPT
            return self._phase is _Phase.KEPT

    def give_back(self) -> None:
        """Worker: it wants nothing. A go that is still to come is given back when it comes."""
        with self._changed:
            if self._phase in (_Phase.KEPT, _Phase.USED):
                self._return()
            self._unneeded = True

    def hear(self, word: str) -> None:
        """Minder: what the supervisor says."""
        with self._changed:
            if word == "go":
                self._hear_go()
            elif word == "wait":
                self._told_to_wait = self._phase is _Phase.WANTED
            elif word == "yield" and self._phase is _Phase.USED:
                self.yielding = True
            elif word == "yield" and self._phase is _Phase.KEPT:
                self._return()
            self._changed.notify_all()

    def stop(self) -> None:
        """Wakes wait(). What is not in use is given back, and a wish withdrawn; no other will follow."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            if self._phase in (_Phase.WANTED, _Phase.KEPT):
                self._return()

    def _hear_go(self) -> None:
        if self._phase in (_Phase.KEPT, _Phase.USED):
            return
        wanted = self._phase is _Phase.WANTED
        # Used from here on if the worker waits for it, not from when its thread wakes up: a yield that follows closely
        # then lets it run a batch first. Else the two could be repeated for ever.
        self._phase = _Phase.USED if self._worker_waits else _Phase.KEPT
        self.yielding = self._told_to_wait = False
        if not wanted or self._unneeded or self._stopped:
            self._return()

    def _take_up(self) -> bool:
        """Whether the worker may run jobs now. If not, its wish is under way, or it is stopped."""
        held = self._phase in (_Phase.KEPT, _Phase.USED)
        if held and (self._stopped or self._told != self._terms):
            self._return()
        elif held:
            self._phase = _Phase.USED
        if self._phase is _Phase.NONE and not self._stopped:
            self._want()
        return self._phase is _Phase.USED

    def _answered(self) -> bool:
        return self._phase is not _Phase.WANTED or self._stopped

    def _await(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        self._worker_waits = True
        try:
            self._changed.wait_for(condition, seconds)
        finally:
            self._worker_waits = False

    def _want(self) -> None:
        units, priority = self._terms
        self._tell({"want": self._number, "units": units, "priority": priority})
        self._phase, self._told, self._told_to_wait = _Phase.WANTED, self._terms, False

    def _return(self) -> None:
        self._tell({"done": self._number})
        self._phase, self.yielding, self._told_to_wait = _Phase.NONE, False, False
