"""Async handlers with a real supervisor: one event loop per process, cancellation, and a blocked loop."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.drive.supervisor import HANDLERS, Forq, Trace, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def create(forq: Forq, queue: str, handler: str = "act", **options: object) -> Any:
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", queue, "--handler", f"coroutines:{handler}", "--path", str(HANDLERS), *settings)
    return forq.client().queue(queue)


def traces(forq: Forq, queue: str, job_id: str, event: str = "start") -> list[Trace]:
    return [trace for trace in forq.traces(event) if (trace.queue, trace.job) == (queue, job_id)]


def begin(forq: Forq, queue: str, job_id: str, **data: object) -> Trace:
    forq.client().queue(queue).enqueue(data, id=job_id)
    started: Trace = wait_until(lambda: traces(forq, queue, job_id), what=f"{job_id} started")[-1]
    return started


def wait_for_starts(forq: Forq, queue: str, job_id: str, number: int) -> None:
    wait_until(lambda: len(traces(forq, queue, job_id)) >= number, what=f"{job_id} started {number} times")


def test_jobs_of_all_workers_share_a_lock_and_a_pool(forq: Forq) -> None:
    queue = create(forq, "share", "add", concurrency=4, keep_done="1h")
    ids = queue.enqueue_many([None] * 12)
    assert sorted(queue.wait(job_id, 30) for job_id in ids) == list(range(1, 13))


def test_a_killed_coroutine_can_clean_up_and_the_dispatch_blocked_behind_it_runs(forq: Forq) -> None:
    queue = create(forq, "kill", concurrency=2)
    started = begin(forq, "kill", "k1", do="wait")
    forq.client().queue("kill").enqueue({"do": "wait", "seconds": 0}, id="k1")
    killed = json.loads(forq.ctl("kill", "kill", "k1", "--json"))
    assert (killed["pid"], killed["outcome"]) == (started.pid, "cancelled")
    wait_until(lambda: traces(forq, "kill", "k1", "end"), what="the dispatch blocked behind it ran")
    assert len(traces(forq, "kill", "k1", "cleanup")) == 2
    assert {trace.pid for trace in traces(forq, "kill", "k1")} == {started.pid}, "its process continued"
    wait_until(lambda: forq.queue_status("kill")["done"] == 1, what="it is settled")
    assert (forq.queue_status("kill")["failed"], queue.dead().jobs) == (0, [])


def test_kill_with_retry_returns_a_coroutine_uncounted(forq: Forq) -> None:
    queue = create(forq, "again")
    started = begin(forq, "again", "a1", do="wait")
    forq.ctl("kill", "again", "a1", "--retry")
    wait_until(lambda: len(traces(forq, "again", "a1")) == 2, what="it runs again")
    assert traces(forq, "again", "a1")[1].pid == started.pid
    job = queue.job("a1")
    assert (job["stall_count"], job["timeout_count"], job["retry_count"]) == (0, 0, 0)
    (attempt,) = job["attempts"]
    assert (attempt["outcome"], attempt["cause"]) == ("interrupted", "killed")
    assert "in wait" in attempt["stack"]
    forq.ctl("kill", "again", "a1")
    wait_until(lambda: forq.run_ctl("job", "again", "a1").returncode == 4, what="the job is gone")


def test_coroutines_are_cancelled_at_the_end_of_the_grace_period(forq: Forq) -> None:
    queue = create(forq, "grace", concurrency=2, stop_grace="300ms")
    begin(forq, "grace", "g1", do="wait")
    begin(forq, "grace", "g2", do="wait")
    forq.ctl("restart", "grace")
    for job_id in ("g1", "g2"):
        wait_for_starts(forq, "grace", job_id, 2)
        assert traces(forq, "grace", job_id, "cleanup"), "it could clean up"
        job = queue.job(job_id)
        assert (job["stall_count"], job["retry_count"]) == (0, 0)
        assert [(each["outcome"], each["cause"]) for each in job["attempts"]] == [("interrupted", "interrupted")]
        forq.ctl("kill", "grace", job_id)


@pytest.mark.parametrize("how", ["block", "block_in_task", "spin"])
def test_only_the_job_that_blocks_the_loop_is_counted(forq: Forq, how: str) -> None:
    create(forq, how, concurrency=3, timeout="2s", max_timeouts=1)
    for job_id in ("w1", "w2"):
        begin(forq, how, job_id, do="wait")
    begin(forq, how, "blocks", do=how)
    wait_until(lambda: traces(forq, how, "blocks", "end"), seconds=30, what="its second attempt ran")
    assert counted_timeouts(forq, how, "blocks") == [0, 1], "the job that blocks is counted"
    for job_id in ("w1", "w2"):
        wait_for_starts(forq, how, job_id, 2)
        assert counted_timeouts(forq, how, job_id)[:2] == [0, 0], "the others are not"
    forq.ctl("delete", how, "--force")


def counted_timeouts(forq: Forq, queue: str, job_id: str) -> list[int]:
    """At each start of the job."""
    events = [trace.event for trace in forq.traces() if (trace.queue, trace.job) == (queue, job_id)]
    return [int(event.partition("=")[2]) for event in events if event.startswith("timeouts=")]


@pytest.mark.parametrize(
    ("how", "inner"), [("wait", "wait"), ("block", "block"), ("block_in_task", "block"), ("spin", "spin")]
)
def test_stack_shows_coroutines(forq: Forq, how: str, inner: str) -> None:
    queue = f"stack-{how}"
    create(forq, queue, concurrency=2)
    begin(forq, queue, "w", do="wait")
    begin(forq, queue, "j", do=how)

    def stacks() -> dict[str, str | None]:
        shown = json.loads(forq.ctl("stack", queue, "--json"))["stacks"]
        return {each["job"]: each["stack"] for each in shown}

    stack = wait_until(lambda: (found := stacks().get("j")) and f"in {inner}" in found and found, what="its stack")
    assert "in act" in stack
    assert "event_loop.py" not in stack
    if how != "spin":
        assert "in wait" in str(stacks()["w"])
    forq.ctl("delete", queue, "--force")
