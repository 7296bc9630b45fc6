"""What is done for workers that cannot speak for themselves: heartbeats, recovery, rescue, eviction."""

from dataclasses import dataclass

from forq.broker.codes import FENCED, NO_QUEUE, OK, error_for
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.scripts import script
from forq.errors import Fenced, ForqError


class QueueGone(ForqError):
    """The queue is not there; `deleted` says that somebody deleted it, else its data was lost."""

    def __init__(self, queue: str, *, deleted: bool) -> None:
        super().__init__(f"queue {queue!r} {'was deleted' if deleted else 'is not in Redis'}")
        self.deleted = deleted


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat's answer: the processors that were evicted, and in how many ms the next scheduled job is due."""

    evicted: list[str]
    due_ms: int | None


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
        return Beat([silent.decode() for silent in reply[1]], None if reply[2] < 0 else reply[2])

    def promote(self, queue: str) -> int | None:
        """Makes waiting what is due; in how many ms the next job is due (None: there is none)."""
        reply = self._link.run(script("promote"), queue_base(self._prefix, queue))
        return None if reply[0] == NO_QUEUE or reply[1] < 0 else int(reply[1])

    def recover(self, queue: str, processor: str, at: Position, *, count: bool, cause: str) -> int:
        """Takes out a worker whose process is gone; how many ids its list held."""
        reply = self._link.run(
            script("recover"),
            queue_base(self._prefix, queue),
            *(processor, at.worker, at.turn, at.index, int(at.running), int(count), cause),
        )
        return 0 if reply[0] == NO_QUEUE else int(reply[1])

    def rescue(self, queue: str, at: Position) -> int:
        """Gives back what a held-up worker has not started; how many jobs that were."""
        base = queue_base(self._prefix, queue)
        reply = self._link.run(script("rescue"), base, self.processor, at.worker, at.turn, at.index)
        return 0 if reply[0] == NO_QUEUE else int(reply[1])

    def evict(self, queue: str, processor: str, cause: str) -> int:
        """Takes out a whole processor that is proven gone; how many workers it had."""
        reply = self._link.run(script("evict"), queue_base(self._prefix, queue), processor, cause)
        if reply[0] == NO_QUEUE:
            return 0
        if reply[0] != OK:
            raise error_for(queue, reply)
        return int(reply[1])
