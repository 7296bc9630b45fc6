"""A queue with schedules, driven by hand: time passes by moving the next tick back."""

from collections.abc import Sequence
from typing import Any

from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.schedules import DueTick, Schedules, Ticker, due_ticks
from forq.broker.scripts import script
from forq.schedules import USER, Schedule
from tests.support.drive.one_queue import OneQueue
from tests.support.drive.redis_cluster import connect

HOUR_MS = 3_600_000


class ScheduleRig:
    def __init__(self, queue: OneQueue) -> None:
        self.queue = queue
        self.redis: Any = connect(queue.url, queue.base)
        self.schedules = Schedules(queue.link, DEFAULT_PREFIX, queue.name)
        # Makes the jitter of every job a quarter of the maximum.
        self.ticker = Ticker(queue.link, DEFAULT_PREFIX, lambda: 0.25)

    def set(self, key: str = "k", origin: str = USER, **given: Any) -> int:
        """Sets a schedule, hourly by default; returns its next tick."""
        fields = given if "every" in given or "cron" in given else {"every": "1h", **given}
        return self.schedules.set(Schedule.from_mapping(key, fields, origin))

    def next_ms(self, key: str = "k") -> int | None:
        score = self.redis.zscore(self.queue.key("schedules:next"), key)
        return None if score is None else int(score)

    def pass_time(self, ms: int, key: str = "k") -> int:
        """Moves the next tick back by `ms` and returns it."""
        return int(self.redis.zincrby(self.queue.key("schedules:next"), -ms, key))

    def counts(self, key: str = "k") -> tuple[int, int, int]:
        """Runs, skipped, missed."""
        counted = self.redis.hget(self.queue.key("schedules:runs"), key) or b"0 0 0 0"
        _, runs, skipped, missed = map(int, counted.split())
        return runs, skipped, missed

    def promote(self) -> int | None:
        return self.queue.recovery().promote(self.queue.name)

    def due(self, link: Link | None = None, refused: Sequence[str] = ()) -> tuple[list[DueTick], int]:
        """What promote reports to a caller that cannot fire `refused`, and the server's time."""
        reply = (link or self.queue.link).run(script("promote"), self.queue.base, *refused)
        return due_ticks(reply), int(reply[2])

    def fire(self, due: DueTick, now_ms: int) -> bool:
        return self.ticker.fire(self.queue.name, due, now_ms)[0]

    def waiting(self) -> list[str]:
        return self.queue.pending()

    def close(self) -> None:
        self.redis.close()
