"""Retries with a real supervisor: on time, as the handler requests, and visible."""

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def starts(forq: Forq, job_id: str) -> list[float]:
    return [t.time for t in forq.traces("start") if t.job == job_id]


@pytest.mark.spec("Q36", "Q37")
def test_a_job_that_fails_twice_runs_a_third_time_on_time(forq: Forq) -> None:
    forq.create("flaky", "fail_until", min_backoff="200ms", max_backoff="1s")
    job_id = forq.ctl("push", "flaky", "2")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])
    first, second, third = starts(forq, job_id)
    assert 0.2 <= second - first < 1.0
    assert 0.4 <= third - second < 1.2
    wait_until(lambda: forq.queue_status("flaky")["done"] == 1)


@pytest.mark.spec("Q35")
def test_permanent_fails_at_once_and_retry_at_is_kept(forq: Forq) -> None:
    forq.create("asking", "ask", min_backoff="100s", max_backoff="100s")
    forever = forq.ctl("push", "asking", '"permanent"')
    wait_until(lambda: forq.queue_status("asking")["dead"] == 1)
    assert json.loads(forq.ctl("job", "asking", forever, "--json"))["error"]["kind"] == "permanent"
    soon = forq.ctl("push", "asking", "0.3")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == soon])
    first, second = starts(forq, soon)
    assert 0.3 <= second - first < 1.0


def test_a_scheduled_job_is_shown_with_its_attempts(forq: Forq) -> None:
    forq.create("shown", "fail_until", min_backoff="100s", max_backoff="100s")
    job_id = forq.ctl("push", "shown", "5")
    wait_until(lambda: forq.queue_status("shown")["scheduled"] == 1)
    job = json.loads(forq.ctl("job", "shown", job_id, "--json"))
    assert (job["state"], job["retry_count"], len(job["attempts"])) == ("scheduled", 1, 1)
    assert (job["attempts"][0]["outcome"], job["attempts"][0]["error"]["name"]) == ("failed", "ValueError")
    assert 90 < job["run_at"] - time.time() < 110


def test_a_hundred_timers_are_on_time_while_workers_are_idle(forq: Forq) -> None:
    forq.create("timers", "ask", concurrency=2)
    ids = forq.client().queue("timers").enqueue_many([0.1 + n * 0.01 for n in range(100)])
    wait_until(lambda: set(ids) <= {t.job for t in forq.traces("end")})
    late = []
    for number, job_id in enumerate(ids):
        first, second = starts(forq, job_id)
        late.append(second - first - (0.1 + number * 0.01))
    late.sort()
    print(f"lateness of 100 timers: median {late[50] * 1000:.1f} ms, worst {late[-1] * 1000:.1f} ms")
    assert min(late) > -0.005
    # If the timers were late, all would be; on a busy machine some workers are.
    assert late[25] < 0.1
