"""Delayed jobs: never early, on time for idle and busy workers. Longer with `make delayed`."""

import os
import random
import time

import pytest

from tests.end_to_end.delayed_jobs import DelayedJobs, Lateness
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

JOBS = int(os.environ.get("FORQ_TEST_DELAYED", "1700"))
SECONDS = float(os.environ.get("FORQ_TEST_DELAYED_SECONDS", "1"))
SEED = int(os.environ.get("FORQ_TEST_SEED", "0"))
# Limit for loaded CI machines; the measured time is printed.
LATE_SECONDS = float(os.environ.get("FORQ_TEST_LATE", "2.0"))
BUSY_WORKERS, BUSY_SECONDS = 4, 0.05
# The precision of a double below a millisecond: this many jobs of one time keep their order.
IN_ORDER = 4096
# Heartbeats also promote, and must not hide a late promotion.
RARE_BEATS = 'heartbeat = "60s"\nexpiry = "180s"\n'


def times_ms(jobs: DelayedJobs, number: int, seconds: float) -> list[int]:
    """Random times over `seconds`, starting when all jobs can have been stored."""
    chance = random.Random(SEED)
    first = time.time() + jobs.lead_seconds(number)
    return [round((first + chance.random() * seconds) * 1000) for _ in range(number)]


def check(jobs: DelayedJobs, what: str) -> tuple[Lateness, Lateness]:
    """Checks that no job was early and each ran once; prints and returns the lateness of promotion and of start."""
    started = jobs.start_lateness()
    promoted, too_late = jobs.promotion_lateness(jobs.events())
    load = os.getloadavg()[0]
    print(f"\n{what}: {len(jobs.ids)} jobs, {too_late} stored after their time; load {load:.1f}")
    print(f"  promoted: {promoted}\n  started:  {started}")
    assert promoted.earliest >= 0
    assert started.earliest >= 0
    assert too_late < len(jobs.ids) / 100, "too few jobs were stored in time"
    return promoted, started


@pytest.mark.timeout(600)
@pytest.mark.spec("Q8", "M9", "M10")
def test_idle_workers_run_each_delayed_job_once_on_time_and_never_early(server: Server, redis_url: str) -> None:
    with running(redis=redis_url, settings=RARE_BEATS) as forq:
        jobs = DelayedJobs(forq, server)
        jobs.store(times_ms(jobs, JOBS, SECONDS))
        jobs.wait_until_all_ran(60)
        promoted, started = check(jobs, f"idle workers, over {SECONDS:g} s")
    assert promoted.p99 <= LATE_SECONDS * 1000
    assert started.p99 <= LATE_SECONDS * 1000 * 2


@pytest.mark.timeout(600)
@pytest.mark.spec("Q8", "M10")
def test_delayed_jobs_become_waiting_on_time_while_every_worker_is_busy(server: Server, redis_url: str) -> None:
    """Jobs of 50 ms keep all workers busy to the end; the delayed ones have a higher priority."""
    with running(redis=redis_url, settings=RARE_BEATS) as forq:
        jobs = DelayedJobs(forq, server, concurrency=BUSY_WORKERS)
        due_ms = times_ms(jobs, JOBS, SECONDS)
        jobs.store(due_ms, priority=0)
        keep_busy(forq, jobs, max(due_ms) / 1000 - time.time() + 5)
        jobs.wait_until_all_ran(120)
        assert jobs.queue.status()["waiting"] > 0, "workers were busy to the end"
        promoted, _ = check(jobs, f"busy workers, over {SECONDS:g} s")
    assert promoted.p99 <= LATE_SECONDS * 1000


def keep_busy(forq: Forq, jobs: DelayedJobs, seconds: float) -> None:
    jobs.queue.enqueue_many([{"seconds": BUSY_SECONDS}] * round(BUSY_WORKERS * seconds / BUSY_SECONDS))
    forq.wait_for_child(jobs.name, "busy")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spec("Q8", "M10")
@pytest.mark.parametrize(("share", "seconds"), [(0.2, 0.0), (1.0, 1.0)], ids=["in one millisecond", "in one second"])
def test_a_burst_of_delayed_jobs_is_neither_early_nor_lost(
    server: Server, redis_url: str, share: float, seconds: float
) -> None:
    with running(redis=redis_url, settings=RARE_BEATS) as forq:
        jobs = DelayedJobs(forq, server)
        jobs.store(times_ms(jobs, round(JOBS * share), seconds))
        jobs.wait_until_all_ran(120)
        check(jobs, f"a burst over {seconds:g} s")


@pytest.mark.timeout(300)
@pytest.mark.spec("Q8")
def test_jobs_of_one_time_run_in_the_order_of_their_enqueue(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        jobs = DelayedJobs(forq, server, concurrency=1)
        # All must be stored before that time even on a busy machine: a job stored later is never promoted.
        jobs.store([round((time.time() + 3 + jobs.lead_seconds(IN_ORDER)) * 1000)] * IN_ORDER)
        jobs.wait_until_all_ran(60)
        assert [event.job for event in jobs.events() if event.verb == "promoted"] == jobs.ids
        assert [number for number, _ in jobs.runs()] == list(range(IN_ORDER))


@pytest.mark.timeout(300)
@pytest.mark.one_server
def test_pulse_subscribes_to_a_new_queue_s_due_times_before_create_answers(server: Server, redis_url: str) -> None:
    """Redis comes back just before, so that the next heartbeat, which would repair it, is far away."""
    server.stop()
    forq = Forq(redis=redis_url, settings=RARE_BEATS)
    try:
        forq.start(ready=False)
        wait_until(lambda: "redis is unreachable" in forq.log)
        server.start()
        create = ("create", "later", "--handler", "delayed:note_run", "--path", str(HANDLERS))
        wait_until(lambda: forq.run_ctl(*create).returncode == 0)
        with server.connect() as redis:
            subscription = [
                client["psub"] for client in redis.client_list() if client["name"] == "forq-pulse-subscription"
            ]
            assert subscription == ["2"], "pulse has subscribed to due times, and to requests"
            assert redis.hget("forq:queue:{later}:counts", "last_beat_ms")
        forq.wait_for_child("later")
        jobs = DelayedJobs(forq, server, made=True)
        jobs.store([round((time.time() + 0.5) * 1000) + 10 * number for number in range(100)])
        jobs.wait_until_all_ran(60)
        check(jobs, "the first jobs of a new queue")
    finally:
        forq.remove()
