"""Parses and checks the apps of a supervisor: their tables in a config file, and the definitions that their code makes.

1. AppSpec is an app as configured: `[apps.NAME]`, or `forq run --app`.
2. QueueOverride is a table `[queues.NAME]` without a handler: it changes options of a queue that an app defines.
3. Definitions are made by `App.definitions()` in a child process that runs user code. They are checked like a config
   file.
"""

import os
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forq.errors import ConfigError, ForqError, InvalidOption
from forq.job_options import check_attempt_options
from forq.queue_spec import QueueSpec
from forq.schedules import read_schedules
from forq.settings import APP, TASK, WORK, Value, suggestion
from forq.values import check_queue_name, check_type, shown

FORMAT = 1
MAX_QUEUES = 1000
MAX_HASH = 128

_APP = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")
_DEFINITION_KEYS = frozenset({"format", "app", "tasks", "queues", "schedules", "hooks"})
# Set by the supervisor for every queue of an app.
_FIXED_KEYS = ("mode", "handler", "handlers", "path", "app", "schedules", "options")


@dataclass(frozen=True)
class AppSpec:
    """`name` is None for an app of `--app` until its code has been read. `app`: "package.module:attribute"."""

    name: str | None
    app: str
    path: tuple[str, ...]
    # Of tables [apps.NAME.tasks.TASK], as given.
    task_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    where: str = "--app"

    @property
    def label(self) -> str:
        """The name for messages."""
        return self.name or self.app

    @property
    def output_name(self) -> str:
        """The name under which `forqctl logs` finds the output of its import."""
        return self.name or self.app.partition(":")[0][:64]


@dataclass(frozen=True)
class QueueOverride:
    """Options of the config file for a queue of an app. `app`: the name of that app, if given."""

    options: Mapping[str, Value]
    fail_handler: str | None
    app: str | None
    where: str


@dataclass(frozen=True)
class Definitions:
    """The checked definitions of an app. `schedules`: by queue and key. `own_options`: by queue and task, the names of
    options that the task sets for itself. `of_code`: the same without the options of the config file."""

    name: str
    queues: tuple[QueueSpec, ...]
    schedules: Mapping[str, Mapping[str, Mapping[str, Any]]]
    own_options: Mapping[str, Mapping[str, frozenset[str]]]
    of_code: "Definitions | None" = None

    def tasks_overriding(self, queue: str, option: str) -> list[str]:
        """The tasks for whose jobs this option of their queue has no effect."""
        name = "backoff" if option in ("min_backoff", "max_backoff") else option
        return sorted(task for task, options in self.own_options.get(queue, {}).items() if name in options)


def read_app_flag(given: str, directory: str) -> AppSpec:
    """An app of `forq run --app`, imported from the current directory."""
    return AppSpec(None, _check_app(given, "--app"), (directory,))


def read_apps(tables: object, file: str) -> tuple[AppSpec, ...]:
    """The tables [apps.NAME] of a config file."""
    if not isinstance(tables, dict):
        raise ConfigError(f"{file}: apps = {shown(tables)} is not allowed: use tables [apps.NAME]")
    apps = tuple(_read_app(name, table, file) for name, table in tables.items())
    for number, app in enumerate(apps):
        if (twin := next((other for other in apps[:number] if other.app == app.app), None)) is not None:
            raise ConfigError(
                f"{app.where}: app = {shown(app.app)} is also the app of {twin.where}; remove one of them"
            )
    return apps


def _read_app(name: str, table: object, file: str) -> AppSpec:
    where = f"{file}: [apps.{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f'{where}: {shown(table)} is not allowed: use a table with app = "package.module:app"')
    for key in table:
        if key not in APP and key != "tasks":
            raise InvalidOption(f"{where}: there is no setting {shown(key)}{suggestion(key, (*APP, 'tasks'))}")
    if "app" not in table:
        raise InvalidOption(f'{where}: app is required: app = "package.module:app"')
    path = table.get("path", [])
    folders = [path] if isinstance(path, str) else path
    if not isinstance(folders, list) or not all(isinstance(each, str) and "\0" not in each for each in folders):
        raise InvalidOption(f"{where}: path = {shown(path)} is not allowed: a directory, or a list of directories")
    base = os.path.dirname(file)
    return AppSpec(
        _checked_name(name, where),
        _check_app(table["app"], where),
        tuple(os.path.abspath(os.path.join(base, folder)) for folder in folders),
        _read_task_options(table.get("tasks", {}), where),
        where,
    )


def _read_task_options(tables: object, where: str) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidOption(f"{where}: tasks = {shown(tables)} is not allowed: use tables [apps.NAME.tasks.TASK]")
    for task, table in tables.items():
        here = f"{where[:-1]}.tasks.{task}]"
        try:
            check_type(task)
        except ForqError as exc:
            raise InvalidOption(f"{here}: {exc}") from exc
        for key in table:
            if key not in TASK:
                raise InvalidOption(f"{here}: there is no setting {shown(key)}{suggestion(key, TASK)}")
        check_attempt_options(**table, where=here)
    return {task: dict(table) for task, table in tables.items()}


def _check_app(given: object, where: str) -> str:
    if not isinstance(given, str) or not _APP.fullmatch(given):
        raise InvalidOption(
            f'{where}: app = {shown(given)} is not allowed: "package.module:attribute", or "package.module" with an '
            "attribute app"
        )
    return given if ":" in given else f"{given}:app"


