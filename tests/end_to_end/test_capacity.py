"""Queues that compete for the supervisor's capacity."""

import json
import os
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from forq.procs.cgroups import usable_cpus
from tests.support.drive.supervisor import HANDLERS, Forq, Trace, running
from tests.support.drive.wait import wait_until

CAPACITY = 100
JOB_SECONDS = 0.02


@dataclass(frozen=True)
class Competitor:
    name: str
    priority: int
    size: int


EIGHT = [
    Competitor(f"p{priority}s{size}", priority, size)
    for priority, size in ((3, 40), (3, 30), (2, 40), (2, 20), (1, 30), (1, 10), (0, 20), (0, 10))
]


def units_over_time(traces: list[Trace], sizes: dict[str, int]) -> tuple[int, float]:
    """The maximum of units in use at one moment, and the mean."""
    changes = sorted((t.time, sizes[t.queue] if t.event == "start" else -sizes[t.queue]) for t in traces)
    out = most = 0
    area, last = 0.0, changes[0][0]
    for at, units in changes:
        area += out * (at - last)
        out, last = out + units, at
        most = max(most, out)
    return most, area / (last - changes[0][0])


def compete(seconds: float) -> None:
    with running(settings=f"capacity = {CAPACITY}\n") as forq:
        sizes = {one.name: one.size for one in EIGHT}
        for one in EIGHT:
            forq.create(one.name, "sleep", priority=one.priority, size=one.size)
            forq.ctl("pause", one.name)
            forq.client().queue(one.name).enqueue_many([JOB_SECONDS] * int((seconds + 8) / JOB_SECONDS))
        for one in EIGHT:
            forq.ctl("resume", one.name)
        began = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > began + seconds / 2, seconds, "half of it")
        _check_status(forq)
        wait_until(lambda: time.monotonic() > began + seconds, seconds, "all of it")
        ended = time.monotonic()
        traces = [t for t in forq.traces() if began <= t.time <= ended]
        assert all(forq.queue_status(one.name)["waiting"] for one in EIGHT), "every queue had jobs waiting all the time"
    most, mean = units_over_time(_whole_runs(traces), sizes)
    print(f"\n{seconds:g} s, capacity {CAPACITY}: at most {most} units in use, {mean:.1f} in the mean")
    print(f"{'queue':<8}{'priority':>9}{'size':>6}{'jobs':>7}{'share of units':>16}{'longest wait':>14}")
    shares: dict[str, float] = {}
    total = sum(one.size * _count(traces, one.name) for one in EIGHT)
    for one in EIGHT:
        shares[one.name] = one.size * _count(traces, one.name) / total
        wait = _longest_wait(traces, one.name, began, ended)
        print(
            f"{one.name:<8}{one.priority:>9}{one.size:>6}{_count(traces, one.name):>7}"
            f"{shares[one.name]:>15.1%}{wait:>12.2f} s"
        )
        # Its distance to the top in levels of one second, plus the time that jobs of higher queues need to end.
        assert wait < (3 - one.priority + 1) * 1.0 + 8 * 0.3, f"{one.name} starved"
    assert most <= CAPACITY
    assert mean > CAPACITY * 0.6
    by_level = [sum(shares[one.name] for one in EIGHT if one.priority == level) for level in (3, 2, 1, 0)]
    assert by_level[0] > by_level[1] > max(by_level[2], by_level[3]), by_level


def _whole_runs(traces: list[Trace]) -> list[Trace]:
    both = {(t.job, t.fence) for t in traces if t.event == "start"} & {
        (t.job, t.fence) for t in traces if t.event == "end"
    }
    return [t for t in traces if (t.job, t.fence) in both]


def _count(traces: list[Trace], queue: str) -> int:
    return sum(t.queue == queue and t.event == "end" for t in traces)


def _longest_wait(traces: list[Trace], queue: str, began: float, ended: float) -> float:
    starts = [began, *(t.time for t in traces if t.queue == queue and t.event == "start"), ended]
    return max(after - before for before, after in pairwise(starts))


def _check_status(forq: Forq) -> None:
    capacity = json.loads(forq.ctl("status", "--json"))["capacity"]
    assert capacity["units"] == CAPACITY
    assert sum(grant["units"] for grant in capacity["held"]) == CAPACITY - capacity["free"] <= CAPACITY
    workers = [entry["worker"] for entry in capacity["held"] + capacity["waiting"]]
    assert {f"{one.name} main" for one in EIGHT} <= set(workers), "each holds units, or waits for some"
    assert "waits" in forq.ctl("status")


