"""Suspects run alone in a process, several in parallel; fail jobs wait neither for them nor for the retry lane."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.drive.processes import alive
from tests.support.drive.supervisor import HANDLERS, Forq, Trace, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def starts(forq: Forq, queue: str) -> list[Trace]:
    return [trace for trace in forq.traces("start") if trace.queue == queue]


def runs(forq: Forq, queue: str) -> list[tuple[Trace, float]]:
    """Each ended attempt: its start, and the time of its end."""
    ends = {(trace.job, trace.fence): trace.time for trace in forq.traces("end") if trace.queue == queue}
    return [(start, ends[start.job, start.fence]) for start in starts(forq, queue) if (start.job, start.fence) in ends]


def helpers(forq: Forq, queue: str, role: str = "suspect") -> list[dict[str, Any]]:
    return [child for child in forq.queue_status(queue)["children"] if child["role"] == role]


def kill_main(forq: Forq, queue: str, jobs: int) -> None:
    """Kills it with -9 once it runs this many jobs."""
    wait_until(lambda: len(forq.child(queue)["jobs"]) == jobs, what=f"{jobs} jobs run in {queue}")
    os.kill(forq.child(queue)["pid"], signal.SIGKILL)


def test_suspects_run_in_parallel_each_alone_in_its_process(forq: Forq) -> None:
    forq.create("crowd", "sleep", concurrency=8)
    queue = forq.client().queue("crowd")
    ids = queue.enqueue_many([2.0] * 7)
    kill_main(forq, "crowd", 7)
    killed = time.monotonic()
    wait_until(lambda: len(runs(forq, "crowd")) == 7, 30.0, "all have run again")
    again = runs(forq, "crowd")
    assert {start.job for start, _ in again} == set(ids)
    assert len({start.pid for start, _ in again}) == 7, "each has its own process"
    assert max(start.time for start, _ in again) < min(end for _, end in again), "they run at the same time"
    assert max(end for _, end in again) - killed < 10.0, "one after the other they would take 14 s"
    assert all(start.stalls == 0 for start, _ in again)
    wait_until(lambda: not helpers(forq, "crowd"), what="the helpers have ended")
    assert [child["role"] for child in forq.queue_status("crowd")["children"]] == ["main", "retry"]
    forq.ctl("delete", "crowd")


def test_main_workers_continue_while_suspects_run(forq: Forq) -> None:
    forq.create("busy", "sleep", concurrency=3)
    queue = forq.client().queue("busy")
    queue.enqueue_many([3.0] * 3)
    kill_main(forq, "busy", 3)
    others = set(queue.enqueue_many([0.01] * 20))
    wait_until(lambda: others <= {start.job for start, _ in runs(forq, "busy")}, 10.0, "the others have run")
    wait_until(lambda: len(runs(forq, "busy")) == 23, 20.0, "the suspects have run")
    forq.ctl("delete", "busy")


@pytest.mark.parametrize("busy_with", ["lane", "suspect"])
def test_a_fail_job_does_not_wait_for_the_job_of_the_retry_process(forq: Forq, busy_with: str) -> None:
    name = f"fails-{busy_with}"
    options = ("--set=max_retries=0", "--set=retry_lane_retries=1", "--set=min_backoff=0", "--set=concurrency=2")
    handlers = ("--handler", "traced:act", "--fail-handler", "traced:on_fail_id", "--path", str(HANDLERS))
    forq.ctl("create", name, *handlers, *options)
    queue = forq.client().queue(name)
    if busy_with == "lane":
        queue.enqueue({"do": "retry", "seconds": 60}, id="long")
    else:
        queue.enqueue_many([{"do": "sleep", "seconds": 60}] * 2)
        kill_main(forq, name, 2)
    wait_until(lambda: forq.child(name, "retry")["state"] == "busy", what="the retry process is busy")
    for number in range(2):
        began = time.monotonic()
        queue.enqueue({"do": "refuse"}, id=f"bad{number}")
        wait_until(lambda n=number: is_handled(forq, name, f"bad{n}"), 15.0, "its fail handler has run")  # type: ignore[misc]
        assert time.monotonic() - began < 5.0
        assert forq.child(name, "retry")["state"] == "busy"
        wait_until(lambda: not helpers(forq, name, "fail"), what="the helper has ended")
    forq.ctl("delete", name, "--force")


def is_handled(forq: Forq, queue: str, job: str) -> bool:
    return any(t.queue == queue and t.event == f"failed={job}" for t in forq.traces())


@pytest.mark.parametrize("verb", ["restart", "delete", "stop"])
def test_helpers_end_with_their_queue(verb: str) -> None:
    with running(settings="capacity = 1000\n") as forq:
        forq.create("ends", "sleep", concurrency=3, stop_grace=0)
        queue = forq.client().queue("ends")
        queue.enqueue_many([60.0] * 3)
        kill_main(forq, "ends", 3)
        wait_until(lambda: sum(child["state"] == "busy" for child in helpers(forq, "ends")) == 2, what="helpers run")
        pids = {int(child["pid"]) for child in helpers(forq, "ends")}
        if verb == "restart":
            forq.ctl("restart", "ends")
        elif verb == "delete":
            forq.ctl("delete", "ends", "--force")
        else:
            assert forq.stop() == 0
        wait_until(lambda: not alive(pids), what="they are gone")
        if verb == "restart":
            # Interrupted, so not counted; the new processes run them.
            wait_until(lambda: len(starts(forq, "ends")) == 9, what="all three run again")
            assert all(start.stalls == 0 for start in starts(forq, "ends"))


def test_suspects_of_a_paused_queue_wait_and_run_in_parallel_when_it_is_resumed() -> None:
    """With heartbeats far apart: nothing waits for the next one."""
    with running(settings='capacity = 1000\nheartbeat = "60s"\nexpiry = "10m"\n') as forq:
        forq.create("later", "sleep", concurrency=4)
        queue = forq.client().queue("later")
        queue.enqueue_many([1.0] * 4)
        wait_until(lambda: len(forq.child("later")["jobs"]) == 4, what="all run")
        forq.ctl("pause", "later")
        os.kill(forq.child("later")["pid"], signal.SIGKILL)
        wait_until(lambda: forq.queue_status("later")["active"] == 0, what="they are recovered")
        assert not helpers(forq, "later")
        forq.ctl("resume", "later")
        wait_until(lambda: len(runs(forq, "later")) == 4, 20.0, "all have run again")
        assert len({start.pid for start, _ in runs(forq, "later")}) == 4


def test_suspects_are_found_even_if_pulse_dies_with_the_workers(forq: Forq) -> None:
    forq.create("deaf", "sleep", concurrency=4)
    queue = forq.client().queue("deaf")
    queue.enqueue_many([1.0] * 4)
    wait_until(lambda: len(forq.child("deaf")["jobs"]) == 4, what="all run")
    pulse = next(s["pid"] for s in forq.status()["supervisor"]["services"] if s["name"] == "pulse")
    main = forq.child("deaf")["pid"]
    os.kill(pulse, signal.SIGKILL)
    os.kill(main, signal.SIGKILL)
    wait_until(lambda: len(runs(forq, "deaf")) == 4, 30.0, "all have run again")
    assert len({start.pid for start, _ in runs(forq, "deaf")}) > 1
    forq.ctl("delete", "deaf")
