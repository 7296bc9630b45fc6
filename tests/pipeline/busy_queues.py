"""A queue with a fail handler and random operations of all kinds, to get histories of the real scripts."""

import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forq.batch import open_batch
from forq.broker.claim import Consumer, Settled
from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Producer, Update, new_job
from forq.broker.keys import DEFAULT_PREFIX, fail_queue
from forq.broker.link import Link
from forq.broker.recovery import Outcome, Position, WorkerRecovery
from forq.broker.registry import Registry
from forq.errors import ForqError, UnknownDependency
from forq.settings import stored_defaults

EXPIRY_MS = 600_000
OUTCOMES: tuple[Outcome, ...] = ("stalled", "timed_out", "interrupted", "suspect", "cancelled")
KINDS = ("retriable", "retriable", "permanent", "timeout", "snooze")
OPTIONS = ("", "", "", "r=0", "r=1,b=1:5", "x=1", "t=1000,k=5000,x=60000")
# Updates that reset the counts of a job, and some that do not.
UPDATES = (Update(), Update(), Update(reset_counts=False), Update(update_data=False), Update("skip"))


def revive_or_discard_one(dead: DeadJobs, chance: random.Random) -> None:
    for job in dead.page(1).jobs:
        act = dead.retry if chance.random() < 0.5 else dead.discard
        # A live job may have its id, or the queue be full.
        with suppress(ForqError):
            act(f"{job['id']}@{job['fence']}")


@dataclass
class BusyWorker:
    """A worker and the jobs that it holds, with their fence."""

    consumer: Consumer
    number: int = 0
    held: list[str] = field(default_factory=list)
    fence: str = ""


