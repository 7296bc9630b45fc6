"""Nothing is lost, nothing is counted twice: many queues, and kill -9 at random moments."""

import os
import random
import signal
import time

import pytest

from forq.client import new_job
from tests.support.running import Forq, running, wait_until


@pytest.mark.spec("N1", "N11", "P7", "R13", "R17")
def test_twenty_queues_run_each_job_once_and_in_order() -> None:
    """FIFO per queue and priority: the ids of each priority appear in the trace in the order they were enqueued."""
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
        wait_until(lambda: all(q["processed"] == 2000 for q in forq.status()["queues"]), 60.0, "all jobs are done")
        traces = forq.traces("end")
        for name in names:
            ran = [t.job for t in traces if t.queue == name]
            assert ran == [job for priority in (2, 5, 7) for job in enqueued[name][priority]]
        for queue in forq.status()["queues"]:
            assert (queue["waiting"], queue["active"], queue["in_flight"], queue["failed_total"]) == (0, 0, 0, 0)


def random_kills(forq: Forq, *, jobs: int, kills: int, seed: int) -> dict[str, int]:
    """Kills main and retry children at random moments while jobs flow; what the run was like."""
    chance = random.Random(seed)
    names = ["a", "b", "c", "d"]
    for name in names:
        forq.create(name, "record", concurrency=2 if name == "d" else 1)
    ids: dict[str, list[str]] = {name: [] for name in names}
    queues = {name: forq.client().queue(name) for name in names}
    done = 0
    while done < kills:
        for name in names:
            room = jobs // len(names) - len(ids[name])
            if room > 0 and queues[name].status()["waiting"] < 200:
                share = max(1, round(jobs / kills))
                ids[name] += queues[name].enqueue_many(range(min(room, share)))
        children = [
            c["pid"] for q in forq.status()["queues"] for c in q["children"] if c["pid"] and c["state"] != "starting"
        ]
        for pid in chance.sample(children, min(len(children), 4)):
            time.sleep(chance.random() * 0.004)
            try:
                os.kill(pid, signal.SIGKILL)
                done += 1
            except ProcessLookupError:
                continue
    for name in names:
        ids[name] += queues[name].enqueue_many(range(jobs // len(names) - len(ids[name])))

    def drained() -> bool:
        return all(q["waiting"] == 0 and q["active"] == 0 for q in forq.status()["queues"])

    wait_until(drained, 120.0, "all queues are drained")
    lost, twice = 0, 0
    traces = forq.traces("end")
    for name in names:
        ran = [t.job for t in traces if t.queue == name]
        lost += len(set(ids[name]) - set(ran))
        twice += len(ran) - len(set(ran))
    processed = sum(q["processed"] for q in forq.status()["queues"])
    assert set().union(*ids.values()) >= {t.job for t in traces}
    return {
        "jobs": sum(map(len, ids.values())),
        "kills": done,
        "processed": processed,
        "lost": lost,
        "ran_again": twice,
    }


@pytest.mark.timeout(900)
def test_conservation_under_random_kills() -> None:
    kills, jobs = int(os.environ.get("FORQ_TEST_KILLS", "40")), int(os.environ.get("FORQ_TEST_JOBS", "4000"))
    seed = int(os.environ.get("FORQ_TEST_SEED", "0")) or random.randrange(1, 10**6)
    with running() as forq:
        outcome = random_kills(forq, jobs=jobs, kills=kills, seed=seed)
        print(f"seed {seed}: {outcome}")
        assert outcome["lost"] == 0, outcome
        assert outcome["processed"] == outcome["jobs"], outcome
        # A kill can hit a job after its trace and before its outcome is known: it runs again, at most once per kill.
        assert outcome["ran_again"] <= outcome["kills"] * 2, outcome
