"""ForqBackend for Django's task framework, with the worker's code in the test's process."""

# Django's own Task and TaskResult take no type arguments.
from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import django
import pytest
from django import conf
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import override_settings

from forq.app.tasks import JobOptions, Sender
from forq.contrib.django.backend import ForqBackend, register_tasks, to_forq_priority
from forq.contrib.django.outbox import deliver
from forq.contrib.django.project import DjangoApp, make_app, project_app
from forq.contrib.django.task_framework import (
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    task_enqueued,
    task_finished,
    task_started,
)
from forq.errors import InvalidData, UnknownQueue
from tests.docs.pages import ROOT, blocks
from tests.support.drive.server import Server
from tests.support.drive.worker_here import run_waiting

Run = Callable[..., int]


@pytest.fixture
def tasks(project: None) -> Iterator[Any]:
    """The module notices.tasks."""
    from tests.support.django_project import task_settings

    with override_settings(INSTALLED_APPS=task_settings.INSTALLED_APPS, TASKS=task_settings.TASKS):
        from tests.support.django_project.notices import tasks

        yield tasks


@pytest.fixture
def run(tasks: Any, redis_url: str) -> Run:
    return lambda queue="default": run_waiting(redis_url, project_app(), queue)


@pytest.fixture
def signals() -> Iterator[list[tuple[str, str, str]]]:
    """Signal, status and errors, as they were when it was sent."""
    sent: list[tuple[str, str, str]] = []
    receivers = {}
    for name, signal in (("enqueued", task_enqueued), ("started", task_started), ("finished", task_finished)):

        def receive(sender: type, task_result: TaskResult[Any], name: str = name, **_: Any) -> None:
            assert sender is ForqBackend
            sent.append((name, str(task_result.status), " ".join(each.traceback for each in task_result.errors)[-11:]))

        receivers[signal] = receive
        signal.connect(receive)
    yield sent
    for signal, receive in receivers.items():
        signal.disconnect(receive)


def test_a_task_runs_and_its_result_has_all_fields(tasks: Any, run: Run) -> None:
    before = datetime.now(UTC)
    result = tasks.add.enqueue(1, 2, other=3.5)
    assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
    assert result.started_at is result.last_attempted_at is result.finished_at is None
    assert result.id.startswith("default:")
    assert len(result.id) < 64
    assert tasks.add.get_result(result.id) == result
    with pytest.raises(ValueError, match="has not finished"):
        _ = result.return_value
    assert run() == 1
    assert result.status == "READY", "not refreshed"
    result.refresh()
    assert (result.status, result.return_value, result.errors, result.attempts) == ("SUCCESSFUL", 6.5, [], 1)
    times = [result.enqueued_at, result.started_at, result.last_attempted_at, result.finished_at]
    assert before < times[0] <= times[1] == times[2] <= times[3] <= datetime.now(UTC)
    assert (result.args, result.kwargs, result.task, result.backend) == ([1, 2], {"other": 3.5}, tasks.add, "default")


async def _through_asyncio(tasks: Any) -> TaskResult[Any]:
    result: TaskResult[Any] = await tasks.count.aenqueue(7)
    assert await tasks.count.aget_result(result.id) == result
    return result


def test_a_coroutine_runs_on_the_event_loop_and_may_use_the_database(tasks: Any, run: Run) -> None:
    from asgiref.sync import async_to_sync

    result = async_to_sync(_through_asyncio)(tasks)
    assert run("mails") == 1
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", [1, True, "mails"])


def test_a_failure_is_final_and_has_class_and_traceback(tasks: Any, run: Run) -> None:
    own, builtin = tasks.refuse.enqueue("no\nway"), tasks.raise_in_job.enqueue("no")
    assert run() == 2
    for result, kind, end in ((own, tasks.Refused, "Refused: no\nway\n"), (builtin, ValueError, "ValueError: no\n")):
        result.refresh()
        assert (result.status, result.is_finished, result.attempts) == ("FAILED", True, 1)
        (error,) = result.errors
        assert error.exception_class is kind
        assert error.traceback.startswith("Traceback (most recent call last)")
        assert error.traceback.endswith(end)
        assert "forq/contrib" not in error.traceback, "only frames of the task"
        assert result.enqueued_at <= result.started_at <= result.finished_at
        with pytest.raises(ValueError, match="Task failed"):
            _ = result.return_value
    assert len(project_app().client.queue("default").dead().jobs) == 2


