"""Sets a queue's limits, reads which workers wait for them, and receives what is published for pulse."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forq.broker.keys import wake_key
from tests.support.drive.one_queue import HandWorker, OneQueue
from tests.support.models.limits import BURST

HOUR_MS = 3_600_000


def limited(queue: OneQueue) -> list[str]:
    return [member.decode() for member in queue.redis.zrange(queue.key("limited"), 0, -1)]


def wakes(queue: OneQueue, worker: HandWorker) -> int:
    return int(queue.redis.llen(wake_key(queue.base, worker.processor, worker.name)))


def set_rate(queue: OneQueue, count: int, period_ms: int, burst: int) -> None:
    queue.registry.configure(queue.name, {"rate_count": count, "rate_ms": period_ms, "burst": burst}, {})


def tokens(queue: OneQueue) -> int:
    limits = queue.inspector.counts().limits
    assert limits is not None
    return int(limits["may_begin"])


def fill_bucket(queue: OneQueue) -> None:
    queue.redis.hset(queue.key("counts"), "bucket_us", 0)


def stored_limits(max_active: int, rate: bool) -> dict[str, int]:
    """In the form of the model."""
    return {"max_active": max_active, "rate_count": int(rate), "rate_ms": HOUR_MS, "burst": BURST}


def pass_hours(queue: OneQueue, hours: int) -> None:
    bucket_us = float(queue.redis.hget(queue.key("counts"), "bucket_us") or 0)
    if bucket_us:
        queue.redis.hset(queue.key("counts"), "bucket_us", f"{bucket_us - hours * HOUR_MS * 1000:.1f}")


class DueMessages:
    """Messages published for pulse."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub = pubsub

    def delays(self) -> list[int]:
        """Messages since the last call. A script publishes before it returns, so none is missed."""
        return [int(message) for message in self.messages()]

    def messages(self) -> list[str]:
        found = []
        while (message := self._pubsub.get_message(timeout=0.05)) is not None:
            found.append(message["data"].decode())
        return found


@contextmanager
def subscription(queue: OneQueue) -> Iterator[DueMessages]:
    pubsub = queue.redis.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(queue.channel("due"))
    pubsub.get_message(timeout=1)
    try:
        yield DueMessages(pubsub)
    finally:
        pubsub.close()