class BusyQueue:
    """`ids`: number of job ids; few ids make updates and blocked jobs likely. `failures`: share of failing jobs."""

    def __init__(self, url: str, name: str, seed: int, *, ids: int = 30, batch: int = 8, failures: float = 0.3) -> None:
        self.name = name
        self._url = url
        self._chance = random.Random(seed)
        self._ids = ids
        self._batch = batch
        self._failures = failures
        self._link = Link(url)
        self._registry = Registry(self._link, DEFAULT_PREFIX)
        self._producer = Producer(self._link, DEFAULT_PREFIX, name)
        self._dead = DeadJobs(self._link, DEFAULT_PREFIX, name)
        self._recovery = WorkerRecovery(self._link, DEFAULT_PREFIX, "p1")
        self._workers = 0
        self.create()

    def create(self) -> None:
        options: dict[str, Any] = {
            "fail_handler": 1, "max_retries": 1, "min_backoff_ms": 1, "max_backoff_ms": 2, "retry_lane_retries": 1,
            "max_stalls": 1, "max_timeouts": 1, "dead_max": 5, "journal_max": 1 << 30,
        }  # fmt: skip
        fail_options = {"max_retries": 1, "min_backoff_ms": 1, "max_backoff_ms": 2, "journal_max": 1 << 30}
        self._registry.create(self.name, "work", 100, stored_defaults(), options, fail_options=fail_options)
        self._busy_workers = [self._busy_worker(self.name, lane) for lane in ("main", "main", "main", "retry")]
        self._busy_workers.append(self._busy_worker(fail_queue(self.name), "retry"))

    def _busy_worker(self, queue: str, lane: str) -> BusyWorker:
        self._workers += 1
        consumer = Consumer(self._url, DEFAULT_PREFIX, queue, "p1", f"w{self._workers}", lane)
        consumer.join(EXPIRY_MS)
        return BusyWorker(consumer)

    def run(self, steps: int) -> None:
        actions = (
            [self.enqueue] * 5
            + [self.enqueue_held] * 2
            + [self.use_a_batch]
            + [self.turn] * 12
            + [self.lose, self.remove_or_cancel, self.beat, self.revive_or_discard, self.rescue]
        )
        for _ in range(steps):
            self._chance.choice(actions)()

    def enqueue(self) -> None:
        chance = self._chance
        jobs = [
            new_job(
                {"n": 1},
                id=f"j{number}",
                run_in=chance.choice((None, None, None, 0.002, 60)),
                options=chance.choice(OPTIONS),
            )
            for number in chance.sample(range(self._ids), chance.randint(1, min(self._batch, self._ids)))
        ]
        self._producer.enqueue(jobs, chance.choice(UPDATES))

    def enqueue_held(self) -> None:
        """Stores some jobs in one call; each waits for some of the others, or for earlier ones."""
        chance = self._chance
        ids = [f"j{number}" for number in chance.sample(range(self._ids), min(self._ids, chance.randint(2, 5)))]
        jobs = [
            new_job(
                {"n": 1},
                id=job,
                after=chance.sample(ids[:at], chance.randint(1, min(2, at))) if at else (),
                when=chance.choice(("done", "ended", "dead")) if at else "done",
                run_in=chance.choice((None, None, 0.002)),
                options=chance.choice(OPTIONS),
            )
            for at, job in enumerate(ids)
        ]
        # Those that exist stay as they are, and the others wait for them. The first may be unknown.
        with suppress(UnknownDependency):
            self._producer.enqueue(jobs[chance.randint(0, 1) :], Update("skip"))

    def use_a_batch(self) -> None:
        """A batch with some callbacks and members, which may be cancelled."""
        chance = self._chance
        callbacks = {name: new_job({}) if chance.random() < 0.7 else None for name in ("on_done", "on_end", "on_dead")}
        batch = open_batch(lambda: self._link, DEFAULT_PREFIX, self.name, None, callbacks=callbacks, results=False)
        for _ in range(chance.randint(0, 3)):
            batch.enqueue(self.name, {"n": 1}, options=chance.choice(OPTIONS))
        batch.seal()
        if chance.random() < 0.2:
            batch.cancel()

    def turn(self) -> None:
        """Settles some held jobs in order, returns the rest, and claims more."""
        worker = self._chance.choice(self._busy_workers)
        ran = worker.held[: self._chance.randint(0, len(worker.held))]
        done: Settled = []
        failed: Settled = []
        for job in ran:
            if self._chance.random() >= self._failures:
                done += (job, worker.fence, 7)
            else:
                error = '{"name":"E","message":"no","kind":"retriable","traceback":null}'
                failed += (job, worker.fence, 7, error, error, self._chance.choice(KINDS), "", "0.5")
        worker.number += 1
        turn = worker.consumer.turn(worker.number, done, failed, 0, self._chance.randint(0, self._batch))
        worker.held = [job.decode() for job in turn.jobs[::2]]
        worker.fence = turn.fence or worker.fence

    def lose(self) -> None:
        """A worker dies at any position of its batch, and another one replaces it."""
        at = self._chance.randrange(len(self._busy_workers))
        worker = self._busy_workers[at]
        index = self._chance.randint(0, max(0, len(worker.held) - 1))
        position = Position(worker.consumer.worker, worker.number, index, bool(worker.held))
        outcome = self._chance.choice(OUTCOMES)
        queue = worker.consumer.queue
        for _ in range(2):
            self._recovery.recover(queue, "p1", position, outcome=outcome, cause="signal 9")
        worker.consumer.close()
        self._busy_workers[at] = self._busy_worker(queue, "retry" if at >= 3 else "main")

    def rescue(self) -> None:
        worker = self._busy_workers[0]
        if len(worker.held) > 1:
            self._recovery.rescue(self.name, Position(worker.consumer.worker, worker.number, 0, True))
            worker.held = worker.held[:1]

    def remove_or_cancel(self) -> None:
        job = f"j{self._chance.randrange(self._ids)}"
        (self._producer.remove if self._chance.random() < 0.5 else self._producer.cancel)(job)

    def beat(self) -> None:
        self._registry.pause(self.name, paused=True)
        self._registry.pause(self.name, paused=False)
        for queue in (self.name, fail_queue(self.name)):
            self._recovery.promote(queue)
            self._recovery.heartbeat(queue, EXPIRY_MS, [])

    def revive_or_discard(self) -> None:
        revive_or_discard_one(self._dead, self._chance)

    def delete(self) -> None:
        self._registry.delete(self.name, force=True)
        while self._registry.purge(self.name, lambda dropped: None):
            pass
        for worker in self._busy_workers:
            worker.consumer.close()

    def close(self) -> None:
        for worker in self._busy_workers:
            worker.consumer.close()
        self._link.close()
