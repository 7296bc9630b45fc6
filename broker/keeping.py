"""What is done for workers that cannot speak for themselves: heartbeats, recovery, rescue, eviction; and on time: jobs
that are due, and ticks of schedules."""

from dataclasses import dataclass
from typing import Literal

import orjson

from forq.broker.codes import FENCED, NO_QUEUE, OK, error_for
from forq.broker.firing import Firing, due_ticks
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.scripts import script
from forq.errors import Fenced, ForqError

# What the loss of its worker means for the job that was running there: it killed the worker (counted), it had reached
# its timeout (counted), it is not to blame, or it may be: then it runs alone next time; or somebody has killed it.
Outcome = Literal["stalled", "timed_out", "interrupted", "suspect", "cancelled"]

# Of a stack in an attempt.
MAX_STACK = 8_000


class QueueGone(ForqError):
    """The queue is not there; `deleted` says that somebody deleted it, else its data was lost."""

    def __init__(self, queue: str, *, deleted: bool) -> None:
        super().__init__(f"queue {queue!r} {'was deleted' if deleted else 'is not in Redis'}")
        self.deleted = deleted


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat's answer: the processors that were evicted, in how many ms the next scheduled job is due, and whether
    an eviction is not finished, so that another heartbeat should follow at once."""

    evicted: list[str]
    due_ms: int | None
    more: bool


@dataclass(frozen=True, slots=True)
class Position:
    """Where a worker is: the number of its last turn, how many jobs it has finished since, whether one is running."""

    worker: str
    turn: int
    index: int
    running: bool


class Keeper:
    """The calls that a supervisor's pulse makes."""

    def __init__(self, link: Link, prefix: str, processor: str) -> None:
        self._link = link
        self._prefix = prefix
        self.processor = processor
        self._firing = Firing(link, prefix)

    def server_of(self, queue: str) -> str:
        """Where the queue is. RedisUnavailable if that cannot be found out."""
        return self._link.server_of(queue_base(self._prefix, queue))

    def heartbeat(self, queue: str, expiry_ms: int, positions: list[Position]) -> Beat:
        """Renews this processor and sweeps."""
        args: list[object] = [self.processor, expiry_ms]
        for at in positions:
            args += (at.worker, at.turn, at.index, int(at.running))
        reply = self._link.run(script("heartbeat"), queue_base(self._prefix, queue), *args)
        if reply[0] == NO_QUEUE:
            raise QueueGone(queue, deleted=bool(reply[1]))
        if reply[0] == FENCED:
            raise Fenced(f"processor {self.processor} has been evicted from queue {queue!r}")
        return Beat([silent.decode() for silent in reply[1]], None if reply[2] < 0 else reply[2], bool(reply[3]))

    def promote(self, queue: str) -> int | None:
        """Makes waiting what is due, and fires ticks; in how many ms the next is due (None: there is none)."""
        reply = self._link.run(script("promote"), queue_base(self._prefix, queue))
        if reply[0] == NO_QUEUE:
            return None
        wait_ms = None if reply[1] < 0 else int(reply[1])
        return self._firing.fire_all(queue, due_ticks(reply), int(reply[2]), wait_ms)

    def recover(
        self,
        queue: str,
        processor: str,
        at: Position,
        *,
        outcome: Outcome,
        cause: str,
        micros: int | None = None,
        stack: str | None = None,
    ) -> int:
        """Takes out a worker whose process is gone; how many ids its list held.

        `outcome`, `cause`, how long it ran and its stack are those of the job that was running.
        """
        position = (processor, at.worker, at.turn, at.index, int(at.running))
        lost = (outcome, cause, "" if micros is None else micros, _stack_as_json(stack))
        reply = self._link.run(script("recover"), queue_base(self._prefix, queue), *position, *lost)
        return 0 if reply[0] == NO_QUEUE else int(reply[1])

    def rescue(self, queue: str, at: Position) -> int:
        """Gives back what a held-up worker has not started; how many jobs that were."""
        base = queue_base(self._prefix, queue)
        reply = self._link.run(script("rescue"), base, self.processor, at.worker, at.turn, at.index)
        return 0 if reply[0] == NO_QUEUE else int(reply[1])

    def evict(self, queue: str, processor: str, cause: str) -> int:
        """Takes out a whole processor that is proven gone; how many workers it had."""
        workers, left = 0, 1
        while left:
            reply = self._link.run(script("evict"), queue_base(self._prefix, queue), processor, cause)
            if reply[0] == NO_QUEUE:
                return workers
            if reply[0] != OK:
                raise error_for(queue, reply)
            left, workers = reply[1], workers + reply[2]
        return workers


def _stack_as_json(stack: str | None) -> bytes:
    if not stack:
        return b""
    # Without lone surrogates, which JSON cannot hold.
    return orjson.dumps(stack[:MAX_STACK].encode("utf-8", "replace").decode())
