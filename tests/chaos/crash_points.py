"""Points of forq's code at which a process can be made to die, as if by kill -9; and a record of joined workers.

They wrap calls of the broker, only in the processes of the harness; forq has no hooks for them. A point is armed by a
file of its name; the process that removes the file dies there, so each arming kills one process.
"""

import os
import signal
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NoReturn

from forq.broker.claim import Consumer
from forq.broker.outbox import Outbox
from forq.broker.recovery import WorkerRecovery
from tests.chaos.ground import Ground, append

# As the table of a run prints them.
CRASH_POINTS = {
    "after_claim": "a worker that has claimed and not begun",
    "before_settle": "a worker that has run a job and not said so",
    "after_settle": "a worker that has settled and not received the reply",
    "before_recover": "a pulse that is about to recover a dead worker",
    "after_recover": "a pulse that has recovered and not said so",
    "in_heartbeat": "a pulse that has received the replies to some heartbeats",
    "after_collect": "a scribe that holds lines and has not written them",
    "before_forget": "a scribe that has written lines and not forgotten them",
}

_Call = Callable[..., Any]


def lay(ground: Ground) -> None:
    """From here on, forks of this process die at armed points."""

    def reach(point: str) -> None:
        try:
            os.unlink(ground.armed / point)
        except FileNotFoundError:
            return
        _die(ground, point)

    def around_turn(turn: _Call, consumer: Consumer, *args: Any) -> Any:
        settles = bool(args[1] or args[2])
        if settles:
            reach("before_settle")
        answer = turn(consumer, *args)
        if settles:
            reach("after_settle")
        if answer.jobs:
            reach("after_claim")
        return answer

    def around_wait(wait: _Call, consumer: Consumer, *args: Any) -> Any:
        answer = wait(consumer, *args)
        if answer is not None and answer.jobs:
            reach("after_claim")
        return answer

    def around_settle(settle: _Call, consumer: Consumer, number: int, want: int, done: Any, settled: _Call) -> Any:
        def on_settled(refused: Any) -> None:
            reach("after_settle")
            settled(refused)

        reach("before_settle")
        return around_wait(settle, consumer, number, want, done, on_settled)

    def around_join(join: _Call, consumer: Consumer, *args: Any) -> Any:
        epoch = join(consumer, *args)
        append(ground.joined, f"{os.getpid()} {consumer.processor}")
        return epoch

    def around_recover(recover: _Call, recovery: WorkerRecovery, *args: Any, **kwargs: Any) -> Any:
        reach("before_recover")
        answer = recover(recovery, *args, **kwargs)
        reach("after_recover")
        return answer

    def around_heartbeats(heartbeats: _Call, recovery: WorkerRecovery, *args: Any) -> Iterator[Any]:
        for answer in heartbeats(recovery, *args):
            yield answer
            reach("in_heartbeat")

    def around_collect(collect: _Call, outbox: Outbox, *args: Any) -> Any:
        lines = collect(outbox, *args)
        if lines:
            reach("after_collect")
        return lines

    def around_forget(forget: _Call, outbox: Outbox, *args: Any) -> Any:
        reach("before_forget")
        return forget(outbox, *args)

    _wrap(Consumer, "turn", around_turn)
    _wrap(Consumer, "wait_for_turn", around_wait)
    _wrap(Consumer, "settle_and_wait", around_settle)
    _wrap(Consumer, "join", around_join)
    _wrap(WorkerRecovery, "recover", around_recover)
    _wrap(WorkerRecovery, "heartbeats", around_heartbeats)
    _wrap(Outbox, "collect", around_collect)
    _wrap(Outbox, "forget", around_forget)


def _wrap(owner: type, name: str, around: _Call) -> None:
    inner = getattr(owner, name)

    @wraps(inner)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(inner, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _die(ground: Ground, point: str) -> NoReturn:
    append(ground.crashed, f"{point} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its SIGKILL")
