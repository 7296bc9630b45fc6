"""Limits of a queue over all its supervisors: how many jobs begin (rate, burst), how many are active."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from forq.broker.journal import Event, read_entry
from tests.support.drive.processes import alive
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.thorough import only_in_test_all

SECONDS = float(os.environ.get("FORQ_TEST_RATE_SECONDS", "4"))


@contextmanager
def two_supervisors(
    redis_url: str, trace: Path, function: str, workers: int = 2, **options: object
) -> Iterator[list[Forq]]:
    with running(redis=redis_url, trace=trace) as one, running(redis=redis_url, trace=trace) as other:
        for forq in (one, other):
            forq.create("q", function, concurrency=workers, journal_max="1gb", **options)
            forq.wait_for_child("q")
        yield [one, other]


def events(redis_url: str) -> list[Event]:
    with redis.Redis.from_url(redis_url) as client:
        return [event for _, entry in client.xrange("forq:queue:{q}:events") for event in read_entry(entry, "q")]


def best_rate(begun: list[float], jobs: int) -> float:
    """The rate of the fastest `jobs` in a row: on a busy machine, workers may be late."""
    return max(jobs / (begun[at + jobs] - begun[at]) for at in range(len(begun) - jobs))


def is_dead(pid: int) -> bool:
    return not alive({pid})


def script_calls(client: Any) -> int:
    return int(client.info("commandstats")["cmdstat_fcall"]["calls"])


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@pytest.mark.timeout(120)
def test_jobs_begin_at_the_rate_never_above_the_burst_and_no_worker_spins(redis_url: str, tmp_path: Path) -> None:
    rate, burst = 50, 5
    with two_supervisors(redis_url, tmp_path / "trace", "record", rate=f"{rate}/1s") as supervisors:
        processes = [process for forq in supervisors for process in forq.processes()]
        with redis.Redis.from_url(redis_url) as client:
            before = cpu_seconds(processes), script_calls(client)
            count = int(rate * SECONDS)
            supervisors[0].client().queue("q").enqueue_many([0] * count)
            wait_until(lambda: supervisors[0].child("q")["state"] == "limited", what="a worker is limited")
            wait_until(lambda: client.hlen("forq:queue:{q}:jobs") == 0, SECONDS + 10, "all jobs ran")
            cpu = cpu_seconds(processes) - before[0]
            calls = script_calls(client) - before[1]
        begun = sorted(event.time_us / 1e6 for event in events(redis_url) if event.verb == "claimed")
    assert len(begun) == count
    span = begun[-1] - begun[0]
    measured = (count - burst) / span
    print(f"rate {rate}/s: {count} jobs began in {span:.2f} s, {measured:.2f}/s after the burst of {burst}")
    share = 100 * cpu / span
    print(f"two supervisors and all their children: {share:.1f} % of a core, {calls / count:.1f} calls per job")
    assert measured < 1.05 * rate
    assert best_rate(begun, count // 2) > 0.95 * rate
    for i in range(count):
        for j in range(i + burst, min(count, i + 200)):
            assert j - i + 1 <= burst + rate * (begun[j] - begun[i]) + 0.001, (
                f"{j - i + 1} within {begun[j] - begun[i]:.3f} s"
            )
    # For each of the two: a turn that claims, one that has to wait, and its wake-up.
    assert calls / count < 8
    assert cpu / span < 0.5


@only_in_test_all
def test_slow_jobs_also_begin_at_the_rate(redis_url: str, tmp_path: Path) -> None:
    """The workers that took the tokens run for long; those behind them are notified of the next tokens."""
    rate, count = 10, 30
    with two_supervisors(redis_url, tmp_path / "trace", "sleep", rate=f"{rate}/1s", burst=1, workers=8) as supervisors:
        supervisors[0].client().queue("q").enqueue_many([1.0] * count)
        queue = supervisors[0].client().queue("q")
        wait_until(lambda: queue.status()["done"] == count, 30, "all jobs ran")
        begun = sorted(event.time_us / 1e6 for event in events(redis_url) if event.verb == "claimed")
    measured = (count - 1) / (begun[-1] - begun[0])
    print(f"rate {rate}/s of jobs that take 1 s: {measured:.2f}/s")
    assert measured < 1.01 * rate
    assert best_rate(begun, count // 2) > 0.9 * rate


def test_max_active_holds_while_workers_are_killed(redis_url: str, tmp_path: Path) -> None:
    with two_supervisors(redis_url, tmp_path / "trace", "sleep", max_active=3, max_stalls=100) as supervisors:
        queue = supervisors[0].client().queue("q")
        stored = 0

        def three_are_active() -> bool:
            """With jobs always in line: on a busy machine, all could be done before the next kill."""
            nonlocal stored
            status = queue.status()
            if status["waiting"] < 10:
                stored += len(queue.enqueue_many([0.05] * 20))
            return bool(status["active"] == 3)

        victims: set[int | None] = {None}

        def next_victim(forq: Forq) -> int | None:
            """A killed process is shown until its whole tree is gone."""
            pid: int | None = forq.child("q")["pid"]
            return pid if pid not in victims else None

        for number in range(4):
            wait_until(three_are_active, what="three are active")
            victim = wait_until(partial(next_victim, supervisors[number % 2]), what="it has a live process")
            os.kill(victim, signal.SIGKILL)
            victims.add(victim)
            wait_until(partial(is_dead, victim), what="it is dead")
        wait_until(lambda: queue.status()["done"] == stored, what="all jobs are done")
        active, most = set(), 0
        for event in events(redis_url):
            if event.verb == "claimed":
                active.add(event.job)
                most = max(most, len(active))
            elif event.verb in ("done", "returned", "stalled", "suspected"):
                active.discard(event.job)
    assert most == 3


def test_lifting_a_limit_lets_every_worker_continue_at_once(redis_url: str, tmp_path: Path) -> None:
    with two_supervisors(redis_url, tmp_path / "trace", "noop", rate="1/1h") as supervisors:
        queue = supervisors[0].client().queue("q")
        ids = queue.enqueue_many([0] * 100)
        for forq in supervisors:
            forq.wait_for_child("q", "limited")
        assert queue.status()["done"] == 1
        assert "rate = 1/1h" in supervisors[0].ctl("why", "q", ids[-1])
        assert "rate 1/1h: 0 tokens left" in supervisors[0].ctl("status")
        supervisors[0].ctl("set", "q", "rate=off")
        wait_until(lambda: queue.status()["done"] == 100, 3, "all jobs ran")
        for forq in supervisors:
            forq.wait_for_child("q", "idle")
