"""kill -9 at each point between an effect and its record, or between a record and its effect."""

import json
from pathlib import Path

import pytest

from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until, whole_lines
from tests.support.faults.crash import Crash, crashing

pytestmark = pytest.mark.timeout(120)


def wait_until_processed(forq: Forq, name: str, count: int = 1) -> None:
    """Waits until `count` jobs are done and the queue is empty."""
    queue = forq.client().queue(name)

    def done() -> bool:
        status = queue.status()
        held = [status[state] for state in ("waiting", "scheduled", "active", "retry", "in_flight")]
        return status["done"] == count and not any(held)

    wait_until(done, what=f"{count} jobs of {name} are done")


def run_one(crash: Crash, function: str = "sleep", data: object = 0, **options: object) -> list[int]:
    """Runs one job that meets the crash; returns the stall counts that its attempts saw."""
    forq = crash.forq
    forq.create("work", function, **options)
    forq.create("beside", "record")
    forq.wait_for_child("work")
    forq.client().queue("work").enqueue(data, id="j")
    died = crash.wait()
    wait_until_processed(forq, "work")
    wait_until(lambda: forq.child("work")["pid"] != died, what="its death is noticed")
    forq.client().queue("beside").enqueue(1)
    wait_until_processed(forq, "beside")
    assert forq.child("beside")["restarts"] == 0, "other queues are not touched"
    return [trace.stalls for trace in forq.traces("start") if trace.queue == "work"]


@pytest.mark.fault("worker killed before it begins")
@pytest.mark.parametrize("point", ["moved", "claimed"])
def test_a_worker_killed_before_it_begins_leaves_an_uncounted_job(redis_url: str, tmp_path: Path, point: str) -> None:
    with crashing(point, tmp_path, redis=redis_url) as crash:
        assert run_one(crash) == [0]


@pytest.mark.fault("worker killed mid-job")
def test_a_worker_killed_as_its_handler_is_called_counts_that_job(redis_url: str, tmp_path: Path) -> None:
    with crashing("begun", tmp_path, redis=redis_url) as crash:
        assert run_one(crash) == [1]


@pytest.mark.fault("worker killed mid-job")
def test_a_worker_killed_as_its_handler_returns_runs_the_job_again_and_counts_it(
    redis_url: str, tmp_path: Path
) -> None:
    with crashing("ran", tmp_path, redis=redis_url) as crash:
        assert run_one(crash) == [0, 1]


@pytest.mark.fault("worker killed before it settles")
def test_jobs_run_before_the_kill_are_settled_from_the_scoreboard_and_run_once(redis_url: str, tmp_path: Path) -> None:
    with crashing("settling", tmp_path, redis=redis_url) as crash:
        assert run_one(crash) == [0]


@pytest.mark.fault("worker killed before it settles")
def test_an_unreported_failure_runs_again_and_is_counted(redis_url: str, tmp_path: Path) -> None:
    with crashing("settling", tmp_path, redis=redis_url) as crash:
        assert run_one(crash, "fail_until", 1, min_backoff="10ms") == [0, 1, 1]


@pytest.mark.fault("worker killed before it settles")
@pytest.mark.parametrize(("function", "data", "starts"), [("sleep", 0, 1), ("fail_until", 1, 2)])
def test_jobs_settled_with_a_lost_reply_stay_settled(
    redis_url: str, tmp_path: Path, function: str, data: int, starts: int
) -> None:
    with crashing("settled", tmp_path, redis=redis_url) as crash:
        assert run_one(crash, function, data, min_backoff="10ms") == [0] * starts


@pytest.mark.fault("worker killed before it settles")
@pytest.mark.parametrize("point", ["releasing", "released"])
def test_a_gate_killed_around_a_release_loses_no_item_and_releases_none_twice(
    redis_url: str, tmp_path: Path, point: str
) -> None:
    with crashing(point, tmp_path, redis=redis_url) as crash:
        forq = crash.forq
        # Long, so that no item expires.
        options = [f"--set={option}" for option in ("release_interval=10ms", "release_retries=1000")]
        forq.ctl("create", "gate", "--mode", "auto_release", *options)
        forq.client().queue("gate").enqueue_many([{"n": n} for n in range(3)])
        crash.wait()
        got = [json.loads(forq.ctl("await", "gate", "--wait", "30s", "--json"))["data"]["n"] for _ in range(3)]
        assert sorted(got) == [0, 1, 2]
        wait_until_processed(forq, "gate", 3)


@pytest.mark.fault("service killed half way")
@pytest.mark.parametrize("point", ["recovering", "recovered"])
def test_pulse_killed_while_it_recovers_a_worker_counts_the_job_once(
    redis_url: str, tmp_path: Path, point: str
) -> None:
    with crashing(point, tmp_path, redis=redis_url) as crash:
        forq = crash.forq
        forq.create("work", "act")
        forq.client().queue("work").enqueue({"do": "die", "times": 1}, id="j")
        crash.wait()
        wait_until_processed(forq, "work")
        assert [trace.stalls for trace in forq.traces("start")] == [0, 1]


@pytest.mark.fault("service killed half way")
@pytest.mark.parametrize("point", ["promoting", "promoted"])
def test_pulse_killed_while_a_job_becomes_due_loses_none_and_runs_none_twice(
    redis_url: str, tmp_path: Path, point: str
) -> None:
    with crashing(point, tmp_path, redis=redis_url) as crash:
        forq = crash.forq
        forq.create("later", "sleep")
        forq.client().queue("later").enqueue(0, run_in=0.2)
        crash.wait()
        wait_until_processed(forq, "later")
        assert len(forq.traces("start")) == 1


@pytest.mark.fault("service killed half way")
@pytest.mark.parametrize(("point", "copies"), [("collected", 1), ("written", 2)])
def test_a_scribe_killed_around_a_line_writes_it_twice_rather_than_never(
    redis_url: str, tmp_path: Path, point: str, copies: int
) -> None:
    with crashing(point, tmp_path, redis=redis_url) as crash:
        forq = crash.forq
        forq.create("doomed", "fail", max_retries=0)
        forq.client().queue("doomed").enqueue(1, id="j")
        crash.wait()
        log = forq.state_dir / "logs" / "doomed" / "failed.jsonl"
        wait_until(lambda: len(whole_lines(log)) == copies, what="it is written")
        assert [json.loads(line)["id"] for line in log.read_text().splitlines()] == ["j"] * copies
        assert forq.queue_status("doomed")["dead"] == 1


@pytest.mark.fault("service killed half way")
@pytest.mark.parametrize("point", ["storing", "stored"])
def test_a_push_fails_when_the_clerk_is_killed_and_the_same_token_stores_it_once(
    redis_url: str, tmp_path: Path, point: str
) -> None:
    with crashing(point, tmp_path, redis=redis_url) as crash:
        forq = crash.forq
        forq.create("work", "sleep")
        first = forq.run_ctl("push", "work", "0", "--token", "order-1")
        assert first.returncode != 0, "the outcome is unknown"
        crash.wait()
        again = wait_until(
            lambda: (done := forq.run_ctl("push", "work", "0", "--token", "order-1")).returncode == 0 and done
        )
        wait_until_processed(forq, "work")
        assert [trace.job for trace in forq.traces("start")] == [again.stdout.strip()]
