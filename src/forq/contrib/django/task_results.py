"""Django's TaskResult of a job, from what forq stores about the job."""

# Django's own Task and TaskResult take no type arguments.
from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils import timezone

from forq.api_types import JobInfo
from forq.contrib.django.task_framework import (
    DEFAULT_ALIAS,
    DEFAULT_TASK_PRIORITY,
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
)

# forq does not store which worker ran an attempt that has ended.
UNKNOWN_WORKER = "unknown"
_STATUS = {
    "active": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
    "dead": TaskResultStatus.FAILED,
}
# Errors that no handler raised.
_OF_FORQ = "forq.errors.ForqError"
_NAMES_OF_FORQ = ("StallError", "TooManySnoozes", "Expired")
# Kinds of errors with which a job dies at a claim, without another attempt.
_WITHOUT_ATTEMPT = ("stall", "expired")


class NoReturnValue:
    """In place of a return value that was not stored; says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<no return value: {self.reason}>"


if TYPE_CHECKING:
    _TaskResult = TaskResult[Any]
else:
    _TaskResult = TaskResult


class ForqTaskResult(_TaskResult):
    """A TaskResult that does not show None for a return value that was too large to be stored."""

    @property
    def return_value(self) -> Any:
        value = super().return_value
        if isinstance(value, NoReturnValue):
            raise ValueError(f"the task has succeeded, but its return value is not stored: {value.reason}")
        return value


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a Django task, as its job stores it. Defaults of the framework are not stored."""

    data: dict[str, Any]

    @classmethod
    def of(cls, task: Task[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Call:
        data: dict[str, Any] = {"args": args, "kwargs": kwargs}
        if task.priority != DEFAULT_TASK_PRIORITY:
            data["priority"] = task.priority
        if task.backend != DEFAULT_ALIAS:
            data["backend"] = task.backend
        if task.run_after is not None:
            data["run_after"] = task.run_after.isoformat()
        return cls(data)

    @staticmethod
    def is_valid(data: Any) -> bool:
        """Whether these data are of a call."""
        return isinstance(data, dict) and type(data.get("args")) is list and type(data.get("kwargs")) is dict

    @property
    def args(self) -> list[Any]:
        return list(self.data["args"])

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.data["kwargs"])

    @property
    def backend(self) -> str:
        return str(self.data.get("backend", DEFAULT_ALIAS))

    def task(self, defined: Task[..., Any], queue: str) -> Task[..., Any]:
        """The task with the options of this call."""
        run_after = self.data.get("run_after")
        options = {
            "priority": self.data.get("priority", DEFAULT_TASK_PRIORITY),
            "backend": self.backend,
            "queue_name": queue,
            "run_after": None if run_after is None else datetime.fromisoformat(run_after),
        }
        changed = {name: value for name, value in options.items() if getattr(defined, name) != value}
        return replace(defined, **changed) if changed else defined


def id_of_result(queue: str, job_id: str) -> str:
    """No queue has a colon in its name."""
    return f"{queue}:{job_id}"


def to_json(value: Any) -> Any:
    """The value as a reader of the stored JSON gets it. TypeError or ValueError if it is not of JSON types.

    The framework's own normalisation leaves subclasses of str and int as they are, such as choices of a model.
    """
    return json.loads(json.dumps(normalize_json(value), allow_nan=False))


def new_result(task: Task[..., Any], job_id: str, args: Any, kwargs: Any) -> ForqTaskResult:
    """The result of a call that was not enqueued yet. TypeError if an argument is not of a JSON type."""
    return ForqTaskResult(
        task=task,
        id=id_of_result(task.queue_name, job_id),
        status=TaskResultStatus.READY,
        enqueued_at=None,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=to_json(args),
        kwargs=to_json(kwargs),
        backend=task.backend,
        errors=[],
        worker_ids=[],
    )


def change(result: TaskResult[Any], **fields: Any) -> None:
    """Results are frozen for users only."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)


def result_of_job(job: JobInfo, task: Task[..., Any], call: Call) -> ForqTaskResult:
    """What Redis has about a job. `task`: with the options of the call."""
    result = new_result(task, job["id"], call.args, call.kwargs)
    enqueued_at, state = job["enqueued_at"], job["state"]
    # Times of ended attempts are rounded to milliseconds: without `max`, one may start before it was enqueued.
    starts = [max(started, enqueued_at) for started in _starts(job)]
    change(
        result,
        status=_STATUS.get(state, TaskResultStatus.READY),
        enqueued_at=to_datetime(enqueued_at),
        started_at=to_datetime(starts[0]) if starts else None,
        last_attempted_at=to_datetime(starts[-1]) if starts else None,
        errors=_errors(job),
        worker_ids=_worker_ids(job),
    )
    if state in ("done", "dead"):
        ended_at = job["ended_at"] if state == "done" else job["died_at"]
        change(result, finished_at=to_datetime(max([ended_at, *starts[-1:]])))
    if state == "done":
        lost = job.get("result_error")
        change(result, _return_value=job.get("result") if lost is None else NoReturnValue(lost))
    return result


def to_datetime(epoch_seconds: float) -> datetime:
    """Like timezone.now(): naive if the project does not use time zones."""
    return datetime.fromtimestamp(epoch_seconds, UTC if settings.USE_TZ else None)


def now() -> datetime:
    return timezone.now()


def error_of(exc: BaseException, traceback: str) -> TaskError:
    kind = type(exc)
    return TaskError(exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback=traceback)


def _starts(job: JobInfo) -> list[float]:
    """The times at which attempts started, in order: of those that failed, then of the one that runs or succeeded."""
    starts = [each["started_at"] for each in job["attempts"] if each["started_at"] is not None]
    if job["state"] == "active":
        # A fence is the server's time at the claim.
        starts.append(job["fence"] / 1e6)
    elif job["state"] == "done":
        ran = job["run_seconds"]
        starts.append(job["fence"] / 1e6 if ran is None else max(job["ended_at"] - ran, job["fence"] / 1e6))
    return starts


def _worker_ids(job: JobInfo) -> list[str]:
    """One per counted attempt."""
    ended = job["retry_count"] + job["stall_count"] + job["timeout_count"]
    state = job["state"]
    if state == "active":
        return [UNKNOWN_WORKER] * ended + [job["worker"]]
    if state == "done" or (state == "dead" and _kind_of(job["error"]) not in _WITHOUT_ATTEMPT):
        ended += 1
    return [UNKNOWN_WORKER] * ended


def _errors(job: JobInfo) -> list[TaskError]:
    """One per failed attempt of which forq knows: the last ten. Only the one that made the job dead has a traceback."""
    errors = list(_errors_of_attempts(job["attempts"]))
    if job["state"] != "dead":
        return errors
    last = _error(job["error"])
    if errors and _kind_of(job["error"]) not in _WITHOUT_ATTEMPT:
        # The same error, without its traceback.
        errors.pop()
    return [*errors, last]


def _errors_of_attempts(attempts: list[dict[str, Any]]) -> Iterator[TaskError]:
    for attempt in attempts:
        if attempt["outcome"] == "interrupted":
            continue
        if attempt["error"] is not None:
            yield _error(attempt["error"])
        elif attempt["outcome"] == "timed_out":
            yield TaskError(exception_class_path="builtins.TimeoutError", traceback=attempt.get("stack") or "")
        else:
            yield TaskError(exception_class_path=_OF_FORQ, traceback=f"its process ended: {attempt['cause']}\n")


def _error(error: Any) -> TaskError:
    """`error`: as forq stores it. A broken one is text."""
    if not isinstance(error, Mapping):
        return TaskError(exception_class_path=_OF_FORQ, traceback=f"{error}\n")
    name = str(error.get("name"))
    traceback = error.get("traceback") or f"{name}: {error.get('message')}\n"
    return TaskError(exception_class_path=_class_path(name, traceback), traceback=traceback)


def _class_path(name: str, traceback: str) -> str:
    """forq stores the name of an exception's class. Its last line in a traceback has the module, too."""
    found = re.findall(rf"^((?:[\w.]+\.)?{re.escape(name)})(?::|$)", traceback, re.MULTILINE)
    path = str(found[-1]) if found else name
    if "." in path:
        return path
    return f"builtins.{name}" if hasattr(builtins, name) else _OF_FORQ if name in _NAMES_OF_FORQ else name


def _kind_of(error: Any) -> Any:
    return error.get("kind") if isinstance(error, Mapping) else None
