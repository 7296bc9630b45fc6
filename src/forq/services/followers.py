"""The verb `logs`: those who read the output of a queue through the control socket, and those who wait for more.

The files are looked at every 0.2 s while somebody waits, and not at all while nobody does.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forq.errors import ForqError, UsageError
from forq.output.files import OutputReader
from forq.services.desk import Later
from forq.values import check_job_id, check_queue_name, shown

LOOK_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0
DEFAULT_TAIL = 100
MAX_TAIL = 1_000_000

log = logging.getLogger("forq")


@dataclass(eq=False)
class Follower:
    queue: str
    cursor: str
    job: str | None
    until: float
    later: Later = field(default_factory=Later)


class Followers:
    def __init__(self, logs_dir: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self._reader = OutputReader(logs_dir)
        self._now = now
        self._followers: list[Follower] = []
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._followers)

    def logs(self, params: dict[str, Any]) -> object:
        """The verb: records behind `cursor`; if there are none, once there are some, or after `wait` seconds."""
        queue, job = check_queue_name(params.get("name")), params.get("job")
        if job is not None:
            check_job_id(job)
        wait_seconds = _number(params.get("wait"), "wait", LONGEST_WAIT_SECONDS) or 0.0
        tail = _number(params.get("lines"), "lines", MAX_TAIL)
        answer = self._reader.read(
            queue, params.get("cursor"), tail=DEFAULT_TAIL if tail is None else int(tail), job=job
        )
        if answer["records"] or answer["more"] or answer["skipped"] or wait_seconds <= 0:
            return answer
        one = Follower(queue, answer["cursor"], job, self._now() + wait_seconds)
        if not self._followers:
            self._look_at = self._now() + LOOK_SECONDS
        self._followers.append(one)
        return one.later

    def tick(self) -> float | None:
        """Answers those for whom something has come, or who have waited long enough; how long nothing is due then."""
        now = self._now()
        if self._followers and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for one in list(self._followers):
                answer = self._look(one, now)
                if answer is not None:
                    self._followers.remove(one)
                    one.later.answer(answer)
        return max(0.0, self._look_at - self._now()) if self._followers else None

    def _look(self, one: Follower, now: float) -> object:
        try:
            if not self._reader.is_behind(one.queue, one.cursor) and now < one.until:
                return None
            answer = self._reader.read(one.queue, one.cursor, tail=0, job=one.job)
        except ForqError as exc:
            return exc
        except Exception as exc:  # a fault of ours must not end the clerk: all others would lose theirs too
            log.exception("cannot read the output queue=%s", one.queue)
            return ForqError(f"internal error: {type(exc).__name__}: {exc}")
        if answer["records"] or answer["more"] or answer["skipped"] or now >= one.until:
            return answer
        one.cursor = answer["cursor"]
        return None


def _number(value: object, what: str, most: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise UsageError(f"{what} {shown(value)} is not allowed: a number from 0 on")
    return min(float(value), most)
