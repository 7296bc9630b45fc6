"""What is done for workers that cannot speak for themselves: heartbeats, recovery, rescue, eviction; and on time: jobs
that are due, and ticks of schedules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from forq.broker.keys import queue_base, workers_key
from forq.broker.link import Link
from forq.broker.replies import FENCED, NO_QUEUE, OK, Fate, error_for, read_fates
from forq.broker.schedules import Ticker
from forq.broker.scripts import script
from forq.errors import Fenced, ForqError, RedisUnavailable

# What the loss of its worker means for the job that was running there: it killed the worker (counted), it had reached
# its timeout (counted), it is not to blame, or it may be: then it runs alone next time; or somebody has killed it.
Outcome = Literal["stalled", "timed_out", "interrupted", "suspect", "cancelled"]

# Few enough that nobody waits long behind them in the server.
HEARTBEATS_PER_BATCH = 32

# Of a stack in an attempt.
MAX_STACK = 8_000


class QueueGone(ForqError):
    """The queue is not there; `deleted` says that somebody deleted it, else its data was lost."""

    def __init__(self, queue: str, *, deleted: bool) -> None:
        super().__init__(f"queue {queue!r} {'was deleted' if deleted else 'is not in Redis'}")
        self.deleted = deleted


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat's answer: the processors that were evicted, in how many ms the next scheduled job is due, whether an
    eviction is not finished, so that another heartbeat should follow at once, the last turns of workers that run
    nothing and were at an earlier one, and how many suspects may begin (of a fail queue: 1 if jobs wait and none
    runs)."""

    evicted: list[str]
    due_ms: int | None
    more: bool
    unread: dict[str, int]
    helpers_wanted: int = 0
    # For whom jobs wait: main workers, and the retry child.
    main_wanted: bool = False
    retry_wanted: bool = False
    # Jobs that were running in processors that were evicted.
    lost: Sequence[tuple[str, Fate]] = ()