@pytest.mark.timeout(120)
@pytest.mark.spec("Q11", "Q12", "Q13", "Q31")
def test_queues_share_the_capacity_by_priority_and_none_starves() -> None:
    compete(8.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_eight_queues_compete_for_a_minute() -> None:
    compete(60.0)


@pytest.mark.timeout(120)
@pytest.mark.spec("Q11", "Q12")
def test_the_capacity_is_100_units_per_cpu_and_a_dead_worker_s_units_return_at_once(tmp_path: Path) -> None:
    with running() as forq:
        units = 100 * usable_cpus()
        assert forq.status()["capacity"]["units"] == units
        forq.create("all", "sleep", size=units)
        forq.create("small", "sleep")
        queue = forq.client().queue("all")
        queue.enqueue(60, id="hog")
        hog = wait_until(lambda: [t for t in forq.traces("start") if t.job == "hog"], what="it runs")[0]
        forq.client().queue("small").enqueue(0, id="waiter")

        def waits() -> bool:
            return "small main" in [wish["worker"] for wish in forq.status()["capacity"]["waiting"]]

        wait_until(waits, what="the other waits for units")
        assert not [t for t in forq.traces("start") if t.job == "waiter"]
        assert re.search(r"; its queue has waited \d+\.\d s for capacity$", forq.ctl("why", "small", "waiter"))
        forq.ctl("pause", "all")
        os.kill(hog.pid, 9)
        killed = time.monotonic()
        started = wait_until(lambda: [t for t in forq.traces("start") if t.job == "waiter"], what="the units are back")
        assert started[0].time - killed < 2.0


def test_a_size_above_the_capacity_is_refused_on_create_and_set() -> None:
    with running(settings="capacity = 20\n") as forq:
        refused = forq.run_ctl("create", "big", "--handler", "traced:noop", "--set", "size=21")
        assert refused.returncode == 2
        assert "size = 21 is not allowed: capacity is 20 units" in refused.stderr
        forq.create("fits", size=20)
        refused = forq.run_ctl("set", "fits", "size=21")
        assert refused.returncode == 2
        forq.ctl("push", "fits", "1")
        wait_until(lambda: forq.queue_status("fits")["done"] == 1)


def test_more_workers_than_the_capacity_allows_are_logged_as_a_warning() -> None:
    with running(settings="capacity = 100\n[queues.declared]\nhandler = 'x:y'\nconcurrency = 11\n") as forq:
        log = (forq.directory / "log").read_text()
        assert "queue=declared concurrency = 11 with size = 10 needs 110 units, but capacity is 100" in log
        made = forq.run_ctl(
            "create", "q", "--handler", "traced:noop", "--path", str(HANDLERS), "concurrency=8", "size=40"
        )
        assert made.stderr == (
            "forqctl: warning: queue q: concurrency = 8 with size = 40 needs 320 units, but capacity is 100: at most "
            "2 of its jobs run at the same time; for all 8, set capacity = 320 in the config file or size = 12\n"
        )
        assert (made.returncode, made.stdout) == (0, "created q\n")
        assert forq.run_ctl("set", "q", "size=12").stderr == ""
        assert "at most 7 of its jobs run at the same time" in forq.run_ctl("set", "q", "size=13").stderr
        assert "at most 1 of its jobs runs at" in json.loads(forq.ctl("set", "q", "size=51", "--json"))["warnings"][0]


@pytest.mark.spec("Q9", "Q12")
def test_a_size_changed_by_another_supervisor_applies_from_the_next_claim(redis_url: str) -> None:
    with running(redis=redis_url, settings="capacity = 50\n") as forq, running(redis=redis_url) as other:
        forq.create("q", "sleep", size=10)
        other.create("q", "sleep", size=10)
        other.ctl("set", "q", "size=40")
        # Both learn it with their next turn.
        for _ in range(4):
            forq.client().queue("q").enqueue(0.05)
        wait_until(lambda: forq.queue_status("q")["done"] == 4)
        forq.client().queue("q").enqueue_many([0.3] * 8)

        def held() -> list[int]:
            return [grant["units"] for grant in forq.status()["capacity"]["held"] if grant["worker"] == "q main"]

        wait_until(lambda: held() == [40], what="it asks for the new size")
