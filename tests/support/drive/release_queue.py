"""A queue of the release modes, driven by hand: tries without waiting for the gate, awaiters, timers that run out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forq.broker.claim import Consumer, ReleaseReply
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.leases import Lease, Leases
from tests.support.drive.one_queue import OneQueue

# Defaults of the tests: short tries, and leases that end only when a test ends them.
OPTIONS = {
    "release_interval_ms": 60_000,
    "release_retries": 2,
    "retry_interval_ms": 0,
    "retry_lane_retries": 1,
    "lease_ms": 600_000,
    "item_timeout_ms": 0,
}


class ReleaseQueue(OneQueue):
    """A queue of mode auto_release or on_request."""

    def __init__(self, url: str, mode: str, *, name: str = "q", **options: int) -> None:
        super().__init__(url, name, mode, **{**OPTIONS, **options})
        self.leases = Leases(self.link, DEFAULT_PREFIX, name)
        self._consumers: dict[str, Consumer] = {}

    def ask(self, awaiter: str, job_id: str | None = None, *, register: bool = True, **how: Any) -> Lease | None:
        return self.leases.request(awaiter, job_id, mode=self.mode, register=register, **how).lease

    def got(self, awaiter: str, job_id: str | None = None) -> str | None:
        """The id of the item that this awaiter was handed, if any."""
        lease = self.ask(awaiter, job_id)
        return None if lease is None else lease.job_id

    def ack(self, awaiter: str, lease: Lease | None) -> None:
        assert lease is not None, f"{awaiter} was handed nothing"
        self.leases.ack(awaiter, lease.job_id, lease.fence)

    def release(self, lane: str = "main", processor: str = "p1") -> ReleaseReply:
        """Makes one release call at a closed or open gate."""
        name = f"{lane}-{processor}"
        if name not in self._consumers:
            self._consumers[name] = self.worker(name, processor, lane).consumer
        return self._consumers[name].release()

    def open_gate(self) -> None:
        self.redis.hdel(self.key("counts"), "gate_us")

    def attempt(self, lane: str = "main") -> ReleaseReply:
        """Makes one try at an open gate."""
        self.open_gate()
        return self.release(lane)

    def make_due(self, timers: str, *ids: str) -> None:
        """Makes the timers (leases, expiries, scheduled) of these ids due, one after the other."""
        now_ms = self.redis.time()[0] * 1000 - 60_000
        for number, job_id in enumerate(ids):
            assert self.redis.zscore(self.key(timers), job_id) is not None, f"{job_id} has no time in {timers}"
            self.redis.zadd(self.key(timers), {job_id: now_ms + number})
        self.change_summary(first_due_ms=1)

    def promote(self) -> int | None:
        return self.recovery().promote(self.name)

    def let_expire(self, awaiter: str) -> None:
        """Lets its registration run out without a renewal."""
        entry = self.hash("awaiters")[awaiter].split(" ", 1)
        self.redis.hset(self.key("awaiters"), awaiter, f"1 {entry[1]}")

    def list_of(self, awaiter: str) -> list[str]:
        return [entry.decode().partition("\n")[0] for entry in self.redis.lrange(self.key(f"awaiter:{awaiter}"), 0, -1)]


@contextmanager
def gate(url: str, mode: str, **options: int) -> Iterator[ReleaseQueue]:
    queue = ReleaseQueue(url, mode, name="q", **options)
    try:
        yield queue
    finally:
        queue.close()
