"""ForqBackend: runs the tasks of Django's task framework in forq's workers.

    TASKS = {"default": {"BACKEND": "forq.contrib.django.backend.ForqBackend", "QUEUES": ["default", "mails"]}}

Workers run only tasks that the module `tasks` of an installed app defines or imports. A job in Redis cannot make them
import anything else.
"""

# Django's own Task and TaskResult take no type arguments.
from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

from forq.app.tasks import JobOptions, JobRef
from forq.contrib.django.project import DjangoApp, discover_tasks, project_app
from forq.contrib.django.refs import CommitRef
from forq.contrib.django.task_framework import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    task_enqueued,
)
from forq.contrib.django.task_jobs import DjangoAsyncTask, DjangoTask, task_of_app
from forq.contrib.django.task_results import (
    Call,
    ForqTaskResult,
    change,
    id_of_result,
    new_result,
    now,
    result_of_job,
    to_datetime,
)
from forq.errors import ForqError, InvalidId, InvalidName, UnknownJob, UnknownQueue
from forq.job import new_id
from forq.job_options import check_attempt_options
from forq.settings import suggestion
from forq.values import check_queue_name, shown

# Django's tasks have no retries, so a failure is final unless the project says otherwise.
_DEFAULTS: dict[str, Any] = {"max_retries": 0, "keep_done": "1h"}
_ATTEMPT_OPTIONS = ("timeout", "max_retries", "backoff", "keep_done")
# Options whose value is the alias of a database.
_DATABASE_OPTIONS = ("on_commit", "outbox")
# Ids of results have less than 64 characters, Django says.
_MAX_ID = 63

_registering = threading.Lock()


