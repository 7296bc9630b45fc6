"""No job is lost or counted twice: many queues, and kill -9 at random moments."""

import os
import random
import signal
import time
from typing import Any

import pytest

from forq.client import new_job
from forq.ctl.client import ControlClient
from tests.support.drive.processes import tree_of
from tests.support.drive.supervisor import Forq, Trace, running
from tests.support.drive.wait import wait_until
from tests.support.thorough import examples


@pytest.mark.spec("N1", "N11", "P7", "R13", "R17")
def test_twenty_queues_run_each_job_once_and_in_order() -> None:
    """FIFO per queue and priority: ids of each priority appear in the trace in the order of their enqueue."""
    names = [f"q{number:02}" for number in range(20)]
    with running() as forq:
        for name in names:
            forq.create(name, "record")
            forq.ctl("pause", name)
        enqueued: dict[str, dict[int, list[str]]] = {}
        for name in names:
            jobs = [new_job(n, priority=(2, 5, 7)[n % 3]) for n in range(2000)]
            forq.client().queue(name).enqueue_jobs(jobs)
            enqueued[name] = {p: [job.id for job in jobs if job.priority == p] for p in (2, 5, 7)}
        for name in names:
            forq.ctl("resume", name)
        wait_until(lambda: all(q["done"] == 2000 for q in forq.status()["queues"]), 60.0, "all jobs are done")
        traces = forq.traces("end")
        for name in names:
            ran = [t.job for t in traces if t.queue == name]
            assert ran == [job for priority in (2, 5, 7) for job in enqueued[name][priority]]
        for queue in forq.status()["queues"]:
            assert (queue["waiting"], queue["active"], queue["in_flight"], queue["failed"]) == (0, 0, 0, 0)


DURATIONS = (0, 0, 0.0005, 0.002, 0.01)


FOUR_QUEUES: dict[str, dict[str, int]] = {"a": {}, "b": {}, "c": {}, "d": {"concurrency": 2}}
EIGHT_PROCESSES = {"one": {"processes": 8}}


def random_kills(forq: Forq, options: dict[str, dict[str, int]], *, jobs: int, kills: int, seed: int) -> dict[str, int]:
    """Kills children at random moments while they run jobs of 0 to 10 ms; returns figures of the run."""
    chance = random.Random(seed)
    names = list(options)
    for name in names:
        # Among thousands of kills, some job is hit four times and would be dead through no fault of its own.
        forq.create(name, "sleep", max_stalls=1000, **options[name])
    ids: dict[str, list[str]] = {name: [] for name in names}
    queues = {name: forq.client().queue(name) for name in names}
    share, each = max(1, round(2 * jobs / kills)), jobs // len(names)

    def enqueue(name: str, count: int) -> None:
        count = min(count, each - len(ids[name]))
        ids[name] += queues[name].enqueue_many(chance.choice(DURATIONS) for _ in range(count))

    # One connection: starting forqctl for each check would take longer than everything else.
    control = ControlClient(str(forq.state_dir / "control.sock"), 60.0)

    def status() -> list[dict[str, Any]]:
        return control.call("status", {})["queues"]  # type: ignore[no-any-return]

    done = 0
    while done < kills:
        for name in names:
            if queues[name].status()["waiting"] < 2 * share:
                enqueue(name, share)
        children = [c["pid"] for q in status() for c in q["children"] if c["state"] in ("busy", "idle")]
        for pid in chance.sample(children, min(len(children), 4)):
            time.sleep(chance.random() * 0.01)
            try:
                os.kill(pid, signal.SIGKILL)
                done += 1
            except ProcessLookupError:
                continue
    for name in names:
        enqueue(name, each)

    def drained() -> bool:
        return all(q["waiting"] == 0 and q["active"] == 0 for q in status())

    wait_until(drained, 300.0 + jobs / 200, "all queues are drained")
    settled, dead = (sum(q[count] for q in status()) for count in ("done", "dead"))
    control.close()
    assert forq.stop() == 0
    wanted = {job_id for name in names for job_id in ids[name]}
    traces = forq.traces()
    assert {t.job for t in traces} == wanted
    ended = [t.job for t in traces if t.event == "end"]
    return {
        "jobs": len(wanted),
        "kills": done,
        "done": settled,
        "dead": dead,
        "survivors": len(tree_of(forq.state_dir)),
        "lost": len(wanted - set(ended)),
        "killed_mid_job": len([t for t in traces if t.event == "start"]) - len(ended),
        "ran_again_after_its_end": len(ended) - len(set(ended)),
        "overlaps": overlaps(traces),
    }


def overlaps(traces: list[Trace]) -> int:
    """How often a run of a job continued after a later run of the same job had started."""
    runs: dict[str, list[Trace]] = {}
    for trace in traces:
        runs.setdefault(trace.job, []).append(trace)
    found = 0
    for events in runs.values():
        last_started = max((t for t in events if t.event == "start"), key=lambda t: t.fence)
        found += sum(1 for t in events if t.fence < last_started.fence and t.time > last_started.time)
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [FOUR_QUEUES, EIGHT_PROCESSES], ids=["four queues", "eight processes of a queue"])
def test_no_job_is_lost_under_random_kills(options: dict[str, dict[str, int]]) -> None:
    kills = int(os.environ.get("FORQ_TEST_KILLS", examples(20, 40)))
    jobs = int(os.environ.get("FORQ_TEST_JOBS", examples(2000, 4000)))
    seed = int(os.environ.get("FORQ_TEST_SEED", "0")) or random.randrange(1, 10**6)
    with running() as forq:
        outcome = random_kills(forq, options, jobs=jobs, kills=kills, seed=seed)
        print(f"seed {seed}: {outcome}")
        assert outcome["lost"] == 0, outcome
        assert outcome["done"] == outcome["jobs"], outcome
        assert outcome["overlaps"] == 0, outcome
        assert outcome["survivors"] == 0, outcome
        # A kill may hit between a job's last trace line and its report: at most the running jobs of a process.
        assert outcome["ran_again_after_its_end"] <= outcome["kills"] * 2, outcome
        # The test proves nothing unless kills hit running jobs.
        assert outcome["killed_mid_job"] > kills / 20, outcome
