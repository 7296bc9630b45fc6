"""The calls of pulse: heartbeats, recovery of dead workers, rescue, eviction, and promotion of due jobs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from forq.broker.keys import queue_base, workers_key
from forq.broker.link import Link
from forq.broker.reports import Reports
from forq.broker.schedules import Ticker
from forq.broker.scripts import FENCED, NO_QUEUE, OK, Fate, error_for, read_fates, script
from forq.errors import Fenced, ForqError, RedisUnavailable

# What happened to the job that a dead worker was running: it crashed the process (counted), it exceeded its timeout
# (counted), it is not the cause, it may be the cause (it runs alone next time), or a user killed it.
Outcome = Literal["stalled", "timed_out", "interrupted", "suspect", "cancelled"]

# Small, so that other clients of the server do not wait long.
HEARTBEATS_PER_BATCH = 32

# Characters of a stack that an attempt keeps.
MAX_STACK = 8_000


class QueueGone(ForqError):
    """The queue does not exist. `deleted`: a user deleted it; otherwise its data was lost."""

    def __init__(self, queue: str, *, deleted: bool) -> None:
        super().__init__(f"queue {queue!r} {'was deleted' if deleted else 'is not in Redis'}")
        self.deleted = deleted


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The reply to a heartbeat."""

    # Processors that this heartbeat evicted.
    evicted: list[str]
    # Until the next scheduled job is due.
    due_ms: int | None
    # An eviction is unfinished: another heartbeat should follow at once.
    more: bool
    # Workers that run nothing and have not read the reply to their last turn, with its number.
    unread: dict[str, int]
    # Suspects that may start; for a fail queue 1 if jobs wait and none runs.
    helpers_wanted: int = 0
    # Jobs wait for main workers, or for the retry process.
    main_wanted: bool = False
    retry_wanted: bool = False
    # Jobs that were running in evicted processors.
    lost: Sequence[tuple[str, Fate]] = ()
    # Ends that other queues wait for have not been delivered.
    has_reports: bool = False


@dataclass(frozen=True, slots=True)
class Recovered:
    """The number of jobs that a dead worker held, the one that it was running, and the fate of that one."""

    held: int
    job: str | None = None
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's position: its last turn, the jobs finished since (`index`), and whether one is running."""

    worker: str
    turn: int
    index: int
    running: bool