class ForqBackend(BaseTaskBackend):
    """OPTIONS: `max_retries` (0), `keep_done` ("1h"), `timeout`, `backoff`: as for `app.task`. `on_commit` or `outbox`:
    the alias of a database; as for `Task.using`."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        where = f"TASKS[{alias!r}]['OPTIONS']"
        if not isinstance(self.options, Mapping):
            raise ImproperlyConfigured(f"{where} = {shown(self.options)} is not allowed: a dict")
        known = (*_ATTEMPT_OPTIONS, *_DATABASE_OPTIONS)
        for option in self.options:
            if option not in known:
                raise ImproperlyConfigured(
                    f"{where}: there is no option {shown(option)}{suggestion(str(option), known)}"
                )
        given = {**_DEFAULTS, **self.options}
        self._own = {option: given[option] for option in _ATTEMPT_OPTIONS if given.get(option) is not None}
        self._database = {option: given[option] for option in _DATABASE_OPTIONS if given.get(option) is not None}
        if len(self._database) > 1:
            raise ImproperlyConfigured(f"{where}: give on_commit or outbox, not both")
        try:
            self.attempt_options = check_attempt_options(**self._own, where=where)
        except ForqError as exc:
            raise ImproperlyConfigured(str(exc)) from exc

    def validate_task(self, task: Task[..., Any]) -> None:
        super().validate_task(task)
        try:
            check_queue_name(task.queue_name)
        except InvalidName as exc:
            raise InvalidTask(str(exc)) from exc

    def enqueue(self, task: Task[..., Any], args: Any, kwargs: Any) -> TaskResult[Any]:
        """Stores a job; when it returns, the job is in Redis. With `on_commit` or `outbox`: as `Task.using` says."""
        self.validate_task(task)
        of_app = self._registered(task)
        job_id = new_id()
        result = new_result(task, job_id, args, kwargs)
        options: JobOptions = {"id": job_id, "queue": task.queue_name, "priority": to_forq_priority(task.priority)}
        if task.run_after is not None:
            # A naive time is a local one, as everywhere in a project without time zones.
            options["run_at"] = task.run_after.timestamp()
        if task.backend != of_app.defined.backend:
            options |= cast(JobOptions, self._own)
        sender = of_app.using(**(options | cast(JobOptions, self._database)))
        ref = sender.enqueue(Call.of(task, result.args, result.kwargs))
        if self._database:
            # After the sender's own function, if that waits for the commit.
            (database,) = self._database.values()
            transaction.on_commit(partial(self._report, result, ref), using=database)
        else:
            self._report(result, ref)
        return result

    def _report(self, result: ForqTaskResult, ref: JobRef[Any]) -> None:
        # Without delivering a row that is still in an outbox: Redis may be down.
        identity = ref._sent_identity if isinstance(ref, CommitRef) else ref._identity
        change(result, enqueued_at=now() if identity is None else to_datetime(int(identity.enqueued_us) / 1e6))
        # The job is stored: a receiver that fails must not make the caller think that it is not. Django logs its error.
        task_enqueued.send_robust(sender=type(self), task_result=result)

    def get_result(self, result_id: str) -> TaskResult[Any]:
        """TaskResultDoesNotExist if the job never existed, or was not kept."""
        unknown = TaskResultDoesNotExist(result_id)
        queue, _, job_id = str(result_id).partition(":")
        try:
            job = project_app().client.queue(queue).job(job_id)
        except (UnknownJob, UnknownQueue, InvalidName, InvalidId):
            raise unknown from None
        of_app = self._find(str(job.get("type")))
        # A job whose record is broken has no data.
        if of_app is None or not Call.is_valid(job.get("data")):
            raise unknown
        call = Call(job["data"])
        if call.backend != self.alias:
            raise unknown
        try:
            task = call.task(of_app.defined, queue)
        except (TypeError, ValueError, InvalidTask):
            # The framework refuses its options, or QUEUES does not have its queue.
            raise unknown from None
        return result_of_job(job, task, call)

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Django's system checks."""
        yield from super().check(**kwargs)
        where = f"TASKS[{self.alias!r}]"
        for name in sorted(self.queues, key=str):
            try:
                longest = len(id_of_result(check_queue_name(name), new_id()))
            except InvalidName as exc:
                yield checks.Error(f"{where}['QUEUES']: {exc}", id="forq.E101")
                continue
            if longest > _MAX_ID:
                yield checks.Warning(
                    f"{where}['QUEUES']: ids of results of queue {name!r} have {longest} characters",
                    hint=f"Django allows {_MAX_ID}: give the queue a name of up to {len(name) + _MAX_ID - longest}",
                    id="forq.W101",
                )
        for option, alias in self._database.items():
            if alias not in connections:
                yield checks.Error(
                    f"{where}['OPTIONS']: {option} = {shown(alias)} is not a database of DATABASES: "
                    f"{', '.join(map(repr, connections))}",
                    id="forq.E102",
                )

    def _registered(self, task: Task[..., Any]) -> DjangoTask | DjangoAsyncTask:
        found = self._find(task.module_path)
        if found is None or found.function is not task.func:
            raise InvalidTask(
                f"task {task.module_path} cannot be enqueued: workers run only tasks that the module `tasks` of an app "
                f"of INSTALLED_APPS has; define it there, or import it there: from {task.func.__module__} import "
                f"{task.func.__qualname__}"
            )
        return found

    def _find(self, path: str) -> DjangoTask | DjangoAsyncTask | None:
        """The task that workers have under this path."""
        app = project_app()
        found = app.tasks.get(path)
        if found is None:
            discover_tasks()
            register_tasks(app)
            found = app.tasks.get(path)
        return found if isinstance(found, DjangoTask | DjangoAsyncTask) else None


def register_tasks(app: DjangoApp) -> None:
    """Registers the tasks of ForqBackends that the modules `tasks` of installed apps have, and their queues."""
    with _registering:
        for task, backend in _tasks_of_modules():
            place = f"TASKS[{backend.alias!r}]['QUEUES']"
            known = app.tasks.get(task.module_path)
            if known is None or known.function is not task.func:
                new = task_of_app(app, task, backend.attempt_options)
                app._check_names(new)
                app._add(new)
            # Of a task that is defined with `using`, too.
            for queue in (task.queue_name, *sorted(backend.queues)):
                app.declare_absent_queue(queue, place)


def _tasks_of_modules() -> Iterator[tuple[Task[..., Any], ForqBackend]]:
    for config in apps.get_app_configs():
        module = sys.modules.get(f"{config.name}.tasks")
        for value in list(vars(module).values()) if module is not None else ():
            # Not isinstance, which would evaluate a lazy object.
            if not issubclass(type(value), Task):
                continue
            try:
                backend = value.get_backend()
            except ImproperlyConfigured:
                # A test has replaced TASKS since the task was defined: only that task cannot be used.
                continue
            if isinstance(backend, ForqBackend):
                yield value, backend


def to_forq_priority(priority: int) -> int:
    """Django's priorities, from -100 to 100 (first), as forq's, from 9 to 0 (first). 0 becomes 5, forq's default; each
    of forq's others stands for 20 of Django's above 0, and for 25 below."""
    return 5 - math.ceil(priority / 20) if priority >= 0 else 5 + math.ceil(-priority / 25)
