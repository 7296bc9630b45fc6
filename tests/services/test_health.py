"""Health checks on a snapshot: which states are faults, and which only look like one."""

from dataclasses import replace
from typing import Any

import pytest

from forq.broker.inspect import Counts
from forq.health import faults_of_queue, faults_of_supervisor
from forq.services.metrics import faults_in
from forq.services.snapshot import Activity, Snapshot
from tests.support.drive.metrics import NOW_NS, make_snapshot, queue_counts, queue_stats, queue_status

HEALTH_SECONDS = 60.0
AGO = int(100e9)


def limited(may_begin: int, workers: int) -> Counts:
    limits = {"may_begin": may_begin, "limited_workers": workers}
    return queue_counts(waiting=3, oldest_waiting_seconds=100.0, limits=limits)


def snapshot(
    counts: Counts | None = None, activity: Activity | None = None, last_ns: int = 0, capacity: Any = (), **queue: Any
) -> Snapshot:
    """A queue with a job that has waited for 100 s for no valid reason."""
    stuck = queue_counts(waiting=3, oldest_waiting_seconds=100.0)
    return make_snapshot(
        [queue_status("q", **queue)],
        counts={"q": counts or stuck},
        activity={"q": activity or Activity(started_ns=NOW_NS - AGO)},
        stats={"q": queue_stats(last_ns=last_ns)},
        capacity_waiting=list(capacity),
    )


def checks(seen: Snapshot) -> list[tuple[str, str | None]]:
    return [(fault.check, fault.queue) for fault in faults_in(seen, HEALTH_SECONDS)]


def test_waiting_jobs_without_any_activity_are_a_fault() -> None:
    assert checks(snapshot()) == [("stuck", "q")]
    (fault,) = faults_in(snapshot(), HEALTH_SECONDS)
    assert fault.describe() == {
        "check": "stuck",
        "queue": "q",
        "reason": "3 jobs wait, the oldest for 100 s, and no job has started or ended for 100 s",
    }


def test_a_queue_that_has_never_started_a_job_is_stuck_too() -> None:
    assert checks(snapshot(activity=Activity())) == [("stuck", "q")]


@pytest.mark.parametrize(
    "excuse",
    [
        {"counts": queue_counts(waiting=0, oldest_waiting_seconds=None)},
        {"counts": queue_counts(waiting=3, oldest_waiting_seconds=59.0)},
        {"counts": queue_counts(waiting=3, oldest_waiting_seconds=100.0, paused=True)},
        {
            "counts": queue_counts(
                waiting=3, oldest_waiting_seconds=100.0, limits={"may_begin": 0, "limited_workers": 0}
            )
        },
        {
            "counts": queue_counts(
                waiting=3, oldest_waiting_seconds=100.0, limits={"may_begin": 1, "limited_workers": 1}
            )
        },
        {"activity": Activity(started_ns=NOW_NS - int(59e9))},
        {"last_ns": NOW_NS - int(59e9)},
        {"activity": Activity(started_ns=NOW_NS - AGO, running=[(100.0, 101.0)])},
        {"activity": Activity(started_ns=NOW_NS - AGO, running=[(200.0, 101.0), (100.0, 101.0)])},
        {"activity": Activity(started_ns=NOW_NS - AGO, running=[(59.0, 0.0)])},
        {"state": "draining"},
        {"mode": "on_request"},
        {"capacity": [{"worker": "q main"}]},
        {"capacity": [{"worker": "q retry"}]},
        {"main": "starting", "uptime_seconds": 59.0},
    ],
)
def test_a_queue_with_a_valid_reason_to_wait_is_healthy(excuse: dict[str, Any]) -> None:
    assert checks(snapshot(**excuse)) == []


@pytest.mark.parametrize(
    "no_excuse",
    [
        {
            "counts": queue_counts(
                waiting=3, oldest_waiting_seconds=100.0, limits={"may_begin": 1, "limited_workers": 0}
            )
        },
        {"counts": queue_counts(waiting=0, retry=1, oldest_waiting_seconds=100.0)},
        {"counts": queue_counts(waiting=0, scheduled=1, overdue=1, oldest_waiting_seconds=100.0)},
        {"activity": Activity(started_ns=NOW_NS - AGO, running=[(102.0, 101.0)])},
        {"activity": Activity(started_ns=NOW_NS - AGO, running=[(100.0, 0.0)])},
        {"last_ns": NOW_NS - int(61e9)},
        {"capacity": [{"worker": "other main"}]},
        {"main": "starting", "uptime_seconds": 61.0},
    ],
)
def test_a_queue_without_a_valid_reason_to_wait_is_stuck(no_excuse: dict[str, Any]) -> None:
    assert checks(snapshot(**no_excuse)) == [("stuck", "q")]


@pytest.mark.parametrize("state", ["flapping", "config_error", "stopped"])
def test_a_queue_that_is_not_served_is_a_fault(state: str) -> None:
    assert checks(snapshot(state=state, pid=None)) == [("state", "q")]


def test_a_queue_that_is_shutting_down_is_not_checked() -> None:
    assert checks(snapshot(state="stopped", main="stopping")) == []


def test_a_running_queue_without_a_main_process_is_a_fault() -> None:
    assert checks(snapshot(pid=None)) == [("process", "q")]
    assert checks(snapshot(main="backoff")) == [("process", "q")]


def test_an_unreachable_supervisor_or_redis_is_a_fault() -> None:
    assert checks(replace(snapshot(), status=None, status_error="no answer")) == [("supervisor", None)]
    assert checks(replace(snapshot(), round_trip_seconds=None, counts={})) == [("redis", None)]


def test_a_queue_that_never_finishes_importing_is_stuck_once_its_jobs_have_waited() -> None:
    assert checks(snapshot(state="starting", main="starting", uptime_seconds=100.0)) == [("stuck", "q")]


def test_a_stopped_queue_and_an_unwritable_failed_log_are_faults_only_for_the_check_command() -> None:
    seen = snapshot(state="stopped")
    assert seen.status is not None
    seen.status["supervisor"]["failed_log"] = {"ok": False, "errors": {"q": "no space"}}
    assert checks(seen) == []
    found = [*faults_of_supervisor(seen.status), *faults_of_queue(seen.status["queues"][0])]
    assert [(fault.check, fault.text) for fault in found] == [
        ("failed_log", "failed log of queue q: no space"),
        ("ending", "queue q is stopped"),
    ]