def test_retries_of_the_options_count_as_attempts(tasks: Any, run: Run, signals: list[Any]) -> None:
    result = tasks.describe.using(backend="patient", priority=7).enqueue(fail_until=2)
    assert run() == 3
    result.refresh()
    assert result.attempts == 3
    assert [error.traceback for error in result.errors] == ["Refused: attempt 1\n", "Refused: attempt 2\n"]
    assert result.started_at < result.last_attempted_at <= result.finished_at
    seen = result.return_value
    assert (seen["attempt"], seen["id"], seen["status"], seen["priority"]) == (3, result.id, "RUNNING", 7)
    assert (seen["backend"], seen["errors"]) == ("patient", ["Refused: attempt 1\n", "Refused: attempt 2\n"])
    assert [name for name, *_ in signals] == ["enqueued", "started", "started", "started", "finished"]
    with pytest.raises(TaskResultDoesNotExist):
        tasks.describe.get_result(result.id)  # the task of the other backend


def test_the_last_failure_has_its_traceback_and_a_signal(tasks: Any, run: Run, signals: list[Any]) -> None:
    result = tasks.describe.using(backend="patient").enqueue(fail_until=9)
    assert run() == 3
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == ("FAILED", 3, 3)
    assert result.errors[2].exception_class is tasks.Refused
    assert [(name, status) for name, status, _ in signals][-2:] == [("started", "RUNNING"), ("finished", "FAILED")]
    assert signals[-1][2] == ": attempt 3\n"[-11:]


