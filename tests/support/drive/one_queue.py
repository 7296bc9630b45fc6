"""One queue on a real server, driven by hand: runs every script through its class, and reads the whole state."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forq.broker.claim import Consumer, Results, Settled, Turn
from forq.broker.enqueue import Producer, Update, new_job
from forq.broker.inspect import Inspector
from forq.broker.journal import Event, Summary, read_entry, read_summary
from forq.broker.keys import (
    DEFAULT_PREFIX,
    fail_queue,
    pending_key,
    processing_key,
    queue_base,
    suspects_key,
    swept_key,
)
from forq.broker.link import Link
from forq.broker.recovery import Outcome, Position, WorkerRecovery
from forq.broker.registry import Registry
from forq.settings import stored_defaults
from tests.support.drive.redis_cluster import connect

EXPIRY_MS = 15_000
# The error of a failed job if a test does not care.
NO = '{"message":"no"}'


@dataclass(frozen=True)
class State:
    """Where every job is. Empty parts are left out, so that a test lists only what it expects."""

    jobs: set[str]
    waiting: dict[int, list[str]] = field(default_factory=dict)
    suspects: list[str] = field(default_factory=list)
    suspect_ms: dict[str, int] = field(default_factory=dict, compare=False)
    active: dict[str, str] = field(default_factory=dict)
    processing: dict[str, list[str]] = field(default_factory=dict)
    stale: dict[str, int] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    # Ids of `waiting` that come first while stale hints are removed.
    swept: dict[int, list[str]] = field(default_factory=dict, compare=False)
    records: dict[str, bytes] = field(default_factory=dict, compare=False)
    held_records: dict[str, bytes] = field(default_factory=dict, compare=False)
    owners: dict[str, str] = field(default_factory=dict, compare=False)
    counts: dict[str, str] = field(default_factory=dict, compare=False)
    summary: Summary = field(default_factory=lambda: read_summary(None), compare=False)
    tokens: int = field(default=0, compare=False)
    retry_tokens: int = field(default=0, compare=False)


class OneQueue:
    def __init__(self, url: str, name: str = "q", mode: str = "work", **options: int) -> None:
        self.url = url
        self.name = name
        self.mode = mode
        # Any: redis-py types its answers for every way of decoding them at once.
        self.redis: Any = connect(url, queue_base(DEFAULT_PREFIX, name))
        self.link = Link(url)
        self.base = queue_base(DEFAULT_PREFIX, name)
        self.registry = Registry(self.link, DEFAULT_PREFIX)
        self.producer = Producer(self.link, DEFAULT_PREFIX, name)
        self.inspector = Inspector(self.link, DEFAULT_PREFIX, name)
        self.workers: list[HandWorker] = []
        # Most tests want a failure to be final at once.
        self.create(**{"max_retries": 0, **options})

    def create(self, **options: int) -> bool:
        return self.registry.create(self.name, self.mode, 100, stored_defaults(), options)

    def set_options(self, **options: int) -> None:
        """Sets any options, also those that `configure` would refuse."""
        self.redis.hset(self.key("options"), mapping=options)
        self.options_changed()

    def options_changed(self) -> None:
        """Gives the options a new version, so that scripts read them again."""
        version = self.redis.hincrby(self.key("options"), "version", 1)
        epoch = self.redis.hget(self.key("options"), "epoch").decode()
        self.change_summary(options=f"{epoch} {version}")

    def set_due(self, due_ms: Mapping[str, float]) -> None:
        """Sets the due times of scheduled jobs."""
        self.redis.zadd(self.key("scheduled"), due_ms)
        self.change_summary(first_due_ms=1)

    def set_stale(self, hint: str, number: int) -> None:
        self.redis.hset(self.key("stale"), hint, number)
        self.change_summary(may_be_stale=True)

    def summary(self) -> Summary:
        return read_summary(self.redis.get(self.key("summary")))

    def change_summary(self, **values: Any) -> None:
        new = self.summary()._replace(**values)
        numbers = (new.bytes, new.fence, new.other_hints, new.lane, new.suspects, new.first_due_ms)
        flags = f"{new.may_be_stale:d} {new.may_be_rare:d}"
        text = f"{new.options} {new.sequence} {new.hash or '-'} {' '.join(map(str, numbers))} {flags}"
        self.redis.set(self.key("summary"), text)

    def enqueue(self, *ids: str, priority: int = 5, token: str | None = None, if_exists: str = "refuse") -> list[str]:
        jobs = [new_job({"n": job_id}, id=job_id, priority=priority, token=token) for job_id in ids]
        return self.producer.enqueue(jobs, Update(if_exists))

    def worker(self, name: str = "w1", processor: str = "p1", lane: str = "main") -> "HandWorker":
        """Returns a worker that has joined."""
        worker = HandWorker(self, name, processor, lane)
        worker.consumer.join(EXPIRY_MS)
        return worker

    def claim_fail_job(self, name: str) -> list[bytes]:
        """Takes the first turn of a new worker of the fail queue; returns the id and record that it gets, if any."""
        consumer = Consumer(self.url, DEFAULT_PREFIX, fail_queue(self.name), "p1", name, "retry")
        consumer.join(EXPIRY_MS)
        jobs = consumer.turn(1, [], [], 0, 1).jobs
        consumer.close()
        return jobs

    def lose_fail_worker(self, name: str, outcome: Outcome) -> None:
        at = Position(name, 1, 0, True)
        self.recovery().recover(fail_queue(self.name), "p1", at, outcome=outcome, cause="signal 9")

    def recovery(self, processor: str = "p1") -> WorkerRecovery:
        return WorkerRecovery(self.link, DEFAULT_PREFIX, processor)

    def recover(
        self, worker: "HandWorker", index: int = 0, *, running: bool = False, outcome: Outcome = "stalled"
    ) -> int:
        """Recovers a worker that died at this index of its last turn."""
        return self.recover_at(worker, worker.number, index, running=running, outcome=outcome)

    def recover_at(
        self, worker: "HandWorker", turn: int, index: int, *, running: bool = False, outcome: Outcome = "stalled"
    ) -> int:
        at = Position(worker.name, turn, index, running)
        return self.recovery().recover(self.name, worker.processor, at, outcome=outcome, cause="signal 9").held

    def rescue(self, worker: "HandWorker", index: int) -> int:
        return self.recovery(worker.processor).rescue(self.name, Position(worker.name, worker.number, index, True))

    def key(self, name: str) -> str:
        return f"{self.base}:{name}"

    def channel(self, name: str) -> str:
        """In database 0."""
        return f"{self.base}@0:{name}"

    def hash(self, name: str) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.redis.hgetall(self.key(name)).items()}

    def pending(self, priority: int = 5) -> list[str]:
        """Hints, and tokens as ''."""
        return [hint.decode() for hint in self.redis.lrange(pending_key(self.base, priority), 0, -1)]

    def stall_count(self, job_id: str) -> int:
        return int(self.inspector.job(job_id)["stall_count"])

    def state(self) -> State:
        """Reads everything in one transaction."""
        with self.redis.pipeline(transaction=False) as look:
            for name in ("jobs", "active", "stale", "counts"):
                look.hgetall(self.key(name))
            for priority in range(10):
                look.lrange(pending_key(self.base, priority), 0, -1)
            for priority in range(10):
                look.lrange(swept_key(pending_key(self.base, priority)), 0, -1)
            look.zrange(self.key("dead"), 0, -1)
            look.zrange(suspects_key(self.base), 0, -1, withscores=True)
            look.lrange(self.key("failed"), 0, -1)
            for worker in self.workers:
                look.lrange(worker.processing, 0, -1)
            look.hgetall(self.key("held:jobs"))
            look.get(self.key("summary"))
            *found, held_records, summary = look.execute()
        jobs, owners, stale, counts = ({k.decode(): v for k, v in flat.items()} for flat in found[:4])
        suspect_ms = {job_id.decode(): int(score) for job_id, score in found[25]}
        found[25] = [job_id for job_id, _ in found[25]]
        lists = [[entry.decode() for entry in entries] for entries in found[4:]]
        swept, (dead, suspects, failed) = lists[10:20], lists[20:23]
        processing = {worker.name: held for worker, held in zip(self.workers, lists[23:], strict=True)}
        assert int(stale.pop("swept", 0)) >= sum(len(hints) for hints in swept), "those of the retry lane count too"
        return State(
            jobs=set(jobs),
            waiting={p: hints for p in range(10) if (hints := [hint for hint in swept[p] + lists[p] if hint])},
            swept={p: swept[p] for p in range(10) if swept[p]},
            suspects=suspects,
            suspect_ms=suspect_ms,
            active={job_id: owner.decode().split(":")[0] for job_id, owner in owners.items()},
            processing={name: held for name, held in processing.items() if held},
            stale={name: int(number) for name, number in stale.items()},
            dead=[member.rpartition("@")[0] for member in dead],
            records=jobs,
            held_records={job_id.decode(): record for job_id, record in held_records.items()},
            owners={job_id: owner.decode() for job_id, owner in owners.items()},
            counts={name: value.decode() for name, value in counts.items()},
            summary=read_summary(summary),
            tokens=lists[5].count(""),
            retry_tokens=len(failed),
        )

    def events(self) -> list[Event]:
        return [event for fields in self.entries() for event in read_entry(fields, self.name)]

    def entries(self) -> list[dict[bytes, bytes]]:
        """The journal as stored."""
        return [fields for _, fields in self.redis.xrange(self.key("events"))]

    def journal_events(self) -> list[tuple[str, str | None]]:
        """The journal as (verb, job), without the queue's creation."""
        return [(event.verb, event.job) for event in self.events() if event.verb != "created"]

    def close(self) -> None:
        for worker in self.workers:
            worker.consumer.close()
        self.link.close()
        self.redis.close()


