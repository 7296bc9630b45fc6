"""Django's task framework: `django.tasks` with Django 6, the package django-tasks with older versions."""

from typing import TYPE_CHECKING

import django

if TYPE_CHECKING or django.VERSION < (6,):
    try:
        from django_tasks import DEFAULT_TASK_BACKEND_ALIAS as DEFAULT_ALIAS
        from django_tasks import exceptions, signals
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.base import (
            DEFAULT_TASK_PRIORITY,
            Task,
            TaskContext,
            TaskError,
            TaskResult,
            TaskResultStatus,
        )
        from django_tasks.utils import normalize_json
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            f"with Django {django.get_version()}, forq's task backend needs django-tasks: pip install django-tasks",
            name=exc.name,
        ) from exc
else:
    from django.tasks import DEFAULT_TASK_BACKEND_ALIAS as DEFAULT_ALIAS
    from django.tasks import exceptions, signals
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import (
        DEFAULT_TASK_PRIORITY,
        Task,
        TaskContext,
        TaskError,
        TaskResult,
        TaskResultStatus,
    )
    from django.utils.json import normalize_json

# django-tasks up to 0.12 has another name.
InvalidTask: type[Exception] = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError
TaskResultDoesNotExist = exceptions.TaskResultDoesNotExist
TaskResultMismatch = exceptions.TaskResultMismatch

task_enqueued, task_started, task_finished = signals.task_enqueued, signals.task_started, signals.task_finished

__all__ = [
    "DEFAULT_ALIAS",
    "DEFAULT_TASK_PRIORITY",
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultMismatch",
    "TaskResultStatus",
    "normalize_json",
    "task_enqueued",
    "task_finished",
    "task_started",
]