def test_signals_are_sent_by_producer_and_worker_and_their_errors_change_nothing(
    tasks: Any, run: Run, signals: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(sender: type, **_: Any) -> None:
        raise RuntimeError("a broken receiver")

    for signal in (task_enqueued, task_started, task_finished):
        signal.connect(fail)
    try:
        done, failed, on_loop = tasks.add.enqueue(), tasks.refuse.enqueue("no"), tasks.count.enqueue(1)
        assert run() + run("mails") == 3
    finally:
        for signal in (task_enqueued, task_started, task_finished):
            signal.disconnect(fail)
    for result, status in ((done, "SUCCESSFUL"), (failed, "FAILED"), (on_loop, "SUCCESSFUL")):
        result.refresh()
        assert result.status == status
    steps = [(name, status) for name, status, _ in signals]
    assert steps == [("enqueued", "READY")] * 3 + [
        *[("started", "RUNNING"), ("finished", "SUCCESSFUL")],
        *[("started", "RUNNING"), ("finished", "FAILED")],
        *[("started", "RUNNING"), ("finished", "SUCCESSFUL")],
    ]


def test_a_snoozed_task_is_not_finished(tasks: Any, run: Run, signals: list[Any]) -> None:
    result = tasks.snooze.enqueue(60)
    assert run() == 1
    result.refresh()
    assert (result.status, result.attempts, result.errors) == ("READY", 0, [])
    assert [name for name, *_ in signals] == ["enqueued", "started"]


@pytest.mark.parametrize(
    ("value", "stored"), [((1, b"two", {"three": None}), [1, "two", {"three": None}]), (None, None), ("ü", "ü")]
)
def test_return_values_are_normalised(tasks: Any, run: Run, value: Any, stored: Any) -> None:
    result = tasks.give.enqueue(value)
    run()
    result.refresh()
    assert result.return_value == stored


def test_a_return_value_that_is_not_json_fails_the_task(tasks: Any, run: Run) -> None:
    result = tasks.give.enqueue("object")
    run()
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", TypeError)
    assert "Unsupported type" in result.errors[0].traceback


def test_a_return_value_that_was_too_long_is_not_shown_as_none(tasks: Any, run: Run) -> None:
    result = tasks.give_many.enqueue(2_000_000)
    run()
    result.refresh()
    assert result.status == "SUCCESSFUL"
    with pytest.raises(ValueError, match="its return value is not stored: it is longer than max_data"):
        _ = result.return_value


@pytest.mark.parametrize(
    ("value", "error"), [(datetime.now(), TypeError), (float("nan"), ValueError), (2**70, InvalidData)]
)
def test_arguments_must_be_json(tasks: Any, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        tasks.add.enqueue(value)


def test_choices_and_numbers_as_keys_become_what_json_has(tasks: Any, run: Run) -> None:
    result = tasks.give.enqueue({1: TaskResultStatus.READY})
    assert result.args == [{"1": "READY"}]
    assert type(result.args[0]["1"]) is str
    assert tasks.give.get_result(result.id) == result
    run()
    result.refresh()
    assert result.return_value == {"1": "READY"}


def test_priorities_keep_their_order() -> None:
    mapped = [to_forq_priority(priority) for priority in range(-100, 101)]
    assert mapped == sorted(mapped, reverse=True)
    assert set(mapped) == set(range(10))
    assert [to_forq_priority(each) for each in (-100, -1, 0, 1, 20, 21, 100)] == [9, 6, 5, 4, 4, 3, 0]
    assert mapped.count(5) == 1


def test_jobs_of_a_higher_priority_run_first(tasks: Any, run: Run) -> None:
    low, normal, high = [tasks.describe.using(priority=each).enqueue() for each in (-50, 0, 80)]
    run()
    for result in (low, normal, high):
        result.refresh()
        assert tasks.describe.get_result(result.id).task.priority == result.task.priority
    assert high.finished_at <= normal.finished_at <= low.finished_at
    order = project_app().client.queue("default")
    assert [order.job(each.id.partition(":")[2])["priority"] for each in (low, normal, high)] == [7, 5, 1]


def test_a_deferred_task_waits_for_its_time(tasks: Any, run: Run) -> None:
    when = datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC)
    result = tasks.add.using(run_after=when).enqueue(1)
    assert run() == 0
    stored = tasks.add.get_result(result.id)
    assert (stored, stored.status, stored.task.run_after) == (result, "READY", when)
    job = project_app().client.queue("default").job(result.id.partition(":")[2])
    assert (job["state"], job["run_at"]) == ("scheduled", when.timestamp())


def test_without_time_zones_all_times_are_naive(tasks: Any, run: Run) -> None:
    with override_settings(USE_TZ=False):
        past = datetime.now() - timedelta(hours=1)
        result = tasks.add.using(run_after=past).enqueue(1)
        assert tasks.add.get_result(result.id) == result
        assert run() == 1
        result.refresh()
        assert past < result.enqueued_at <= result.started_at <= result.finished_at <= datetime.now()


def test_only_tasks_of_tasks_modules_can_be_enqueued(tasks: Any) -> None:
    from tests.support.django_project.notices.elsewhere import lost

    with pytest.raises(InvalidTask, match=r"import it there: from tests\.support\.django_project\.notices\.elsewhere"):
        lost.enqueue()
    again = dataclasses.replace(tasks.add, func=_same_path_as(tasks.add))
    with pytest.raises(InvalidTask, match=r"notices\.tasks\.add cannot be enqueued"):
        again.enqueue()
    assert project_app().client.queues() == {}, "nothing was stored"


def _same_path_as(task: Task[..., Any]) -> Any:
    def other() -> None: ...

    other.__module__, other.__qualname__ = task.func.__module__, task.func.__qualname__
    return other


@pytest.mark.parametrize(
    "path", ["os.system", "tests.support.django_project.notices.elsewhere.lost", "antigravity.fly"]
)
def test_a_job_that_names_another_function_is_not_run_and_nothing_is_imported(tasks: Any, run: Run, path: str) -> None:
    tasks.add.enqueue()
    run()
    queue = project_app().client.queue("default")
    before = set(sys.modules)
    id = queue.enqueue({"args": ["true"], "kwargs": {}}, type=path)
    assert run() == 1
    job = queue.job(id)
    assert (job["state"], job["snooze_count"]) == ("scheduled", 1)
    assert set(sys.modules) == before
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(f"default:{id}")


def test_data_of_another_form_wait_for_another_version(tasks: Any, run: Run) -> None:
    queue = project_app().client.queue("default")
    tasks.add.enqueue()
    id = queue.enqueue([1], type=tasks.add.module_path)
    assert run() == 2
    assert queue.job(id)["snooze_count"] == 1
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(f"default:{id}")


def test_unknown_results_do_not_exist(tasks: Any) -> None:
    stored = tasks.add.enqueue()
    for id in ("123", "", ":", "default:", f"no-such-queue:{stored.id}", "default:unknown", "a b:c", 123):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(id)
    with pytest.raises(TaskResultMismatch):
        tasks.refuse.get_result(stored.id)


@pytest.mark.parametrize(
    ("queue", "options"),
    [
        ("default", {"run_after": "soon"}),
        ("default", {"run_after": 5}),
        ("default", {"priority": "high"}),
        ("default", {"priority": 1000}),
        ("default", {"backend": "other"}),
        ("unlisted", {}),
    ],
)
def test_a_job_with_options_that_the_framework_refuses_is_no_result(tasks: Any, queue: str, options: Any) -> None:
    tasks.add.enqueue()
    created = project_app().client.create_queue(queue)
    id = created.enqueue({"args": [], "kwargs": {}, **options}, type=tasks.add.module_path)
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(f"{queue}:{id}")


def test_the_job_of_a_forq_task_is_no_result(tasks: Any) -> None:
    from tests.support.django_project.orders.tasks import send_receipt

    ref = send_receipt.enqueue("1")
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(f"{ref.queue}:{ref.id}")


def test_results_are_kept_as_the_options_say(tasks: Any, run: Run) -> None:
    with override_settings(TASKS={"default": {**conf.settings.TASKS["default"], "OPTIONS": {"keep_done": 0}}}):
        result = tasks.add.enqueue()
        run()
        with pytest.raises(TaskResultDoesNotExist, match=result.id):
            result.refresh()


def test_definitions_list_the_tasks_and_queues(tasks: Any) -> None:
    app = project_app()
    register_tasks(app)
    register_tasks(app)
    defined = app.definitions()
    path = "tests.support.django_project.notices.tasks"
    names = [name.removeprefix(f"{path}.") for name in defined["tasks"] if name.startswith(path)]
    assert names == sorted(
        ["add", "count", "crash", "describe", "give", "give_many", "raise_in_job", "refuse", "snooze", "wait_for"]
    )
    assert defined["tasks"][f"{path}.add"]["options"] == {"max_retries": 0, "keep_done": "1h"}
    assert defined["tasks"][f"{path}.wait_for"]["options"] == {"max_retries": 2, "backoff": ["0s"], "keep_done": "5m"}
    assert defined["tasks"][f"{path}.count"]["async"]
    assert defined["tasks"][f"{path}.describe"]["signature"].startswith("(context: TaskContext, fail_until: int = 0)")
    assert {"default", "mails", "urgent"} <= defined["queues"].keys()
    assert defined["queues"]["mails"] == {"concurrency": 2}, "of FORQ"


def test_a_task_defined_with_using_has_its_own_queue(tasks: Any, run: Run) -> None:
    result = tasks.urgent.enqueue(2)
    assert run("urgent") == 1
    stored = tasks.add.get_result(result.id)
    assert (stored.return_value, stored.task.priority, stored.task.queue_name) == (2, 100, "urgent")


def test_hooks_run_around_the_tasks(tasks: Any, run: Run) -> None:
    seen: list[tuple[str | None, bool]] = []

    @project_app().around
    def note(job: Any) -> Iterator[None]:
        try:
            yield
        except tasks.Refused:
            seen.append((job.type, False))
            raise
        seen.append((job.type, True))

    tasks.add.enqueue()
    tasks.refuse.enqueue("no")
    tasks.count.enqueue(1)
    run()
    run("mails")
    path = "tests.support.django_project.notices.tasks"
    assert seen == [(f"{path}.add", True), (f"{path}.refuse", False), (f"{path}.count", True)]


def test_tasks_of_the_app_can_be_enqueued_and_scheduled_as_forq_tasks(tasks: Any, run: Run) -> None:
    app = project_app()
    register_tasks(app)
    task = app.tasks[tasks.add.module_path]
    app.schedule("sums", task.prepare(1, b=2), every="1h")
    ref = task.enqueue(1, b=2)
    run()
    assert ref.result(0) == 3
    assert tasks.add.get_result(f"default:{ref.id}").return_value == 3
    assert app.definitions()["schedules"]["default"]["sums"]["data"] == {"args": [1], "kwargs": {"b": 2}}


@pytest.mark.parametrize("option", ["on_commit", "outbox"])
def test_a_database_option_is_passed_on_and_the_signal_waits_for_the_commit(
    tasks: Any, run: Run, signals: list[Any], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    given: list[Any] = []

    def sender(app: DjangoApp, task: Any, queue: str, options: Any) -> Sender[..., Any]:
        given.append(options[option])
        own = {name: value for name, value in options.items() if name != option}
        return Sender(task, queue, cast(JobOptions, own))

    monkeypatch.setattr(DjangoApp, "_sender", sender)
    with override_settings(TASKS={"default": {**conf.settings.TASKS["default"], "OPTIONS": {option: "default"}}}):
        with transaction.atomic():
            result = tasks.add.enqueue(1)
            assert (given, result.enqueued_at, result.status, signals) == (["default"], None, "READY", [])
        assert result.enqueued_at is not None
        assert [name for name, *_ in signals] == ["enqueued"]
        run()
        result.refresh()
        assert result.return_value == 1


def test_with_an_outbox_an_outage_raises_nothing_and_the_job_is_delivered_later(
    tasks: Any, run: Run, signals: list[Any], server: Server
) -> None:
    with override_settings(TASKS={"default": {**conf.settings.TASKS["default"], "OPTIONS": {"outbox": "default"}}}):
        server.stop()
        try:
            with transaction.atomic():
                result = tasks.add.enqueue(1)
        finally:
            server.start()
        assert result.enqueued_at is not None
        assert [name for name, *_ in signals] == ["enqueued"]
        assert deliver("default").sent == 1
        run()
        result.refresh()
        assert result.return_value == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_retrys": 1}, r"TASKS\['default'\]\['OPTIONS'\]: there is no option 'max_retrys'.*max_retries"),
        ({"max_retries": -1}, r"TASKS\['default'\]\['OPTIONS'\].*max_retries"),
        ({"keep_done": "long"}, "keep_done"),
        ({"on_commit": "default", "outbox": "default"}, "on_commit or outbox, not both"),
        (["max_retries"], "a dict"),
    ],
)
def test_invalid_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message):
        ForqBackend("default", {"OPTIONS": options})


