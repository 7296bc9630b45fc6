"""forqctl kill ends a running job; forqctl stack shows where it is."""

import json
from collections.abc import Iterator

import pytest

from tests.support.drive.supervisor import Forq, Trace, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def traces(forq: Forq, job_id: str, event: str = "start") -> list[Trace]:
    return [trace for trace in forq.traces(event) if trace.job == job_id]


def begin(forq: Forq, queue: str, job_id: str, data: dict[str, object]) -> Trace:
    forq.client().queue(queue).enqueue(data, id=job_id)
    started: Trace = wait_until(lambda: traces(forq, job_id), what=f"{job_id} started")[-1]
    return started


def test_kill_ends_the_running_job_and_cancels_it(forq: Forq) -> None:
    forq.create("k", "act")
    begin(forq, "k", "k1", {"do": "hang"})
    said = forq.ctl("kill", "k", "k1")
    assert said.startswith("killing k1 (process ")
    assert said.endswith("now; it is cancelled")
    wait_until(lambda: forq.run_ctl("job", "k", "k1").returncode == 4, what="the job is gone")
    begin(forq, "k", "k2", {"do": "sleep"})
    wait_until(lambda: traces(forq, "k2", "end"), what="the next one ran")
    assert len(traces(forq, "k1")) == 1
    status = forq.queue_status("k")
    assert (status["dead"], status["done"], status["failed"]) == (0, 1, 0)


def test_a_dispatch_blocked_behind_a_killed_job_runs(forq: Forq) -> None:
    forq.create("b", "act")
    begin(forq, "b", "b1", {"do": "hang"})
    forq.client().queue("b").enqueue({"do": "sleep"}, id="b1")
    forq.ctl("kill", "b", "b1")
    wait_until(lambda: traces(forq, "b1", "end"), what="the blocked one ran")


def test_kill_with_retry_returns_the_job_uncounted(forq: Forq) -> None:
    forq.create("r", "act")
    first = begin(forq, "r", "r1", {"do": "hang"})
    killed = json.loads(forq.ctl("kill", "r", "r1", "--retry", "--json"))
    assert killed == {"id": "r1", "pid": first.pid, "outcome": "interrupted", "others": []}
    wait_until(lambda: len(traces(forq, "r1")) == 2, what="it runs again")
    job = forq.client().queue("r").job("r1")
    assert (job["stall_count"], job["timeout_count"], job["retry_count"]) == (0, 0, 0)
    assert [(attempt["outcome"], attempt["cause"]) for attempt in job["attempts"]] == [("interrupted", "killed")]
    assert "in hang" in job["attempts"][0]["stack"]
    forq.ctl("kill", "r", "r1")


def test_kill_in_a_process_with_other_jobs_waits_for_them(forq: Forq) -> None:
    forq.create("m", "act", concurrency=2)
    begin(forq, "m", "m1", {"do": "hang"})
    begin(forq, "m", "m2", {"do": "sleep", "seconds": 1.0})
    assert json.loads(forq.ctl("kill", "m", "m1", "--json"))["others"] == ["m2"]
    wait_until(lambda: traces(forq, "m2", "end"), what="the other one ended")
    wait_until(lambda: forq.run_ctl("job", "m", "m1").returncode == 4, what="the job is gone")
    assert len(traces(forq, "m2")) == 1


def test_a_job_that_runs_elsewhere_cannot_be_killed(forq: Forq) -> None:
    forq.create("n", "act")
    forq.ctl("pause", "n")
    forq.ctl("push", "n", "1", "--id", "n1")
    for job_id in ("n1", "nobody"):
        refused = forq.run_ctl("kill", "n", job_id)
        assert refused.returncode == 4
        assert f"queue 'n' runs no job '{job_id}' in a process of this supervisor" in refused.stderr
    assert forq.run_ctl("kill", "nowhere", "x").returncode == 4


def test_stack_shows_where_each_running_job_is_even_in_c(forq: Forq) -> None:
    forq.create("s", "act")
    started = begin(forq, "s", "s1", {"do": "spin"})
    (stack,) = json.loads(forq.ctl("stack", "s", "--json"))["stacks"]
    assert (stack["role"], stack["pid"], stack["job"]) == ("main", started.pid, "s1")
    assert "in do" in stack["stack"]
    assert "attempt.py" not in stack["stack"], "frames of forq are left out"
    text = forq.ctl("stack", "s")
    assert text.startswith(f"main process {started.pid}: job s1")
    assert forq.child("s")["pid"] == started.pid, "the job keeps running"
    forq.ctl("kill", "s", "s1")


def test_stack_of_an_idle_queue_reports_that_nothing_runs(forq: Forq) -> None:
    forq.create("i", "act")
    forq.wait_for_child("i")
    wait_until(lambda: forq.ctl("stack", "i") == "no job is running", what="both children are up and idle")
