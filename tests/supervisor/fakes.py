"""A loop with a fake clock, and children that are never forked."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from forq.procs import jsonrpc
from forq.procs.loop import Timer
from forq.supervisor.child import Exit

CRASHED = Exit(None, 9)


class FakeLoop:
    """Timers run only within `run`. Readers are kept by descriptor, so that a test can call them."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.readers: dict[int, Callable[[], object]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(self.time + seconds, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def run(self, seconds: float = 0.0) -> None:
        """Moves the clock and calls all timers that are due by then."""
        until = self.time + seconds
        while self._timers and self._timers[0][0] <= until:
            due, _, timer = heapq.heappop(self._timers)
            self.time = max(self.time, due)
            if (callback := timer.take()) is not None:
                callback()
        self.time = until

    def add_reader(self, fd: int, callback: Callable[[], object]) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        self.readers.pop(fd, None)

    watch_child = add_reader

    def add_writer(self, fd: int, callback: Callable[[], object]) -> None:
        raise AssertionError("nothing in these tests fills a socket")

    def remove_writer(self, fd: int) -> None:
        pass

    def on_signal(self, signum: int, callback: Callable[[], object]) -> None:
        pass


class FakeChild:
    """Replaces Child. `receive` passes a message from it to its owner; `die` ends it, as the cleanup would."""

    made: "list[FakeChild]"
    # Exceptions for the next forks.
    refused: "list[OSError]"
    loop: FakeLoop

    def __init__(self, children: Any, name: str, run: Any, **options: Any) -> None:
        if self.refused:
            raise self.refused.pop(0)
        self.name = name
        self.options = options
        self.pid = 100 + len(self.made)
        self.stopping = self.ended = self.stopped = False
        self.resumed = self.unsent_bytes = 0
        self.kernel_limits = True
        self.killed_by_kernel = None
        self.survivors: frozenset[int] = frozenset()
        self.sent: list[dict[str, Any]] = []
        self.signals: list[int] = []
        self.kills = 0
        self._started = self.loop.now()
        self.made.append(self)

    def uptime_seconds(self) -> float:
        return self.loop.now() - self._started

    def send(self, line: bytes) -> None:
        self.sent.append(jsonrpc.decode(line))

    def signal(self, signum: int) -> bool:
        self.signals.append(signum)
        return not self.ended

    def frozen(self) -> bool:
        return False

    def stop(self, grace_seconds: float) -> None:
        self.stopping = True

    def kill(self) -> None:
        self.stopping = True
        self.kills += 1

    kill_and_ignore = kill

    def receive(self, **message: Any) -> None:
        self.options["on_line"](jsonrpc.encode(message))

    def die(self, end: Exit = CRASHED, survivors: frozenset[int] = frozenset()) -> None:
        self.ended = True
        self.survivors = survivors
        self.options["on_end"](end)


def fake_child_class(loop: FakeLoop) -> type[FakeChild]:
    """A new class for each test, with an empty list of children."""
    return type("Child", (FakeChild,), {"made": [], "refused": [], "loop": loop})