def test_system_checks(project: None) -> None:
    assert list(ForqBackend("default", {}).check()) == []
    backend = ForqBackend("a", {"QUEUES": ["a b", "x" * 30, "y" * 31], "OPTIONS": {"on_commit": "other"}})
    found = list(backend.check())
    assert [each.id for each in found] == ["forq.E101", "forq.W101", "forq.E102"]
    assert "queue name 'a b' is not allowed" in found[0].msg
    assert "yyy" in found[1].msg
    assert found[1].hint == "Django allows 63: give the queue a name of up to 30"
    assert "on_commit = 'other' is not a database of DATABASES: 'default'" in found[2].msg


def test_a_queue_name_that_forq_does_not_allow_is_refused(tasks: Any) -> None:
    with pytest.raises(InvalidTask, match="queue name 'a b' is not allowed"):
        tasks.add.using(backend="patient", queue_name="a b")


def test_a_queue_that_no_setting_names_is_refused(tasks: Any) -> None:
    with pytest.raises(InvalidTask, match="'other' is not valid for backend"):
        tasks.add.using(queue_name="other")
    with pytest.raises(UnknownQueue, match=r"to declare it: app.queue\('other'\)"):
        tasks.add.using(backend="patient", queue_name="other").enqueue()


def test_the_result_of_a_job_that_runs(tasks: Any, run: Run) -> None:
    """A second worker of the same process reads the result while the task runs."""
    result = tasks.describe.enqueue()
    seen: list[TaskResult[Any]] = []

    @project_app().around
    def look(job: Any) -> Iterator[None]:
        seen.append(tasks.describe.get_result(f"{job.queue}:{job.id}"))
        yield

    run()
    (running,) = seen
    assert (running.status, running.attempts, running.finished_at) == (TaskResultStatus.RUNNING, 1, None)
    assert running.worker_ids == ["w1"]
    assert running.started_at == running.last_attempted_at
    assert running.enqueued_at == result.enqueued_at


def test_the_examples_of_the_guide(tasks: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/guide/django-tasks.md"
    settings, module, calls, patient = [block for block in blocks(page) if block.language == "python"]
    names: dict[str, Any] = {}
    exec(settings.text, names)
    exec(patient.text, names)
    make_app(names["FORQ"])
    with override_settings(TASKS=names["TASKS"]):
        assert ForqBackend("patient", names["TASKS"]["patient"]).attempt_options.max_retries == 5
        text = module.text if django.VERSION >= (6,) else module.text.replace("from django.tasks", "from django_tasks")
        names["__name__"] = tasks.__name__
        exec(text, names)
        # As if it were in that file.
        monkeypatch.setattr(tasks, "send_receipt", names["send_receipt"], raising=False)
        enqueued, refreshed, shown = calls.text.splitlines()
        exec(enqueued, names)
        assert run("mails") == 1
        exec(refreshed, names)
        assert eval(shown, names) == ("SUCCESSFUL", None)
