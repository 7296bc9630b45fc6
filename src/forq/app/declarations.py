"""Queues and schedules that an app declares. Both are checked where they are written, and spelled as in forq.toml."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

import orjson

from forq.api_types import CatchUp, Duration, Overlap, WorkQueueOptions
from forq.errors import ForqError, InvalidOption, InvalidTask
from forq.job import Job
from forq.settings import DEFINITION, OPTIONS, SCHEDULE, WORK, Value, parse_options, suggestion
from forq.values import check_schedule_key, show_duration, show_size, shown

if TYPE_CHECKING:
    from forq.app.tasks import Prepared, Task


class QueueOptions(WorkQueueOptions, total=False):
    """Options of `App.queue`: those of [queues.NAME] in forq.toml, and `on_dead`."""

    on_dead: Callable[[Any, Job], Any]


class ScheduleOptions(TypedDict, total=False):
    """Options of `App.schedule`: those of [queues.NAME.schedules.KEY] in forq.toml that do not describe the job."""

    every: Duration
    cron: str
    zone: str
    overlap: Overlap
    catch_up: CatchUp
    jitter: Duration


# Options of `using` that a schedule has, too.
_PREPARED_OPTIONS = ("queue", "priority")
_NOT_HERE = {
    "mode": "queues of an app have mode work",
    "handler": "the app is the handler",
    "handlers": "the app is the handler",
    "fail_handler": "use on_dead=function",
    "path": "set it in [apps.NAME] of forq.toml",
}


@dataclass(frozen=True, slots=True)
class DeclaredQueue:
    """`options`: as [queues.NAME] in forq.toml, without the fail handler."""

    name: str
    options: Mapping[str, Value]
    on_dead: Callable[..., Any] | None
    place: str

    def table(self, app_name: str) -> dict[str, Value]:
        """The table [queues.NAME]. InvalidOption if the fail handler cannot be imported by its name."""
        if self.on_dead is None:
            return dict(self.options)
        module, name = self.on_dead.__module__, self.on_dead.__name__
        if getattr(sys.modules.get(module), name, None) is not self.on_dead:
            raise InvalidOption(
                f"{_where(app_name, self.name, self.place)}: on_dead: {name} of module {module} is not this function, "
                "so a worker cannot import it; give the function a name of its own, and decorators functools.wraps"
            )
        return {**self.options, "fail_handler": f"{module}:{name}"}


@dataclass(frozen=True, slots=True)
class DeclaredSchedule:
    """`table`: as [queues.NAME.schedules.KEY] in forq.toml."""

    queue: str
    key: str
    table: Mapping[str, Any]
    place: str


def declare_queue(name: str, given: Mapping[str, Any], app_name: str, place: str) -> DeclaredQueue:
    where = _where(app_name, name, place)
    options = dict(given)
    on_dead = options.pop("on_dead", None)
    for key, value in options.items():
        if key in DEFINITION:
            raise InvalidOption(f"{where}: {key} is not an option of app.queue: {_NOT_HERE[key]}")
        if key not in OPTIONS:
            raise InvalidOption(f"{where}: there is no option {shown(key)}{suggestion(key, ['on_dead', *OPTIONS])}")
        options[key] = _plain(value)
    if on_dead is not None:
        _check_on_dead(on_dead, where)
    return DeclaredQueue(name, spell_options(parse_options(options, where, WORK)), on_dead, place)


def _where(app_name: str, queue: str, place: str) -> str:
    return f"app {app_name!r}, queue {queue!r} ({place})"


def spell_options(options: Mapping[str, Value]) -> dict[str, Value]:
    """Parsed options as forq.toml has them, each in one spelling only."""
    spell: dict[str, Callable[[Any], Value]] = {"duration": show_duration, "size": show_size}
    return {
        name: spell[kind](value) if (kind := OPTIONS[name].kind) in spell else value for name, value in options.items()
    }


def _check_on_dead(on_dead: Any, where: str) -> None:
    from forq.app.tasks import Task

    wanted = "a function def notify(data, job) of a module, called with [data, job, error] of each dead job"
    if isinstance(on_dead, Task):
        raise InvalidOption(
            f"{where}: on_dead = {on_dead!r} is not allowed, because a task gets its own arguments: give {wanted}; "
            f"it may call {on_dead.__name__}.enqueue(…)"
        )
    qualified = getattr(on_dead, "__qualname__", "")
    if not inspect.isfunction(on_dead) or not qualified.isidentifier():
        raise InvalidOption(f"{where}: on_dead = {shown(on_dead)} is not allowed: {wanted}")
    if inspect.isgeneratorfunction(on_dead) or inspect.isasyncgenfunction(on_dead):
        raise InvalidOption(f"{where}: on_dead = {qualified} is a generator, which would not run: give {wanted}")
    try:
        inspect.signature(on_dead).bind(None, None)
    except TypeError as exc:
        raise InvalidOption(f"{where}: on_dead = {qualified} cannot be called with (data, job): {exc}") from exc


def schedule_of_task(task: "Task[..., Any]", given: Mapping[str, Any], place: str) -> DeclaredSchedule:
    """The schedule of `@app.task(every=…)`; its key is the task's name."""
    where = f"task {task.name} ({place})"
    rule = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
    instead = f"app.schedule(KEY, {task.__name__}.prepare(…), {rule})"
    if required := task.signature.required():
        raise InvalidTask(
            f"{where}: a schedule cannot call it without {', '.join(required)}; remove {rule} here, and write "
            f"{instead} below the function"
        )
    try:
        check_schedule_key(task.name)
    except ForqError as exc:
        raise InvalidTask(f"{where}: {exc}; write {instead} below the function") from exc
    return _declare_schedule(task.queue, task.name, {"type": task.name, "data": {}}, given, where, place)


def declare_schedule(
    key: str, prepared: "Prepared[Any]", given: Mapping[str, Any], app_name: str, place: str
) -> DeclaredSchedule:
    where = f"app {app_name!r}, schedule {key!r} ({place})"
    for name in prepared.options:
        if name not in _PREPARED_OPTIONS:
            raise InvalidTask(
                f"{where}: using({name}=…) is not an option of a schedule; allowed: {', '.join(_PREPARED_OPTIONS)}"
            )
    table: dict[str, Any] = {"type": prepared.task.name, "data": orjson.loads(prepared.job.body)[2]}
    if "priority" in prepared.options:
        table["priority"] = prepared.options["priority"]
    return _declare_schedule(prepared.sender.queue, key, table, given, where, place)


def _declare_schedule(
    queue: str, key: str, job: dict[str, Any], given: Mapping[str, Any], where: str, place: str
) -> DeclaredSchedule:
    from forq.broker.schedules import pack_schedule
    from forq.schedules import Every, Schedule

    for name in given:
        if name not in ScheduleOptions.__annotations__:
            known = ScheduleOptions.__annotations__
            raise InvalidTask(f"{where}: a schedule has no option {shown(name)}{suggestion(name, known)}")
    table = {name: _plain(value) for name, value in given.items() if value is not None} | job
    try:
        schedule = Schedule.from_mapping(key, table)
        pack_schedule(schedule)
    except ForqError as exc:
        raise InvalidTask(f"{where}: {exc}") from exc
    if isinstance(schedule.rule, Every):
        table["every"] = show_duration(schedule.rule.every_ms / 1000)
    else:
        table["cron"] = schedule.rule.expression
    if "jitter" in table:
        table["jitter"] = show_duration(schedule.jitter_ms / 1000)
    return DeclaredSchedule(queue, key, {name: table[name] for name in SCHEDULE if name in table}, place)


def _plain(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value
