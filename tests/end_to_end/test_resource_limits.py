"""Resource limits of a queue: a job that exceeds one is ended while it runs, with a typed cause."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forq.workers.child import OOM_SCORE
from tests.support.drive.processes import alive
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

MB = 1024 * 1024


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def create(forq: Forq, name: str, function: str, **options: object) -> None:
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", name, "--handler", f"greedy:{function}", "--path", str(HANDLERS), *settings)


def attempts(forq: Forq, queue: str, job_id: str, count: int = 1) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]] | None:
        seen: list[dict[str, Any]] = json.loads(forq.ctl("job", queue, job_id, "--json"))["attempts"]
        return seen if len(seen) >= count else None

    return wait_until(found, what=f"{count} attempts at {job_id}")  # type: ignore[no-any-return]


def test_a_job_past_memory_limit_is_killed_while_it_runs_with_the_cause_oom(forq: Forq) -> None:
    create(forq, "leak", "leak", memory_limit="100mb", max_stalls=1)
    job = forq.client().queue("leak").enqueue(400, id="leaky")
    first, second = attempts(forq, "leak", job, 2)
    for attempt in (first, second):
        assert (attempt["outcome"], attempt["cause"]) == ("stalled", "oom")
        assert 100 * MB < attempt["peak_memory"] < 600 * MB
    wait_until(lambda: forq.queue_status("leak")["dead"] == 1, what="max_stalls ends it")
    assert not [trace for trace in forq.traces() if trace.job == job and trace.event.startswith("end")]
    shown = forq.ctl("job", "leak", job)
    assert "PEAK" in shown
    assert f"{first['peak_memory'] / 1e6:.1f}MB" in shown
    assert "cause=oom" in forq.log


def test_a_job_below_its_memory_limit_keeps_running(forq: Forq) -> None:
    create(forq, "modest", "leak", memory_limit="500mb")
    forq.client().queue("modest").enqueue([20], id="m1")
    wait_until(lambda: [t for t in forq.traces("start") if t.job == "m1"], what="it runs")
    pid = forq.child("modest")["pid"]
    create(forq, "canary", "leak", memory_limit="100mb", max_stalls=0)
    forq.client().queue("canary").enqueue(400, id="c1")
    attempts(forq, "canary", "c1")
    assert forq.child("modest")["pid"] == pid, "the warden has checked both and killed one"
    forq.ctl("kill", "modest", "m1")


def test_the_memory_of_a_job_s_subprocesses_counts_too(forq: Forq) -> None:
    create(forq, "below", "leak_below", memory_limit="100mb", max_stalls=0)
    job = forq.client().queue("below").enqueue(300)
    (attempt,) = attempts(forq, "below", job)
    assert (attempt["outcome"], attempt["cause"]) == ("stalled", "oom")


@pytest.mark.parametrize("function", ["bomb", "threads"])
def test_a_job_with_more_processes_and_threads_than_pids_limit_is_killed(forq: Forq, function: str) -> None:
    create(forq, function, function, pids_limit=40, max_stalls=0)
    started = forq.wait_for_child(function)["pid"]
    job = forq.client().queue(function).enqueue(200)
    (attempt,) = attempts(forq, function, job)
    assert (attempt["outcome"], attempt["cause"]) == ("stalled", "pids")
    assert attempt["peak_memory"] > 0
    assert not alive({started})
    ours = {process.pid for process in forq.processes()}
    assert len(ours) < 40, "no process of the fork bomb is left"


def test_in_a_process_with_several_jobs_all_become_suspects_and_only_the_greedy_one_is_counted(forq: Forq) -> None:
    create(forq, "many", "leak", memory_limit="150mb", concurrency=2, max_stalls=0)
    queue = forq.client().queue("many")
    queue.enqueue(1, id="modest")
    wait_until(lambda: [t for t in forq.traces("start") if t.job == "modest"], what="the modest one runs")
    queue.enqueue(400, id="greedy")
    ends = [(attempt["outcome"], attempt["cause"]) for attempt in attempts(forq, "many", "greedy", 2)]
    assert ends == [("interrupted", "oom"), ("stalled", "oom")], "together with another, then alone"
    wait_until(lambda: forq.queue_status("many")["dead"] == 1, what="the greedy one is dead")
    wait_until(lambda: forq.queue_status("many")["done"] == 1, what="the modest one is done")
    assert [trace.stalls for trace in forq.traces("start") if trace.job == "modest"] == [0, 0], (
        "it ran again and was not counted"
    )


def test_a_warden_that_dies_is_replaced(forq: Forq) -> None:
    def warden() -> dict[str, Any]:
        services = forq.status()["supervisor"]["services"]
        return next(service for service in services if service["name"] == "warden")

    create(forq, "again", "leak", memory_limit="100mb", max_stalls=0)
    before = warden()["pid"]
    os.kill(before, 9)
    wait_until(lambda: warden()["pid"] not in (None, before), what="another warden")
    job = forq.client().queue("again").enqueue(400)
    assert attempts(forq, "again", job)[0]["cause"] == "oom"


def test_nice_open_files_and_address_space_apply_to_the_job_and_its_subprocesses(forq: Forq) -> None:
    gb = 1024 * MB
    create(forq, "rs", "restraints", nice=5, open_files_limit=200, address_limit="4gb")
    forq.client().queue("rs").enqueue(None, id="r1")
    (trace,) = wait_until(lambda: [t for t in forq.traces() if t.job == "r1"], what="it ran")
    ours, theirs = trace.event.split("|")
    nice = os.getpriority(os.PRIO_PROCESS, forq.pid) + 5
    assert ours == theirs == f"{nice},200,200,{4 * gb},{4 * gb}"


def test_past_address_limit_the_job_gets_a_memory_error_and_is_retried(forq: Forq) -> None:
    create(forq, "space", "ask_for_much", address_limit="1gb", max_retries=0)
    job = forq.client().queue("space").enqueue(2000)
    (attempt,) = attempts(forq, "space", job)
    assert (attempt["outcome"], attempt["cause"]) == ("failed", "exception")
    assert attempt["error"]["name"] == "MemoryError"


def test_without_limits_there_is_no_warden() -> None:
    with running() as forq:
        forq.create("plain", "noop")
        forq.wait_for_child("plain")
        names = {service["name"] for service in forq.status()["supervisor"]["services"]}
    assert "warden" not in names


def test_when_memory_runs_out_queues_and_their_programs_are_killed_first(forq: Forq) -> None:
    forq.create("first", "run_program")
    forq.wait_for_child("first")
    own = score(forq.pid)
    queues = {child["pid"] for queue in forq.status()["queues"] for child in queue["children"]} - {None}
    assert queues
    assert {score(pid) for pid in queues} == {max(own, OOM_SCORE)}
    others = {process.pid for process in psutil.Process(forq.pid).children()} - queues
    titles = " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in others)
    assert all(name in titles for name in ("forq: pulse", "forq: clerk", "forq: redis")), titles
    assert {score(pid) for pid in (forq.pid, *others)} == {own}


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
