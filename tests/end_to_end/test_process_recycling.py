"""A queue's process is replaced after max_jobs, at max_age and at max_memory, without a gap or a loss."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def jobs_by_pid(forq: Forq, queue: str) -> Counter[int]:
    return Counter(trace.pid for trace in forq.traces("end") if trace.queue == queue)


def test_after_max_jobs_the_process_is_replaced(forq: Forq) -> None:
    forq.create("jobs", "record", max_jobs=100)
    ids = forq.client().queue("jobs").enqueue_many(range(1000))
    wait_until(lambda: forq.queue_status("jobs")["done"] == 1000, what="all ran")
    by_pid = jobs_by_pid(forq, "jobs")
    assert set(by_pid.values()) == {100}
    assert sorted(trace.job for trace in forq.traces("end") if trace.queue == "jobs") == sorted(ids), "each once"
    assert forq.child("jobs")["restarts"] == 0, "recycling does not count as a death"
    assert "reason=max_jobs = 100" in forq.log


def test_at_max_age_the_process_is_replaced_after_its_job(forq: Forq) -> None:
    forq.create("age", "sleep", max_age="500ms")
    queue = forq.client().queue("age")
    long = queue.enqueue(2.5)
    wait_until(lambda: [t for t in forq.traces("start") if t.job == long], what="it started")
    pid = forq.child("age")["pid"]
    wait_until(lambda: forq.child("age")["pid"] != pid, what="its successor is there")
    queue.enqueue(0, id="next")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == "next"], what="the successor works already")
    assert not [t for t in forq.traces("end") if t.job == long], "while the old process finishes its job"
    wait_until(lambda: [t for t in forq.traces("end") if t.job == long], what="the long job ended")
    assert len([t for t in forq.traces("start") if t.job == long]) == 1


@pytest.mark.fault("handler leaks memory")
def test_at_max_memory_the_process_is_replaced(forq: Forq) -> None:
    forq.create("memory", "sleep", max_memory="1mb")
    pid = forq.wait_for_child("memory")["pid"]
    queue = forq.client().queue("memory")
    deadline = time.monotonic() + 20
    while forq.child("memory")["pid"] == pid and time.monotonic() < deadline:
        queue.enqueue(0.2)
        wait_until(lambda: forq.queue_status("memory")["waiting"] == 0)
    assert forq.child("memory")["pid"] != pid
    assert "reason=max_memory = 1048576, used " in forq.log