@dataclass(frozen=True, slots=True)
class Recovered:
    """How many ids the list of a worker held; the job that it was running, and what follows for that one."""

    held: int
    job: str | None = None
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a worker is: the whole number of its last turn, how many jobs it has finished since, whether one runs."""

    worker: str
    turn: int
    index: int
    running: bool


class WorkerRecovery:
    """The calls that a supervisor's pulse makes."""

    def __init__(self, link: Link, prefix: str, processor: str) -> None:
        self._link = link
        self._prefix = prefix
        self.processor = processor
        self._ticker = Ticker(link, prefix)

    def heartbeat(self, queue: str, expiry_ms: int, positions: list[Position]) -> Heartbeat:
        """Renews this processor and sweeps."""
        return self._read_beat(queue, self._link.run(script("heartbeat"), *self._beat(queue, expiry_ms, positions)))

    def heartbeats(
        self, queues: list[str], expiry_ms: int, positions: Mapping[str, list[Position]]
    ) -> Iterator[tuple[str, Heartbeat | ForqError]]:
        """The same for many queues, some at a time: each with its answer, or with what the server had against it. If a
        server does not answer, its other queues are not tried; those on other nodes of a cluster are."""
        by_server: dict[str, list[str]] = {}
        for queue in queues:
            try:
                # Whether there is a map at all: without one each queue would be asked about in vain.
                self._link.masters()
            except RedisUnavailable as exc:
                yield queue, exc
                return
            try:
                by_server.setdefault(self._link.server_of(queue_base(self._prefix, queue)), []).append(queue)
            except RedisUnavailable as exc:
                yield queue, exc
        for same in by_server.values():
            for at in range(0, len(same), HEARTBEATS_PER_BATCH):
                some = same[at : at + HEARTBEATS_PER_BATCH]
                beats = [self._beat(queue, expiry_ms, positions.get(queue, [])) for queue in some]
                try:
                    replies = self._link.run_batch(script("heartbeat"), beats)
                except RedisUnavailable as exc:
                    yield some[0], exc
                    break
                for queue, reply in zip(some, replies, strict=True):
                    yield queue, self._read_reply(queue, reply)

    def _read_reply(self, queue: str, reply: list[Any] | ForqError) -> Heartbeat | ForqError:
        try:
            return reply if isinstance(reply, ForqError) else self._read_beat(queue, reply)
        except (QueueGone, Fenced) as exc:
            return exc

    def _beat(self, queue: str, expiry_ms: int, positions: list[Position]) -> tuple[Any, ...]:
        args: list[object] = [self.processor, expiry_ms]
        for at in positions:
            args += (at.worker, at.turn, at.index, int(at.running))
        return (queue_base(self._prefix, queue), *args)

    def _read_beat(self, queue: str, reply: list[Any]) -> Heartbeat:
        if reply[0] == NO_QUEUE:
            raise QueueGone(queue, deleted=bool(reply[1]))
        if reply[0] == FENCED:
            raise Fenced(f"processor {self.processor} has been evicted from queue {queue!r}")
        due_ms, unread = None if reply[2] < 0 else reply[2], reply[4]
        turns = {worker.decode(): int(turn) for worker, turn in zip(unread[::2], unread[1::2], strict=True)}
        silent, wanted = [processor.decode() for processor in reply[1]], reply[6]
        main_wanted, retry_wanted, lost = bool(wanted & 1), bool(wanted & 2), _read_lost(reply[7])
        return Heartbeat(silent, due_ms, bool(reply[3]), turns, reply[5], main_wanted, retry_wanted, lost)

    def promote(self, queue: str) -> int | None:
        """Makes waiting what is due, and fires ticks; in how many ms the next is due (None: there is none)."""
        return self._ticker.promote(queue)

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
        peak_bytes: int | None = None,
    ) -> Recovered:
        """Takes out a worker whose process is gone.

        `outcome`, `cause`, how long it ran, its stack and the most memory are those of the job that was running.
        """
        position = (processor, at.worker, at.turn, at.index, int(at.running))
        lost = (outcome, cause, "" if micros is None else micros, _stack_as_json(stack))
        peak = "" if peak_bytes is None else peak_bytes
        reply = self._link.run(script("recover"), queue_base(self._prefix, queue), *position, *lost, peak)
        if reply[0] == NO_QUEUE:
            return Recovered(0)
        if len(reply) == 2:
            return Recovered(reply[1])
        return Recovered(reply[1], reply[2].decode(errors="replace"), *read_fates(reply[3:]))

    def rescue(self, queue: str, at: Position) -> int:
        """Gives back what a held-up worker has not started; how many jobs that were. One that is not running has begun
        nothing of its turn."""
        base = queue_base(self._prefix, queue)
        position = (at.worker, at.turn, at.index, int(at.running))
        reply = self._link.run(script("rescue"), base, self.processor, *position)
        return 0 if reply[0] == NO_QUEUE else int(reply[1])

    def registered(self, queue: str) -> dict[str, int]:
        """The number of the last turn of each worker that this processor has in the queue."""
        found = self._link.call("HGETALL", workers_key(queue_base(self._prefix, queue), self.processor))
        # NUMBER or NUMBER:SHIFT.
        return {
            worker.decode(): int(turn.partition(b":")[0]) for worker, turn in zip(found[::2], found[1::2], strict=True)
        }

    def evict(
        self, queue: str, processor: str, cause: str, on_lost: Callable[[str, Fate], None] = lambda job, fate: None
    ) -> int:
        """Takes out a whole processor that is proven gone; how many workers it had. `on_lost` is called with each job
        that was running there."""
        workers, left = 0, 1
        while left:
            reply = self._link.run(script("evict"), queue_base(self._prefix, queue), processor, cause)
            if reply[0] == NO_QUEUE:
                return workers
            if reply[0] != OK:
                raise error_for(queue, reply)
            left, workers = reply[1], workers + reply[2]
            for job, fate in _read_lost(reply[3]):
                on_lost(job, fate)
        return workers


def _read_lost(values: list[Any]) -> list[tuple[str, Fate]]:
    """An id and its fate: five values each."""
    jobs = [job.decode(errors="replace") for job in values[::5]]
    return list(zip(jobs, read_fates([value for at, value in enumerate(values) if at % 5]), strict=True))


def _stack_as_json(stack: str | None) -> bytes:
    if not stack:
        return b""
    # Without lone surrogates, which JSON cannot hold.
    return orjson.dumps(stack[:MAX_STACK].encode("utf-8", "replace").decode())
