"""Fail handlers and the retry lane, with a real supervisor."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def create(forq: Forq, name: str, function: str, fail_handler: str = "on_fail", **options: object) -> None:
    settings = [f"--set={key}={value}" for key, value in options.items()]
    handlers = ["--handler", f"traced:{function}", "--fail-handler", f"traced:{fail_handler}", "--path", str(HANDLERS)]
    forq.ctl("create", name, *handlers, *settings)


def failures(forq: Forq, queue: str) -> list[str]:
    return [
        t.event.removeprefix("failed=") for t in forq.traces() if t.queue == queue and t.event.startswith("failed=")
    ]


@pytest.mark.spec("Q6", "Q38", "Q39")
def test_the_fail_handler_gets_data_job_and_error_in_the_retry_child(forq: Forq) -> None:
    create(forq, "failing", "fail_in_main", max_retries=1, min_backoff="10ms", max_backoff="10ms")
    job_id = forq.ctl("push", "failing", "9")
    wait_until(lambda: failures(forq, "failing"))
    assert failures(forq, "failing") == [f"{job_id}/9/1/ValueError/retriable"]
    pids = {t.pid for t in forq.traces() if t.queue == "failing" and t.event.startswith("failed=")}
    assert pids == {forq.child("failing", "retry")["pid"]}
    queue = wait_until(lambda: (q := forq.queue_status("failing"))["fail_jobs"] == 0 and q)
    assert (queue["dead"], queue["failed"]) == (1, 1)


def _handled_more_than(forq: Forq, number: int) -> bool:
    return len(failures(forq, "handled")) > number


def test_nothing_is_in_flight_after_the_fail_handler_has_run(forq: Forq) -> None:
    create(forq, "handled", "fail", max_retries=0)
    for number in range(3):
        forq.ctl("push", "handled", str(number))
        wait_until(partial(_handled_more_than, forq, number))
    wait_until(lambda: forq.queue_status("handled")["fail_jobs"] == 0)
    assert forq.queue_status("handled")["in_flight"] == 0


@pytest.mark.spec("Q40", "Q32")
def test_a_fail_handler_that_raises_is_retried(forq: Forq) -> None:
    options = {"max_retries": 0, "fail_min_backoff": "20ms", "fail_max_backoff": "20ms"}
    create(forq, "stubborn", "fail", "on_fail_flaky", **options)
    job_id = forq.ctl("push", "stubborn", "1")
    wait_until(lambda: failures(forq, "stubborn"))
    assert [entry.split("/")[0] for entry in failures(forq, "stubborn")] == [job_id]


@pytest.mark.spec("Q40")
def test_no_fail_job_is_lost_when_the_retry_child_is_killed(forq: Forq) -> None:
    create(forq, "killed", "fail", max_retries=0, fail_min_backoff="10ms", fail_max_backoff="10ms")
    queue = forq.client().queue("killed")
    ids: set[str] = set()
    killed: set[int] = set()
    for kill in range(20):
        # In several steps: if all were stored at once, a quick machine would be done before the last kill.
        ids.update(queue.enqueue_many(range(75)))
        role = "retry" if kill % 2 else "main"
        child = wait_until(partial(_past_its_start, forq, "killed", role, killed), what=f"the {role} child has started")
        os.kill(child["pid"], signal.SIGKILL)
        killed.add(child["pid"])
    wait_until(lambda: {entry.split("/")[0] for entry in failures(forq, "killed")} == ids, 60, "all have failed")
    wait_until(lambda: forq.queue_status("killed")["fail_jobs"] == 0)


def _past_its_start(forq: Forq, name: str, role: str, killed: set[int]) -> dict[str, Any] | None:
    """A killed process is listed until its tree is gone."""
    child = forq.child(name, role)
    return child if child["state"] in ("busy", "parked", "idle") and child["pid"] not in killed else None


@pytest.mark.spec("N16", "N17")
def test_the_retry_lane_starts_soon_after_main_is_empty_and_never_earlier(forq: Forq) -> None:
    options = {"max_retries": 0, "retry_lane_retries": 3, "min_backoff": "0s", "max_backoff": "0s"}
    forq.create("lane", "fail_in_main", **options)
    queue = forq.client().queue("lane")
    forq.ctl("pause", "lane")
    second_chance = queue.enqueue(1)
    others = queue.enqueue_many([0] * 3000)
    forq.ctl("resume", "lane")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == second_chance])
    ended = max(t.time for t in forq.traces("end") if t.job in set(others))
    again = next(t for t in forq.traces("end") if t.job == second_chance)
    assert again.pid == forq.child("lane", "retry")["pid"]
    print(f"the lane started {(again.time - ended) * 1000:.1f} ms after the last job of main")
    assert -0.02 < again.time - ended < 1.0
