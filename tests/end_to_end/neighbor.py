"""Measures the jobs of a queue, 5 ms each, beside a queue that misbehaves."""

import time
from collections.abc import Callable

from tests.support.drive.supervisor import HANDLERS, Forq
from tests.support.drive.wait import wait_until

EVERY_SECONDS = 0.02
NAME = "calm"


class Neighbor:
    """Enqueues a job of 5 ms every 20 ms; records the time from enqueue to end."""

    def __init__(self, forq: Forq) -> None:
        forq.ctl("create", NAME, "--handler", "greedy:brief", "--path", str(HANDLERS))
        self._forq = forq
        self._queue = forq.client().queue(NAME)
        self._number = 0

    def run(self, until: Callable[[], bool]) -> list[float]:
        """The times (ms), sorted."""
        began: dict[str, float] = {}
        look_at = 0.0
        while True:
            now = time.monotonic()
            if now >= look_at:
                if until():
                    break
                look_at = now + 0.25
            self._number += 1
            began[f"c{self._number}"] = time.monotonic()
            self._queue.enqueue(None, id=f"c{self._number}")
            time.sleep(EVERY_SECONDS)
        wait_until(lambda: began.keys() <= self._ended().keys(), what="all of them ended")
        ended = self._ended()
        return sorted((ended[job] - at) * 1000 for job, at in began.items())

    def _ended(self) -> dict[str, float]:
        return {trace.job: trace.time for trace in self._forq.traces("end") if trace.queue == NAME}


def shown(times: list[float]) -> str:
    p50, p99 = (times[int(len(times) * part)] for part in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {times[-1]:.1f} ms of {len(times)} jobs"
