"""Tasks of Django's own framework."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django

from forq import Snooze, current_job
from forq.contrib.django.task_framework import TaskContext
from tests.support.django_project.orders.models import Receipt

if TYPE_CHECKING or django.VERSION < (6,):
    from django_tasks import task
else:
    from django.tasks import task


class Refused(Exception):
    """Of a class that is not a builtin."""


@task
def add(*numbers: float, **named: float) -> float:
    return sum(numbers) + sum(named.values())


@task(queue_name="mails")
async def count(wanted: int) -> list[Any]:
    """Runs on the event loop of its process, and uses the database."""
    await Receipt.objects.acreate(number=f"count {wanted}")
    return [await Receipt.objects.acount(), asyncio.get_running_loop() is not None, current_job().queue]


@task
def refuse(reason: str) -> None:
    raise Refused(reason)


@task
def raise_in_job(reason: str) -> None:
    raise ValueError(reason)


@task
def give(value: Any) -> Any:
    """With a type that is not JSON for the value 'object'."""
    return object() if value == "object" else value


@task
def give_many(characters: int) -> str:
    return characters * "x"


@task(takes_context=True)
def describe(context: TaskContext, fail_until: int = 0) -> dict[str, Any]:
    if context.attempt <= fail_until:
        raise Refused(f"attempt {context.attempt}")
    result = context.task_result
    return {
        "attempt": context.attempt,
        "id": result.id,
        "status": result.status,
        "errors": [error.traceback for error in result.errors],
        "priority": result.task.priority,
        "backend": result.backend,
        "pid": os.getpid(),
    }


@task(backend="patient")
def wait_for(file: str) -> None:
    from tests.support.drive.wait import wait_until

    wait_until(Path(file).exists, what=f"{file} exists")


@task
def crash() -> None:
    os._exit(9)


@task
def snooze(seconds: float) -> None:
    raise Snooze(seconds)


urgent = add.using(priority=100, queue_name="urgent")
not_a_function = add.func
