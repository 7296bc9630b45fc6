"""Jobs that this version of an app cannot run: snoozed during a rolling deploy, then dead."""

import asyncio
from typing import Any

import pytest

import forq
from forq.app.tasks import DEPLOY_SECONDS, DEPLOY_SNOOZES
from forq.job import Job

app = forq.App("shop")


@app.task
def send(to: str) -> None:
    """Its calls must not happen here."""
    raise AssertionError(to)


@app.task
async def asend(to: str) -> None:
    raise AssertionError(to)


ENQUEUED = 1_700_000_000.0


def run(job_type: str | None, data: Any, age_seconds: float, snoozes: int) -> BaseException:
    fence = int((ENQUEUED + age_seconds) * 1e6)
    job = Job("shop", "j1", "j1", job_type, 5, ENQUEUED, fence, snoozes=snoozes)

    async def call() -> None:
        result = app(data, job)
        if asyncio.iscoroutine(result):
            await result

    with pytest.raises(forq.ForqError) as caught:
        asyncio.run(call())
    return caught.value


UNFIT = [
    ("unknown", {}, "app 'shop' has no task 'unknown'; it has: asend, send"),
    ("send", {"other": 1}, "the arguments do not fit task send, send(to: str) -> None: it has no parameter 'other'"),
    ("asend", {}, "the arguments do not fit task asend, asend(to: str) -> None: the data lacks to"),
]


@pytest.mark.parametrize(("job_type", "data", "reason"), UNFIT)
@pytest.mark.parametrize(("age", "snoozes"), [(0, 0), (DEPLOY_SECONDS - 1, 1000), (1e6, 0), (1e6, DEPLOY_SNOOZES - 1)])
def test_a_job_that_another_version_may_know_is_snoozed(
    job_type: str | None, data: Any, reason: str, age: float, snoozes: int
) -> None:
    raised = run(job_type, data, age, snoozes)
    assert isinstance(raised, forq.Snooze)
    assert raised.seconds == 15
    assert str(raised) == f"{reason}; waiting for a worker that knows it"


@pytest.mark.parametrize(("job_type", "data", "reason"), UNFIT)
def test_after_ten_minutes_it_is_dead_with_the_signature_in_its_message(
    job_type: str | None, data: Any, reason: str
) -> None:
    raised = run(job_type, data, DEPLOY_SECONDS, DEPLOY_SNOOZES)
    assert isinstance(raised, forq.Permanent)
    assert str(raised) == reason


@pytest.mark.parametrize("job_type", [None, ""])
def test_a_job_without_a_type_is_dead_at_once(job_type: str | None) -> None:
    raised = run(job_type, {"to": "a"}, age_seconds=0, snoozes=0)
    assert isinstance(raised, forq.Permanent)
    assert str(raised) == (
        "app 'shop' cannot run a job without a type, which names the task; it has: asend, send; "
        "enqueue it with TASK.enqueue(…), or run: forqctl push shop --type TASK JSON"
    )
