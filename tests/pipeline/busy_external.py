"""A queue of mode external with random operations of all kinds, to get histories of the real scripts."""

import random

from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.errors import LeaseLapsed
from tests.pipeline.busy_queues import revive_or_discard_one
from tests.support.drive.external_queue import ExternalQueue


class BusyExternal:
    def __init__(self, url: str, name: str, seed: int) -> None:
        options = {"max_stalls": 1, "max_retries": 1, "retry_lane_retries": 1, "min_backoff_ms": 5, "dead_max": 5}
        self.queue = ExternalQueue(url, name=name, lease_ms=20, journal_max=1 << 30, **options)
        self._dead = DeadJobs(self.queue.link, DEFAULT_PREFIX, name)
        self._chance = random.Random(seed)

    def run(self, steps: int) -> None:
        actions = [self.enqueue] * 3 + [self.ask] * 8 + [self.accept] * 6 + [self.end] * 6
        actions += [self.leave, self.remove_or_cancel, self.beat, self.revive_or_discard, self.fall_silent]
        for _ in range(steps):
            try:
                self._chance.choice(actions)()
            except LeaseLapsed:
                continue

    def enqueue(self) -> None:
        chance = self._chance
        jobs = [
            new_job(1, id=self._id(), priority=chance.choice((5, 5, 2)), run_in=chance.choice((None, None, 0.01)))
            for _ in range(chance.randint(1, 5))
        ]
        self.queue.producer.enqueue(jobs, Update(chance.choice(("update", "skip"))))

    def ask(self) -> None:
        ask = self.queue.external.idle if self._chance.random() < 0.6 else self.queue.external.fetch_assigned
        ask(self._worker(), self._chance.choice(("b1", "b2")))

    def accept(self) -> None:
        for job_id, worker in self._held():
            if self._chance.random() < 0.5:
                self.queue.external.accept(worker, job_id)
            else:
                self.queue.external.progress(worker, job_id, self._chance.random(), "on it")

    def end(self) -> None:
        for job_id, worker in self._held():
            for _ in range(self._chance.choice((1, 2))):
                if self._chance.random() < 0.6:
                    self.queue.external.finish(worker, job_id)
                else:
                    self.queue.fail(job_id, worker, self._chance.choice(("retriable", "retriable", "permanent")))

    def leave(self) -> None:
        self.queue.external.leave(self._worker(), self._chance.choice(("b1", "b2")))

    def fall_silent(self) -> None:
        """The holder of a job is silent for a whole lease."""
        for job_id in sorted(self.queue.hash("active"))[:1]:
            self.queue.end_leases(job_id)

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

    def _held(self) -> list[tuple[str, str]]:
        """One of the jobs that some worker has, and now and then one that it has not."""
        owners = self.queue.hash("active")
        if not owners or self._chance.random() < 0.05:
            return [(self._id(), self._worker())]
        job_id = self._chance.choice(sorted(owners))
        return [(job_id, owners[job_id].split(":")[0])]

    def _worker(self) -> str:
        return f"w{self._chance.randrange(6)}"

    def _id(self) -> str:
        return f"i{self._chance.randrange(20)}"
