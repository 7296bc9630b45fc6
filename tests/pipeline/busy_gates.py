"""A queue in a release mode with random operations of all kinds, to get histories of the real scripts."""

import random

from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.leases import Lease
from forq.errors import ForqError
from tests.pipeline.busy_queues import revive_or_discard_one
from tests.support.drive.release_queue import ReleaseQueue


class BusyGate:
    def __init__(self, url: str, mode: str, seed: int, *, name: str = "", **options: int) -> None:
        usual = {"item_timeout_ms": 50, "lease_ms": 20, "dead_max": 5, "journal_max": 1 << 30}
        self.queue = ReleaseQueue(url, mode, name=name or mode, **usual | options)
        self._dead = DeadJobs(self.queue.link, DEFAULT_PREFIX, self.queue.name)
        self._chance = random.Random(seed)
        self._leases: dict[str, Lease] = {}

    def run(self, steps: int) -> None:
        actions = [self.enqueue] * 3 + [self.attempt] * 6 + [self.ask] * 6 + [self.ack] * 4
        actions += [self.leave, self.remove_or_cancel, self.beat, self.revive_or_discard]
        for _ in range(steps):
            self._chance.choice(actions)()

    def enqueue(self) -> None:
        chance = self._chance
        jobs = [
            new_job(1, id=self._id(), priority=chance.choice((5, 5, 2)), run_in=chance.choice((None, None, 0.01, 60)))
            for _ in range(chance.randint(1, 5))
        ]
        self.queue.producer.enqueue(jobs, Update(chance.choice(("update", "skip"))))

    def attempt(self) -> None:
        if self.queue.mode == "auto_release":
            self.queue.attempt(self._chance.choice(("main", "main", "retry")))

    def ask(self) -> None:
        awaiter = f"a{self._chance.randrange(12)}"
        try:
            lease = self.queue.ask(awaiter, self._chance.choice((None, None, self._id())))
        except ForqError:
            return  # it has acknowledged an item not long ago
        if lease is not None:
            self._leases[awaiter] = lease

    def ack(self) -> None:
        for awaiter, lease in list(self._leases.items())[:1]:
            for _ in range(self._chance.choice((1, 2))):
                try:
                    self.queue.ack(awaiter, lease)
                except ForqError:
                    break
            self._leases.pop(awaiter)
            self.queue.redis.delete(self.queue.key(f"awaiter:{awaiter}"))

    def leave(self) -> None:
        awaiter = f"a{self._chance.randrange(12)}"
        self._leases.pop(awaiter, None)
        self.queue.leases.leave(awaiter)

    def remove_or_cancel(self) -> None:
        (self.queue.producer.remove if self._chance.random() < 0.5 else self.queue.producer.cancel)(self._id())

    def beat(self) -> None:
        self.queue.registry.pause(self.queue.name, paused=True)
        self.queue.registry.pause(self.queue.name, paused=False)
        self.queue.promote()
        self.queue.recovery().heartbeat(self.queue.name, 600_000, [])

    def revive_or_discard(self) -> None:
        revive_or_discard_one(self._dead, self._chance)

    def close(self) -> None:
        self.queue.close()

    def _id(self) -> str:
        return f"i{self._chance.randrange(20)}"
