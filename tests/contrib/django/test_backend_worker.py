"""Tasks of Django's framework under a real supervisor: `forq run --app forq.contrib.django.worker:app`."""

# Django's own Task and TaskResult take no type arguments.
from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone

from forq.contrib.django import project
from forq.contrib.django.project import WORKER_PATH
from forq.contrib.django.task_framework import TaskResult
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

SETTINGS = """
[queues.default]
max_stalls = 1
"""


@pytest.fixture(scope="module")
def forq(_django: None) -> Iterator[Forq]:
    """A supervisor of the project, which the tests of this module share."""
    # Its import reads the environment.
    from tests.support.django_project import task_settings

    environment = {
        "DJANGO_SETTINGS_MODULE": task_settings.__name__,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "DJANGO_TEST_FOLDER": os.environ["DJANGO_TEST_FOLDER"],
    }
    forq = Forq(settings=SETTINGS, environment=environment)
    forq.arguments = ["--app", WORKER_PATH]
    patch = pytest.MonkeyPatch()
    try:
        forq.start()
        patch.setenv("FORQ_REDIS", forq.url)
        patch.setattr(project, "_app", None)
        with override_settings(INSTALLED_APPS=task_settings.INSTALLED_APPS, TASKS=task_settings.TASKS):
            yield forq
            if project._app is not None:
                project._app.client.close()
    finally:
        patch.undo()
        forq.remove()


@pytest.fixture
def tasks(forq: Forq) -> Any:
    from tests.support.django_project.notices import tasks

    return tasks


def finished(result: TaskResult[Any]) -> Any:
    def is_finished() -> bool:
        result.refresh()
        return result.is_finished

    wait_until(is_finished, 30, f"{result.id} is finished")
    return result


def test_tasks_run_in_the_processes_of_their_queues(forq: Forq, tasks: Any) -> None:
    sums = [tasks.add.enqueue(number, more=1) for number in range(20)]
    described, counted = tasks.describe.enqueue(), tasks.count.enqueue(3)
    assert [finished(each).return_value for each in sums] == list(range(1, 21))
    assert finished(described).return_value["pid"] == forq.child("default")["pid"]
    number, on_loop, queue = finished(counted).return_value
    assert (number >= 1, on_loop, queue) == (True, True, "mails")
    assert {"default", "mails", "urgent"} <= {each["name"] for each in forq.status()["queues"]}


def test_a_task_is_running_until_it_ends(forq: Forq, tasks: Any, tmp_path: Path) -> None:
    file = tmp_path / "go"
    result = tasks.wait_for.enqueue(str(file))

    def running() -> bool:
        result.refresh()
        return bool(result.status == "RUNNING")

    wait_until(running, what="the task runs")
    assert (result.attempts, result.finished_at) == (1, None)
    assert result.enqueued_at <= result.started_at == result.last_attempted_at
    file.touch()
    assert finished(result).status == "SUCCESSFUL"
    assert result.finished_at >= result.started_at


def test_a_failed_task_is_dead_and_can_be_retried_by_hand(forq: Forq, tasks: Any) -> None:
    result = finished(tasks.refuse.enqueue("no"))
    assert (result.status, result.attempts) == ("FAILED", 1)
    assert result.errors[0].exception_class is tasks.Refused
    job = result.id.partition(":")[2]
    assert job in forq.ctl("dead", "list", "default")
    assert forq.client().queue("default").job(job)["error"]["message"] == "no"


def test_a_task_that_crashes_its_process_is_repeated_and_then_failed(forq: Forq, tasks: Any) -> None:
    result = finished(tasks.crash.enqueue())
    assert (result.status, result.attempts) == ("FAILED", 2)
    assert [error.traceback for error in result.errors] == [
        *["its process ended: exit_9\n"] * 2,
        "StallError: attempts that crashed their process: 2; max_stalls is 1\n",
    ]
    assert all(issubclass(error.exception_class, Exception) for error in result.errors)


def test_a_deferred_task_runs_at_its_time(forq: Forq, tasks: Any) -> None:
    when = timezone.now() + timedelta(seconds=0.3)
    result = finished(tasks.add.using(run_after=when).enqueue(1))
    assert result.return_value == 1
    assert result.started_at >= when
    assert result.enqueued_at < when
