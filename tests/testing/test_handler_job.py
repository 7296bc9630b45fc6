"""Jobs for calling handlers directly."""

import pickle
from datetime import UTC, datetime

import pytest

from forq import Job, testing
from forq.errors import InvalidData, UsageError


def test_a_new_job_has_usual_values() -> None:
    job = testing.job()
    assert isinstance(job, Job)
    assert (job.queue, job.type, job.priority, job.attempt, job.is_last, job.should_stop) == (
        *("testing", None, 5, 1),
        *(False, False),
    )
    assert (job.identifier, job.tick, job.snoozes, job.trace) == (job.id, None, 0, None)
    assert testing.job().id != job.id


def test_fields_are_set() -> None:
    tick = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    job = testing.job(id="x", queue="mails", type="send", attempt=3, tick=tick, enqueued_at=tick, is_last=True, fence=7)
    assert (job.id, job.queue, job.type, job.retry_count, job.attempt) == ("x", "mails", "send", 2, 3)
    assert (job.tick, job.enqueued_at, job.is_last, job.fence) == (tick, tick.timestamp(), True, 7)
    assert testing.job(stall_count=1, timeout_count=1).attempt == 3
    assert testing.job(attempt=3, stall_count=1).retry_count == 1


def test_reports_of_progress_are_kept() -> None:
    job = testing.job()
    job.progress(0.5, "half")
    job.progress(1)
    assert job.reports == [(0.5, "half"), (1.0, "")]
    with pytest.raises(InvalidData):
        job.progress(2)


def test_a_handler_can_be_asked_to_stop() -> None:
    job = testing.job()
    job.should_stop = True
    assert job.should_stop


def test_results_of_other_jobs_can_be_given() -> None:
    job = testing.job(results=[{"a": [1]}, None])
    assert job.results() == [{"a": [1]}, None]
    assert pickle.loads(pickle.dumps(job)).results() == [{"a": [1]}, None]
    assert testing.job(results=[]).results() == []
    with pytest.raises(UsageError, match="with_results=True"):
        testing.job().results()
    with pytest.raises(InvalidData, match=r"results\[1\] is not JSON: result is of type set"):
        testing.job(results=[1, {2}])


def test_wrong_fields_are_refused() -> None:
    with pytest.raises(UsageError, match="no field 'idd'; did you mean id"):
        testing.job(idd="x")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="either attempt or the counts"):
        testing.job(attempt=2, retry_count=5)


def test_a_job_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(testing.job(id="x"))).id == "x"
