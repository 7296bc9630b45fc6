"""Tasks of Django's framework as tasks of a forq App: the way of their arguments, and one attempt in a worker.

1. `DjangoTask` and `DjangoAsyncTask` have the path of their function as name.
2. `AnyArguments` stores a call as {"args": […], "kwargs": {…}}, without looking at the function's annotations.
3. `Attempt` sends the framework's signals and makes the context of the task.
"""

# Django's own Task and TaskResult take no type arguments.
from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from inspect import iscoroutinefunction
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async

from forq.app.signature import Signature
from forq.app.tasks import AsyncTask, SyncTask
from forq.contrib.django.task_framework import (
    Task,
    TaskContext,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_finished,
    task_started,
)
from forq.contrib.django.task_results import (
    UNKNOWN_WORKER,
    Call,
    change,
    error_of,
    id_of_result,
    new_result,
    now,
    to_datetime,
    to_json,
)
from forq.errors import ArgumentsDoNotFit, ForqError, Snooze
from forq.job import RUNNING, Job
from forq.job import TaskResult as PackedResult
from forq.job_options import AttemptOptions
from forq.values import check_type, shown

if TYPE_CHECKING:
    from forq.contrib.django.project import DjangoApp

log = logging.getLogger("forq")


class AnyArguments(Signature):
    """Arguments and results of any JSON types."""

    def check(self) -> None:
        """Annotations are not used."""

    def pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a Call, or the arguments of one."""
        if len(args) == 1 and isinstance(args[0], Call):
            return args[0].data
        return {"args": to_json(args), "kwargs": to_json(kwargs)}

    def unpack(self, data: Any) -> tuple[list[Any], dict[str, Any]]:
        if not Call.is_valid(data):
            raise ArgumentsDoNotFit(
                f"the data of a Django task are {{'args': […], 'kwargs': {{…}}}}, not {shown(data)} ({self.text})"
            )
        return [Call(data)], {}

    def pack_result(self, value: Any) -> Any:
        return value

    def unpack_result(self, data: Any) -> Any:
        return data


class DjangoTask(SyncTask[..., Any]):
    """`defined`: the task as the module `tasks` has it."""

    defined: Task[..., Any]

    def run_job(self, data: Any, job: Job) -> Any:
        ((call,), _) = self._unpack(data, job)
        before = RUNNING.set(job)
        try:
            with self.app.hooks_around(job):
                attempt = Attempt(self.defined, call, job)
                attempt.start()
                try:
                    value = to_json(self.function(*attempt.arguments(), **call.kwargs))
                except BaseException as exc:
                    attempt.fail(exc)
                    raise
                attempt.succeed(value)
                return PackedResult(value, self.signature.pack_result)
        finally:
            RUNNING.reset(before)


class DjangoAsyncTask(AsyncTask[..., Any]):
    """The same for a coroutine function. Receivers of signals run in a thread, where they may use the database."""

    defined: Task[..., Any]

    async def run_job(self, data: Any, job: Job) -> Any:
        ((call,), _) = self._unpack(data, job)
        RUNNING.set(job)
        async with self.app.async_hooks_around(job):
            attempt = Attempt(self.defined, call, job)
            await sync_to_async(attempt.start)()
            try:
                value = to_json(await self.function(*attempt.arguments(), **call.kwargs))
            except asyncio.CancelledError:
                # At its deadline, or on request: forq runs it again, or a user has ended it.
                raise
            except BaseException as exc:
                await sync_to_async(attempt.fail)(exc)
                raise
            await sync_to_async(attempt.succeed)(value)
            return PackedResult(value, self.signature.pack_result)


def task_of_app(app: DjangoApp, defined: Task[..., Any], options: AttemptOptions) -> DjangoTask | DjangoAsyncTask:
    """A Django task as a task of this app, to be registered."""
    kind = DjangoAsyncTask if iscoroutinefunction(defined.func) else DjangoTask
    name = check_type(defined.module_path)
    task = kind(app, defined.func, name, defined.queue_name, (), AnyArguments(defined.func, name), options)
    task.defined = defined
    return task


class Attempt:
    """One attempt in a worker, as the context and the receivers of signals see it."""

    def __init__(self, defined: Task[..., Any], call: Call, job: Job) -> None:
        self._task = call.task(defined, job.queue)
        self._backend = self._task.get_backend()
        self._call = call
        self._job = job
        self.result: TaskResult[Any]

    def arguments(self) -> list[Any]:
        """The positional arguments of the function."""
        return [TaskContext(task_result=self.result), *self._call.args] if self._task.takes_context else self._call.args

    def start(self) -> None:
        self.result = self._first() if self._job.attempt == 1 else self._later()
        self._send(task_started)

    def succeed(self, value: Any) -> None:
        change(self.result, finished_at=now(), status=TaskResultStatus.SUCCESSFUL, _return_value=value)
        self._send(task_finished)

    def fail(self, exc: BaseException) -> None:
        """Sends the signal if the job will be dead. The others will run again."""
        if isinstance(exc, Snooze):
            return
        if self._job.is_last or getattr(exc, "kind", None) == "permanent":
            self.result.errors.append(error_of(exc, "".join(format_exception(exc))))
            change(self.result, finished_at=now(), status=TaskResultStatus.FAILED)
            self._send(task_finished)

    def _send(self, signal: Any) -> None:
        # A receiver that fails must not change the fate of the job. Django logs its error.
        signal.send_robust(sender=type(self._backend), task_result=self.result)

    def _first(self) -> TaskResult[Any]:
        job, started_at = self._job, now()
        result = new_result(self._task, job.id, self._call.args, self._call.kwargs)
        change(
            result,
            status=TaskResultStatus.RUNNING,
            enqueued_at=to_datetime(job.enqueued_at),
            started_at=started_at,
            last_attempted_at=started_at,
            worker_ids=[UNKNOWN_WORKER] * (job.attempt - 1) + [f"{socket.gethostname()}:{os.getpid()}"],
        )
        return result

    def _later(self) -> TaskResult[Any]:
        """With the errors and the times of the earlier attempts, which only Redis has."""
        id = id_of_result(self._job.queue, self._job.id)
        try:
            return self._backend.get_result(id)
        except (ForqError, TaskResultDoesNotExist) as exc:
            log.warning("earlier attempts of a Django task are unknown result=%s error=%s", id, exc)
            return self._first()
