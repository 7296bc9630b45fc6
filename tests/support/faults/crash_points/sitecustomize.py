"""Crash points: kill -9, once, at a place in the code that a signal from outside could not hit.

Python imports this module at start when its folder is on PYTHONPATH. It wraps a method of forq so that the process
that reaches it kills itself; forq itself has no hook for this. FORQ_CRASH_AT names the point. The process first creates
FORQ_CRASH_FILE: only one can, so it happens once, and the test knows that it did.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


def die() -> None:
    path = os.environ["FORQ_CRASH_FILE"]
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    os.write(fd, str(os.getpid()).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def before(call: Call, is_it: Callable[..., bool]) -> Call:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **how: Any) -> Any:
        if is_it(*args):
            die()
        return call(self, *args, **how)

    return wrapper


def after(call: Call, is_it: Callable[..., bool]) -> Call:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **how: Any) -> Any:
        answer = call(self, *args, **how)
        if is_it(answer, *args):
            die()
        return answer

    return wrapper


def between_move_and_claim(call: Call, is_it: Callable[..., bool]) -> Call:
    """The server moves the id, but the claim sent with it never arrives."""

    @functools.wraps(call)
    def wrapper(self: Any, number: int, want: int) -> Any:
        if os.path.exists(os.environ["FORQ_CRASH_FILE"]):
            return call(self, number, want)
        if self.wait_for_job():
            die()
        return self.turn(number, [], [], 0, want)

    return wrapper


def once_settled(call: Call, is_it: Callable[..., bool]) -> Call:
    """The server has settled: after a turn, or before the wait that was sent with the settle is over."""
    if call.__name__ == "turn":
        return after(call, lambda turn, *args: is_it(*args))

    @functools.wraps(call)
    def wrapper(self: Any, number: int, want: int, done: list[Any], settled: Call) -> Any:
        def on_settled(refused: list[bytes]) -> None:
            die()
            settled(refused)

        return call(self, number, want, done, on_settled)

    return wrapper


def always(*args: Any) -> bool:
    return True


def settles(number: int, done: list[Any], failed: list[Any], *rest: Any) -> bool:
    return bool(done or failed)


def install(point: str) -> None:
    from forq.broker.claim import Consumer
    from forq.broker.enqueue import Producer
    from forq.broker.outbox import Outbox
    from forq.broker.recovery import WorkerRecovery
    from forq.workers.attempt import AttemptRunner

    points: dict[str, tuple[type, tuple[str, ...], Callable[[Call, Any], Call], Callable[..., bool]]] = {
        # Of a worker, in the order in which it reaches them.
        "moved": (Consumer, ("wait_for_turn",), between_move_and_claim, always),
        "claimed": (Consumer, ("turn", "wait_for_turn"), after, lambda turn, *args: bool(turn and turn.jobs)),
        "begun": (AttemptRunner, ("run",), before, always),
        "ran": (AttemptRunner, ("run",), after, always),
        "settling": (Consumer, ("turn", "settle_and_wait"), before, settles),
        "settled": (Consumer, ("turn", "settle_and_wait"), once_settled, settles),
        "releasing": (Consumer, ("release",), before, always),
        "released": (Consumer, ("release",), after, always),
        # Of pulse.
        "recovering": (WorkerRecovery, ("recover",), before, always),
        "recovered": (WorkerRecovery, ("recover",), after, always),
        "promoting": (WorkerRecovery, ("promote",), before, always),
        "promoted": (WorkerRecovery, ("promote",), after, always),
        # Of the scribe.
        "collected": (Outbox, ("collect",), after, lambda lines, *args: bool(lines)),
        "written": (Outbox, ("forget",), before, always),
        # Of the clerk.
        "storing": (Producer, ("enqueue",), before, always),
        "stored": (Producer, ("enqueue",), after, always),
    }
    where, methods, wrap, is_it = points[point]
    for method in methods:
        setattr(where, method, wrap(getattr(where, method), is_it))


if "FORQ_CRASH_AT" in os.environ and sys.argv[1:2] == ["run"]:
    install(os.environ["FORQ_CRASH_AT"])