def _checked_name(name: object, where: str) -> str:
    try:
        return check_queue_name(name)
    except ForqError as exc:
        raise type(exc)(f"{where}: {exc}") from exc


def read_override(name: str, table: Mapping[str, object], where: str) -> QueueOverride:
    """A table [queues.NAME] without a handler, beside an app that defines the queue."""
    fields = {key: value for key, value in table.items() if key != "app"}
    app = table.get("app")
    if app is not None and not isinstance(app, str):
        raise InvalidOption(f"{where}: app = {shown(app)} is not allowed: the NAME of a table [apps.NAME]")
    if "path" in fields:
        raise InvalidOption(f"{where}: path is not allowed without a handler: set it in [apps.NAME]")
    checked = QueueSpec.from_mapping(name, {**fields, "mode": WORK, "handler": "app"}, where)
    return QueueOverride(checked.options, checked.fail_handler, app, where)


def check_definitions(
    app: AppSpec, given: object, hash: object, overrides: Mapping[str, QueueOverride]
) -> Generator[None, None, Definitions]:
    """Checks the definitions of an app in small steps, so that the caller's loop can do other work in between. Raises
    ForqError with a sentence that names the app."""
    where = f"app {app.label!r}"
    fields = _object(given, "definitions", where)
    for key in fields:
        if key not in _DEFINITION_KEYS:
            raise InvalidOption(f"{where}: its definitions have an unknown key {shown(key)}")
    if fields.get("format") != FORMAT:
        raise InvalidOption(f"{where}: format {shown(fields.get('format'))} of its definitions is unknown: {FORMAT}")
    if not isinstance(hash, str) or not 1 <= len(hash) <= MAX_HASH:
        raise InvalidOption(f"{where}: the hash of its definitions is invalid: {shown(hash)}")
    name = _checked_name(fields.get("app"), where)
    if app.name is not None and name != app.name:
        raise ConfigError(
            f"{app.where}: {app.app} is an app of the name {name!r}: rename this table to [apps.{name}], or the app to "
            f"forq.App({app.name!r})"
        )
    own_options = yield from _read_own_options(_object(fields.get("tasks"), "tasks", where), where)
    tables = _object(fields.get("queues"), "queues", where)
    if len(tables) > MAX_QUEUES:
        raise InvalidOption(f"{where}: it defines {len(tables)} queues, but at most {MAX_QUEUES} are allowed")
    queues = []
    for queue, table in tables.items():
        queues.append(_read_queue(app, hash, queue, table))
        yield
    schedules: dict[str, dict[str, dict[str, Any]]] = {}
    for queue, keys in _object(fields.get("schedules", {}), "schedules", where).items():
        if queue not in tables:
            raise InvalidOption(f"{where}: it has schedules for {shown(queue)}, which is not one of its queues")
        schedules[queue] = {}
        for key, table in _object(keys, f"schedules.{queue}", where).items():
            schedules[queue] |= read_schedules({key: table}, f"{where}: queue {queue!r}")
            yield
    return configured(Definitions(name, tuple(queues), schedules, own_options), app, overrides)


def configured(code: Definitions, app: AppSpec, overrides: Mapping[str, QueueOverride]) -> Definitions:
    """The definitions of the code, with the options of the config file. Raises ConfigError if these do not fit."""
    tasks = {task for each in code.own_options.values() for task in each}
    for task in app.task_options:
        if task not in tasks:
            raise ConfigError(
                f"{app.where[:-1]}.tasks.{task}]: the app has no task {task!r}{suggestion(task, sorted(tasks))}"
            )
    return replace(
        code,
        queues=tuple(_with_override(spec, code.name, app, overrides.get(spec.name)) for spec in code.queues),
        own_options={
            queue: {task: names | frozenset(app.task_options.get(task, ())) for task, names in each.items()}
            for queue, each in code.own_options.items()
        },
        of_code=code,
    )


def _with_override(spec: QueueSpec, app_name: str, app: AppSpec, override: QueueOverride | None) -> QueueSpec:
    if override is not None:
        if override.app not in (None, app_name):
            raise ConfigError(f"{override.where}: app = {override.app!r}, but the queue belongs to app {app_name!r}")
        spec = replace(
            spec,
            options={**spec.options, **override.options},
            fail_handler=override.fail_handler or spec.fail_handler,
        )
    return replace(spec, task_options=app.task_options)


def _read_own_options(
    tasks: Mapping[str, Any], where: str
) -> Generator[None, None, dict[str, dict[str, frozenset[str]]]]:
    found: dict[str, dict[str, frozenset[str]]] = {}
    for task, given in tasks.items():
        fields = _object(given, f"task {shown(task)}", where)
        options = _object(fields.get("options"), f"options of task {shown(task)}", where)
        queue = _checked_name(fields.get("queue"), f"{where}: task {shown(task)}")
        found.setdefault(queue, {})[task] = frozenset(options)
        yield
    return found


def _read_queue(app: AppSpec, hash: str, queue: str, table: object) -> QueueSpec:
    where = f"app {app.label!r}: queue {shown(queue)}"
    fields = _object(table, "options", where)
    for key in _FIXED_KEYS:
        if key in fields:
            raise InvalidOption(f"{where}: {key} is not an option of app.queue")
    spec = QueueSpec.from_mapping(queue, {**fields, "mode": WORK, "handler": app.app, "path": app.path}, where)
    return replace(spec, app=app.app, definitions_hash=hash)


def _object(given: object, what: str, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidOption(f"{where}: {what} = {shown(given)} is not allowed: it must be a JSON object")
    return given
