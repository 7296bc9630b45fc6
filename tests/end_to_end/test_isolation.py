"""Isolation: a queue whose jobs fork, leak and print without end, next to one with jobs of 5 ms.

A short run; `make isolation` prints a gigabyte and goes on for longer.
"""

import json
import os
import time
from collections.abc import Callable

import pytest

from tests.support.running import HANDLERS, Forq, alive, running, wait_until

ROUNDS = int(os.environ.get("FORQ_TEST_ISOLATION_ROUNDS", "1"))
FLOOD_MB = int(os.environ.get("FORQ_TEST_FLOOD_MB", "50"))
CALM_SECONDS = 2.0 + ROUNDS
EVERY_SECONDS = 0.02
# What one job of the neighbour may take at most in 99 of 100 cases, on a machine whose CPUs are all taken.
SLOW_MS = 500.0

pytestmark = pytest.mark.timeout(900)


class Neighbour:
    """Enqueues a job of 5 ms every 20 ms; knows how long each took from its enqueue to its end."""

    def __init__(self, forq: Forq) -> None:
        self._forq = forq
        self._queue = forq.client().queue("calm")
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
        return {trace.job: trace.time for trace in self._forq.traces("end") if trace.queue == "calm"}


def shown(times: list[float]) -> str:
    p50, p99 = (times[int(len(times) * part)] for part in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {times[-1]:.1f} ms of {len(times)} jobs"


def create(forq: Forq, name: str, function: str, *settings: str) -> None:
    options = [f"--set={setting}" for setting in settings]
    forq.ctl("create", name, "--handler", f"greedy:{function}", "--path", str(HANDLERS), *options)


def test_a_queue_that_runs_wild_does_not_hold_up_its_neighbour() -> None:
    with running() as forq:
        create(forq, "calm", "brief")
        create(forq, "wild", "wild", "memory_limit=150mb", "pids_limit=40", "nice=15", "max_stalls=0", "timeout=5m")
        neighbour = Neighbour(forq)
        calm_until = time.monotonic() + CALM_SECONDS
        before = neighbour.run(lambda: time.monotonic() > calm_until)
        wild = forq.client().queue("wild")
        for number in range(ROUNDS):
            wild.enqueue({"do": "bomb", "size": 8}, id=f"bomb{number}")
            wild.enqueue({"do": "leak", "size": 500}, id=f"leak{number}")
            wild.enqueue({"do": "flood", "size": FLOOD_MB}, id=f"flood{number}")
        began = time.monotonic()
        during = neighbour.run(lambda: wild.status()["processed"] >= ROUNDS and wild.status()["dead"] >= 2 * ROUNDS)
        seconds = time.monotonic() - began
        print(f"\nneighbour before: {shown(before)}")
        print(f"neighbour during: {shown(during)}")
        print(f"  {ROUNDS} fork bombs, leaks and floods of {FLOOD_MB} MB, in {seconds:.1f} s")
        for number in range(ROUNDS):
            for kind, cause in (("bomb", "pids"), ("leak", "oom")):
                (attempt,) = json.loads(forq.ctl("job", "wild", f"{kind}{number}", "--json"))["attempts"]
                print(f"  {kind}{number}: {attempt['cause']}, peak {attempt['peak_memory'] / 1e6:.0f} MB")
                assert attempt["cause"] == cause
        assert forq.child("calm")["restarts"] == 0
        bombs = {trace.pid for trace in forq.traces("start") if trace.job.startswith("bomb")}
        assert not alive(bombs)
        assert during[int(len(during) * 0.99)] < SLOW_MS
