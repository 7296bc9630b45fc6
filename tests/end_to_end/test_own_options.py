"""Options of one job with a real supervisor: forqctl push gives them, the worker obeys them."""

import time
from collections.abc import Iterator

import pytest

from forq.errors import JobDead, UsageError
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def test_retries_and_delays_of_one_job(forq: Forq) -> None:
    forq.create("fails", "fail", max_retries=5, min_backoff="1h", max_backoff="1h")
    queue = forq.client().queue("fails")
    once = forq.ctl("push", "fails", "1", "--max-retries", "0")
    wait_until(lambda: queue.job(once)["state"] == "dead", what="it is dead after one attempt")
    thrice = forq.ctl("push", "fails", "1", "--max-retries", "2", "--backoff", "10ms")
    wait_until(lambda: queue.job(thrice)["state"] == "dead", what="it is dead after three attempts")
    assert len(queue.job(thrice)["attempts"]) == 3
    plain = forq.ctl("push", "fails", "1")
    wait_until(lambda: queue.job(plain)["state"] == "scheduled", what="it waits for the backoff of its queue")


def test_a_job_that_has_expired_does_not_run(forq: Forq) -> None:
    forq.create("traced", "record")
    forq.ctl("pause", "traced")
    job = forq.ctl("push", "traced", "1", "--expires-in", "50ms", "--job-timeout", "5m")
    other = forq.ctl("push", "traced", "1", "--expires-in", "1h")
    shown = forq.ctl("job", "traced", job).splitlines()
    assert "timeout = 5m" in next(line for line in shown if line.startswith("options"))
    assert next(line for line in shown if line.startswith("expires_at")).split()[1].startswith("20")
    expires_at = forq.client().queue("traced").job(job).get("expires_at", 0.0)
    wait_until(lambda: time.time() > expires_at, what="it has expired")
    forq.ctl("resume", "traced")
    wait_until(lambda: forq.client().queue("traced").job(job)["state"] == "dead", what="it is dead")
    wait_until(lambda: [each.job for each in forq.traces("end")] == [other], what="only the other one has run")
    error = forq.client().queue("traced").job(job).get("error")
    assert isinstance(error, dict)
    assert "expired" in error["message"]


def test_a_result_of_one_job_is_kept(forq: Forq) -> None:
    forq.create("results", "noop")
    queue = forq.client().queue("results")
    kept = forq.ctl("push", "results", "1", "--keep-done", "1h")
    assert queue.wait(kept, 30) is None
    plain = forq.ctl("push", "results", "1")
    with pytest.raises(UsageError, match="keeps no results"):
        queue.wait(plain, 30)


def test_the_timeout_of_one_job(forq: Forq) -> None:
    forq.create("sleeps", "sleep", timeout="1h", max_timeouts=0, keep_done="1h")
    queue = forq.client().queue("sleeps")
    job = forq.ctl("push", "sleeps", "3600", "--job-timeout", "200ms")
    with pytest.raises(JobDead, match="Timeout"):
        queue.wait(job, 60)