class WorkerRecovery:
    """The calls of a supervisor's pulse.

    1. Heartbeats: renew this processor and evict silent ones.
    2. Recovers the jobs of dead workers; rescues unstarted jobs of held-up ones.
    3. Evicts processors that are known to be gone.
    4. Promotes due jobs and fires ticks.
    5. Delivers ends of jobs to other queues.
    """

    def __init__(self, link: Link, prefix: str, processor: str) -> None:
        self._link = link
        self._prefix = prefix
        self.processor = processor
        self._ticker = Ticker(link, prefix)
        self._reports = Reports(link, prefix)

    def heartbeat(self, queue: str, expiry_ms: int, positions: list[Position]) -> Heartbeat:
        reply = self._link.run(script("heartbeat"), *self._heartbeat_args(queue, expiry_ms, positions))
        return self._read_heartbeat(queue, reply)

    def heartbeats(
        self, queues: list[str], expiry_ms: int, positions: Mapping[str, list[Position]]
    ) -> Iterator[tuple[str, Heartbeat | ForqError]]:
        """Heartbeats of many queues, in batches: yields each queue with its reply or error.

        If a server does not reply, its other queues are skipped; other nodes of a cluster are still tried.
        """
        by_server: dict[str, list[str]] = {}
        for queue in queues:
            try:
                # Without a slot map no queue can be reached: fail once, not once per queue.
                self._link.masters()
            except RedisUnavailable as exc:
                yield queue, exc
                return
            try:
                by_server.setdefault(self._link.server_of(queue_base(self._prefix, queue)), []).append(queue)
            except RedisUnavailable as exc:
                yield queue, exc
        for served in by_server.values():
            for start in range(0, len(served), HEARTBEATS_PER_BATCH):
                batch = served[start : start + HEARTBEATS_PER_BATCH]
                calls = [self._heartbeat_args(queue, expiry_ms, positions.get(queue, [])) for queue in batch]
                try:
                    replies = self._link.run_batch(script("heartbeat"), calls)
                except RedisUnavailable as exc:
                    yield batch[0], exc
                    break
                for queue, reply in zip(batch, replies, strict=True):
                    yield queue, self._read_reply(queue, reply)

    def _read_reply(self, queue: str, reply: list[Any] | ForqError) -> Heartbeat | ForqError:
        try:
            return reply if isinstance(reply, ForqError) else self._read_heartbeat(queue, reply)
        except (QueueGone, Fenced) as exc:
            return exc

    def _heartbeat_args(self, queue: str, expiry_ms: int, positions: list[Position]) -> tuple[Any, ...]:
        args: list[object] = [self.processor, expiry_ms]
        for at in positions:
            args += (at.worker, at.turn, at.index, int(at.running))
        return (queue_base(self._prefix, queue), *args)

    def _read_heartbeat(self, queue: str, reply: list[Any]) -> Heartbeat:
        if reply[0] == NO_QUEUE:
            raise QueueGone(queue, deleted=bool(reply[1]))
        if reply[0] == FENCED:
            raise Fenced(f"processor {self.processor} has been evicted from queue {queue!r}")
        due_ms, unread = None if reply[2] < 0 else reply[2], reply[4]
        turns = {worker.decode(): int(turn) for worker, turn in zip(unread[::2], unread[1::2], strict=True)}
        evicted, wanted = [processor.decode() for processor in reply[1]], reply[6]
        main_wanted, retry_wanted, lost = bool(wanted & 1), bool(wanted & 2), _read_lost(reply[7])
        return Heartbeat(
            evicted, due_ms, bool(reply[3]), turns, reply[5], main_wanted, retry_wanted, lost, bool(reply[8])
        )

    def promote(self, queue: str) -> int | None:
        """Promotes due jobs and fires ticks; returns the ms until the next is due (None: there is none)."""
        wait_ms = self._ticker.promote(queue)
        if self._ticker.to_verify:
            self._reports.verify(queue, self._ticker.to_verify)
        return wait_ms

    def deliver(self, queue: str) -> bool:
        """Delivers a part of the queue's reports to other queues; returns whether there are more."""
        return self._reports.deliver(queue)

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
        """Removes a worker whose process is gone and returns its jobs. The keyword arguments describe the job that was
        running."""
        position = (processor, at.worker, at.turn, at.index, int(at.running))
        lost = (outcome, cause, "" if micros is None else micros, _stack_as_json(stack))
        peak = "" if peak_bytes is None else peak_bytes
        reply = self._link.run(script("recover"), queue_base(self._prefix, queue), *position, *lost, peak)
        if reply[0] == NO_QUEUE:
            return Recovered(0)
        if len(reply) == 2:
            return Recovered(reply[1])
        return Recovered(reply[1], reply[2].decode(errors="replace"), *read_fates(reply[3:]))

    def rescue(self, queue: str, at: Position, *, has_results: bool = False) -> int:
        """Returns the unstarted jobs of a held-up worker; how many. If it runs nothing, all jobs of its turn are
        unstarted. `has_results`: the worker keeps the jobs that it ran, until it sends their results."""
        base = queue_base(self._prefix, queue)
        position = (at.worker, at.turn, at.index, int(at.running))
        reply = self._link.run(script("rescue"), base, self.processor, *position, int(has_results))
        return 0 if reply[0] == NO_QUEUE else int(reply[1])

    def registered(self, queue: str) -> dict[str, int]:
        """The last turn of each worker of this processor in the queue."""
        found = self._link.call("HGETALL", workers_key(queue_base(self._prefix, queue), self.processor))
        # NUMBER or NUMBER:SHIFT.
        return {
            worker.decode(): int(turn.partition(b":")[0]) for worker, turn in zip(found[::2], found[1::2], strict=True)
        }

    def evict(
        self, queue: str, processor: str, cause: str, on_lost: Callable[[str, Fate], None] = lambda job, fate: None
    ) -> int:
        """Removes a processor that is known to be gone; returns the number of its workers. Calls `on_lost` for each job
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
    """Reads five values per job: its id and its fate."""
    jobs = [job.decode(errors="replace") for job in values[::5]]
    return list(zip(jobs, read_fates([value for at, value in enumerate(values) if at % 5]), strict=True))


def _stack_as_json(stack: str | None) -> bytes:
    if not stack:
        return b""
    # JSON cannot hold lone surrogates.
    return orjson.dumps(stack[:MAX_STACK].encode("utf-8", "replace").decode())