class HandWorker:
    """A worker that takes a step only when the test does."""

    def __init__(self, queue: OneQueue, name: str, processor: str, lane: str = "main") -> None:
        self.name = name
        self.processor = processor
        self.number = 0
        self.fence = ""
        self._queue = queue
        self.lane = lane
        self.consumer = Consumer(queue.url, DEFAULT_PREFIX, queue.name, processor, name, lane)
        self.processing = processing_key(queue.base, processor, name)
        queue.workers.append(self)

    def turn(
        self,
        want: int = 0,
        done: str = "",
        failed: str = "",
        keep: int = 0,
        fence: str | None = None,
        kind: str = "",
        error: str = NO,
        results: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Takes one turn; returns the claimed ids. `done`, `failed`: ids, one letter each. `results`: by id."""
        jobs = self.whole_turn(want, done, failed, keep, fence, kind, error, results).jobs
        return [job_id.decode() for job_id in jobs[::2]]

    def whole_turn(
        self,
        want: int = 0,
        done: str = "",
        failed: str = "",
        keep: int = 0,
        fence: str | None = None,
        kind: str = "",
        error: str = NO,
        results: Mapping[str, str] | None = None,
    ) -> Turn:
        self.number += 1
        by = self.fence if fence is None else fence
        succeeded: Settled = [part for job_id in done for part in (job_id, by, 7)]
        gave_up: Settled = [
            part for job_id in failed for part in (job_id, by, 7, error, error, kind or "retriable", "", "0.5")
        ]
        encoded: Results = []
        for job_id, result in (results or {}).items():
            encoded += (done.index(job_id) + 1, result.encode())
        turn = self.consumer.turn(self.number, succeeded, gave_up, keep, want, encoded)
        self.fence = turn.fence or self.fence
        return turn

    def position(self, index: int, *, running: bool) -> Position:
        return Position(self.name, self.number, index, running)

    def block(self) -> str | None:
        """Does what a served BLMOVE does, even on a connection that is no longer read."""
        source = self._queue.key("pending" if self.lane == "main" else "failed")
        moved = self._queue.redis.lmove(source, self.processing, "LEFT", "RIGHT")
        return None if moved is None else moved.decode()

    def held(self) -> list[str]:
        return [job_id.decode() for job_id in self._queue.redis.lrange(self.processing, 0, -1)]


@contextmanager
def one_queue(url: str, name: str = "q", mode: str = "work", **options: int) -> Iterator[OneQueue]:
    queue = OneQueue(url, name, mode, **options)
    try:
        yield queue
    finally:
        queue.close()
