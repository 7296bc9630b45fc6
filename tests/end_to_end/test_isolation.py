"""Isolation: a queue whose jobs fork, leak and print without end, beside one with jobs of 5 ms.

A short run; `make isolation` prints a gigabyte and runs longer.
"""

import json
import os
import time

import pytest

from tests.end_to_end.neighbor import Neighbor, shown
from tests.support.drive.processes import alive
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.thorough import only_in_test_all

ROUNDS = int(os.environ.get("FORQ_TEST_ISOLATION_ROUNDS", "1"))
FLOOD_MB = int(os.environ.get("FORQ_TEST_FLOOD_MB", "50"))
CALM_SECONDS = 2.0 + ROUNDS
# The p99 limit for one job of the neighbor on a machine with no idle CPU.
SLOW_MS = 500.0

pytestmark = pytest.mark.timeout(900)


def create(forq: Forq, name: str, function: str, *settings: str) -> None:
    options = [f"--set={setting}" for setting in settings]
    forq.ctl("create", name, "--handler", f"greedy:{function}", "--path", str(HANDLERS), *options)


@only_in_test_all
def test_a_misbehaving_queue_does_not_delay_its_neighbor() -> None:
    with running() as forq:
        create(forq, "wild", "wild", "memory_limit=150mb", "pids_limit=40", "nice=15", "max_stalls=0", "timeout=5m")
        neighbor = Neighbor(forq)
        calm_until = time.monotonic() + CALM_SECONDS
        before = neighbor.run(lambda: time.monotonic() > calm_until)
        wild = forq.client().queue("wild")
        for number in range(ROUNDS):
            wild.enqueue({"do": "bomb", "size": 8}, id=f"bomb{number}")
            wild.enqueue({"do": "leak", "size": 500}, id=f"leak{number}")
            wild.enqueue({"do": "flood", "size": FLOOD_MB}, id=f"flood{number}")
        began = time.monotonic()
        during = neighbor.run(lambda: wild.status()["done"] >= ROUNDS and wild.status()["dead"] >= 2 * ROUNDS)
        seconds = time.monotonic() - began
        print(f"\nneighbor before: {shown(before)}")
        print(f"neighbor during: {shown(during)}")
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
