"""A queue of mode external, driven by hand: messages that a bridge would pass on, and leases that run out."""

from collections.abc import Iterator
from contextlib import contextmanager

from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.leases import ExternalJobs, Failure, Lease
from forq.settings import stored_defaults
from tests.support.drive.one_queue import OneQueue

ERROR = b'{"name":"Oops","message":"no","kind":"retriable"}'


class ExternalQueue(OneQueue):
    """Leases end only when a test ends them."""

    def __init__(self, url: str, *, name: str = "q", **options: int) -> None:
        super().__init__(url, name, "external", **{"lease_ms": 600_000, "min_backoff_ms": 60_000, **options})
        self.external = ExternalJobs(self.link, DEFAULT_PREFIX, name)

    def create(self, **options: int) -> bool:
        return self.registry.create(self.name, self.mode, 100, stored_defaults("external"), options)

    def idle(self, worker: str = "w1", bridge: str = "b1") -> str | None:
        """Returns the id of the job that this worker was assigned, if any."""
        lease = self.lease(worker, bridge)
        return None if lease is None else lease.job_id

    def lease(self, worker: str = "w1", bridge: str = "b1") -> Lease | None:
        return self.external.idle(worker, bridge).lease

    def fetch_assigned(self, worker: str = "w1", bridge: str = "b1") -> str | None:
        lease = self.external.fetch_assigned(worker, bridge).lease
        return None if lease is None else lease.job_id

    def work(self, worker: str = "w1") -> str:
        """Has a worker assigned a job, and accepts it."""
        job_id = self.idle(worker)
        assert job_id is not None, f"{worker} was assigned nothing"
        self.external.accept(worker, job_id)
        return job_id

    def fail(self, job_id: str, worker: str = "w1", kind: str = "retriable", retry_at_ms: int | None = None) -> None:
        self.external.fail(worker, job_id, Failure(ERROR, ERROR, kind, retry_at_ms, 0.5))

    def end_leases(self, *ids: str) -> None:
        """Ends the leases of these jobs, one after the other."""
        self.make_due("leases", *ids)
        self.promote()

    def make_due(self, timers: str, *ids: str) -> None:
        now_ms = self.redis.time()[0] * 1000 - 60_000
        for number, job_id in enumerate(ids):
            assert self.redis.zscore(self.key(timers), job_id) is not None, f"{job_id} has no time in {timers}"
            self.redis.zadd(self.key(timers), {job_id: now_ms + number})
        self.change_summary(first_due_ms=1)

    def make_silent(self, worker: str) -> None:
        """Makes the worker's last message older than a lease."""
        assert self.redis.zscore(self.key("workers"), worker) is not None
        self.redis.zadd(self.key("workers"), {worker: 1})

    def promote(self) -> int | None:
        return self.recovery().promote(self.name)

    def states(self) -> dict[str, str]:
        """The state of each worker."""
        return {row["worker_uuid"]: row["state"] for row in self.external.workers()}

    def traces(self) -> dict[str, int]:
        """The sizes of the keys of mode external; empty while no job is assigned."""
        counts = {
            "leases": self.redis.zcard(self.key("leases")),
            "accepted": self.redis.zcard(self.key("accepted")),
            "progress": self.redis.hlen(self.key("progress")),
            "active": self.redis.hlen(self.key("active")),
        }
        return {name: count for name, count in counts.items() if count}


@contextmanager
def external_queue(url: str, *, name: str = "q", **options: int) -> Iterator[ExternalQueue]:
    queue = ExternalQueue(url, name=name, **options)
    try:
        yield queue
    finally:
        queue.close()
