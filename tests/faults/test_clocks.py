"""Wrong clocks and clocks that jump: of forq's hosts, and of the server."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.supervisor_pair import assert_nobody_was_evicted
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.faults.faulty_servers import ClockServer
from tests.support.faults.shifted_clock import ShiftedClock

pytestmark = pytest.mark.timeout(120)

QUICK = 'heartbeat = "300ms"\nexpiry = "900ms"\n'
# For tests without evictions: a busy machine must not look like a fault.
STEADY = 'heartbeat = "500ms"\nexpiry = "3s"\n'
TWO_HOURS = 7200


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    return ShiftedClock(tmp_path)


def delayed_run(forq: Forq, queue: str, seconds: float) -> float:
    """How long after forqctl enqueued it with this delay a job ran."""
    before = time.monotonic()
    job_id = forq.ctl("push", queue, "0", "--in", f"{round(seconds * 1000)}ms")
    [ran] = wait_until(lambda: [t for t in forq.traces("start") if t.job == job_id], 10.0, "the delayed job runs")
    return float(ran.time - before)


@pytest.mark.fault("clock of a host is wrong")
@pytest.mark.parametrize("shift", [TWO_HOURS, -TWO_HOURS])
def test_a_host_with_a_wrong_clock_works_beside_one_with_a_correct_clock(
    redis_url: str, clock: ShiftedClock, shift: int
) -> None:
    clock.shift(shift)
    with (
        running(redis=redis_url, settings=STEADY, environment=clock.environment) as wrong,
        running(redis=redis_url, settings=STEADY) as right,
    ):
        for forq in (wrong, right):
            forq.create("shared", "sleep")
            forq.wait_for_child("shared")
        wrong.create("own", "fail_until", min_backoff="100ms", jitter=0)
        wrong.create("hung", "act", timeout="500ms", max_timeouts=0)
        running_ids = wrong.client().queue("shared").enqueue_many([1.0] * 2)
        assert delayed_run(wrong, "own", 0.3) >= 0.3
        wrong.client().queue("own").enqueue(2, id="retried")
        wrong.client().queue("hung").enqueue({"do": "hang"}, id="late")
        wait_until(lambda: wrong.client().queue("own").status()["done"] == 2, 10.0, "the backoff has its usual length")
        wait_until(lambda: wrong.client().queue("hung").status()["dead"] == 1, 10.0, "the timeout has its usual length")
        wait_until(lambda: right.client().queue("shared").status()["done"] == len(running_ids), what="both worked")
        assert_nobody_was_evicted(wrong, right)


@pytest.mark.fault("clock of a host is wrong")
def test_a_wrong_clock_does_not_make_jobs_look_old(redis_url: str, clock: ShiftedClock) -> None:
    clock.shift(TWO_HOURS)
    with running(redis=redis_url, environment=clock.environment) as forq:
        forq.create("paused")
        forq.ctl("pause", "paused")
        job_id = forq.ctl("push", "paused", "1")
        assert forq.queue_status("paused")["oldest_waiting_seconds"] < 60
        forq.ctl("schedule", "paused", "often", "--every", "200ms")
        wait_until(lambda: forq.queue_status("paused")["waiting"] == 2, 10.0, "the schedule makes its job")
        job = forq.client().queue("paused").job(job_id)
        assert abs(job["enqueued_at"] - time.time()) < 60, "times are the server's"


@pytest.mark.fault("clock of a host jumps")
def test_jobs_timeouts_and_delays_are_unaffected_by_clock_jumps_of_their_host(
    redis_url: str, clock: ShiftedClock
) -> None:
    with (
        running(redis=redis_url, settings=STEADY, environment=clock.environment) as jumping,
        running(redis=redis_url, settings=STEADY) as steady,
    ):
        for forq in (jumping, steady):
            forq.create("shared", "slices", timeout="20s")
            forq.wait_for_child("shared")
        jumping.create("later", "sleep")
        jumping.client().queue("shared").enqueue_many([75] * 2)
        wait_until(lambda: len(jumping.traces("start") + steady.traces("start")) == 2, what="both run")
        for shift in (TWO_HOURS, -TWO_HOURS, 0):
            clock.shift(shift)
            assert 0.3 <= delayed_run(jumping, "later", 0.3) < 5.0
        wait_until(lambda: steady.client().queue("shared").status()["done"] == 2, what="both are done")
        assert len(jumping.traces("start") + steady.traces("start")) == 5, "no job ran twice"
        assert_nobody_was_evicted(jumping, steady)


@pytest.fixture
def clock_server(clock: ShiftedClock) -> Iterator[ClockServer]:
    with ClockServer(clock) as server:
        yield server


@pytest.mark.fault("clock of the server jumps")
@pytest.mark.parametrize("shift", [3600, -3600])
def test_a_server_whose_clock_jumps_by_an_hour_evicts_nobody(
    clock: ShiftedClock, clock_server: ClockServer, shift: int
) -> None:
    with (
        running(redis=clock_server.url, settings=STEADY) as one,
        running(redis=clock_server.url, settings=STEADY) as two,
    ):
        for forq in (one, two):
            forq.create("shared", "slices", concurrency=2, timeout="20s")
            forq.wait_for_child("shared")
        pids = [forq.child("shared")["pid"] for forq in (one, two)]
        one.client().queue("shared").enqueue_many([200] * 4)
        wait_until(lambda: len(one.traces("start") + two.traces("start")) == 4, what="all run")
        with clock_server.connect() as redis:
            before = redis.time()[0]
            clock.shift(shift)
            wait_until(lambda: abs(redis.time()[0] - before - shift) < 60, what="the server sees it")
        wait_until(lambda: one.client().queue("shared").status()["done"] == 4, 30.0, "what ran is done")
        assert len(one.traces("start") + two.traces("start")) == 4, "and ran once"
        assert_nobody_was_evicted(one, two)
        assert [forq.child("shared")["pid"] for forq in (one, two)] == pids
        one.client().queue("shared").enqueue_many([1] * 4)
        wait_until(lambda: two.client().queue("shared").status()["done"] == 8, what="both supervisors continue")


@pytest.mark.fault("clock of the server jumps")
def test_after_a_clock_jump_of_the_server_a_dead_supervisor_is_still_evicted(
    clock: ShiftedClock, clock_server: ClockServer
) -> None:
    with (
        running(redis=clock_server.url, settings=QUICK) as gone,
        running(redis=clock_server.url, settings=QUICK) as left,
    ):
        gone.create("shared", "slices")
        gone.wait_for_child("shared")
        gone.client().queue("shared").enqueue(200, id="j")
        wait_until(lambda: gone.traces("start"), what="it runs")
        left.create("shared", "slices")
        left.wait_for_child("shared")
        tree = gone.processes()
        for process in tree:
            process.suspend()
        clock.shift(3600)
        wait_until(lambda: "evicted processors without heartbeats" in left.log, 15.0, "it is noticed")
        wait_until(lambda: [t.stalls for t in left.traces("start")] == [1], what="the job runs again")
        for process in reversed(tree):
            os.kill(process.pid, signal.SIGKILL)
