"""Deploys under load: `restart` again and again while jobs arrive at a steady rate, some of them with broken code."""

import os
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.drive.handler_module import Module
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.thorough import examples

# The import takes long compared with any pause of a loaded machine: a queue that waited for it would show that gap.
IMPORT_SECONDS = 1.0
GOOD = f"import time\n\nfrom traced import sleep as handle\n\ntime.sleep({IMPORT_SECONDS})\n"
BROKEN = f"{GOOD}RATE = rat * 2\n"
JOB_SECONDS = 0.002


class Load(threading.Thread):
    """Enqueues jobs at a steady rate until it is stopped."""

    def __init__(self, forq: Forq, name: str, per_second: int) -> None:
        super().__init__()
        self.ids: list[str] = []
        self._queue = forq.client().queue(name)
        self._interval = 1 / per_second
        self._ended = threading.Event()

    def run(self) -> None:
        due = time.monotonic()
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            self.ids.append(self._queue.enqueue(JOB_SECONDS))
            due += self._interval

    def stop(self) -> list[str]:
        self._ended.set()
        self.join()
        return self.ids


def deploy(forq: Forq, module: Module, *, broken: bool) -> float:
    """Returns how long the command took."""
    module.write(BROKEN if broken else GOOD)
    began = time.monotonic()
    done = forq.run_ctl("restart", "shop")
    took = time.monotonic() - began
    if broken:
        assert done.returncode == 1
        assert "NameError: name 'rat' is not defined" in done.stderr
        assert "its old process keeps running" in done.stderr
    else:
        # stderr may say that the import goes on.
        assert done.returncode == 0, done.stderr
    return took


# A thread that leaves the interpreter to others five times a second: the process reads a signal late.
LATE = """
import sys, threading
sys.setswitchinterval(0.2)
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
def handle(data, job):
    return VERSION
"""


def test_a_job_that_is_enqueued_after_a_restart_runs_the_new_code(tmp_path: Path) -> None:
    module = Module(tmp_path, "shop")
    module.write(f"{LATE}VERSION = 0\n")
    with running() as forq:
        forq.ctl("create", "shop", *module.arguments(), "keep_done=1h")
        jobs = forq.client().queue("shop")
        for version in range(1, examples(3, 6)):
            module.write(f"{LATE}VERSION = {version}\n")
            forq.ctl("restart", "shop")
            assert jobs.wait(jobs.enqueue(1), 30) == version


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
def test_no_deploy_interrupts_or_delays_a_job(tmp_path: Path, processes: int) -> None:
    deploys = int(os.environ.get("FORQ_TEST_DEPLOYS", examples(4, 8)))
    per_second = int(os.environ.get("FORQ_TEST_PER_SECOND", "100"))
    broken = {deploys // 4, deploys // 2, deploys - 2}
    module = Module(tmp_path, "shop")
    module.write(GOOD)
    with running() as forq:
        forq.ctl("create", "shop", *module.arguments(), f"processes={processes}")
        load = Load(forq, "shop", per_second)
        load.start()
        try:
            wait_until(lambda: forq.queue_status("shop")["done"] > per_second // 2, what="jobs run")
            took = [deploy(forq, module, broken=number in broken) for number in range(deploys)]
        finally:
            ids = load.stop()
        wait_until(lambda: forq.queue_status("shop")["done"] == len(ids), what="all jobs are done")
        starts = forq.traces("start")
        ends = forq.traces("end")
        gap = max(later.time - earlier.time for earlier, later in pairwise(sorted(starts, key=lambda t: t.time)))
        processes_seen = len({trace.pid for trace in starts})
        print(
            f"{deploys} deploys ({len(broken)} broken), {len(ids)} jobs at {per_second}/s, {processes} processes: "
            f"interrupted {len(starts) - len(ends)}, lost {len(set(ids) - {t.job for t in ends})}, "
            f"longest gap without a start {gap * 1000:.0f} ms, longest deploy {max(took):.2f} s, "
            f"ran in {processes_seen} processes"
        )
        assert Counter(trace.job for trace in starts) == Counter(trace.job for trace in ends) == Counter(ids)
        assert not any(trace.stalls for trace in ends)
        assert processes_seen > deploys - len(broken), "each deploy that works brings new processes"
        assert gap < IMPORT_SECONDS
