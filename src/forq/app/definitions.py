"""The definitions of an app as JSON types: its tasks, queues, schedules and hooks.

A child of the supervisor writes them, `forq app` prints them, and workers compare their hash with the supervisor's.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypedDict

from forq.app.declarations import DeclaredQueue, DeclaredSchedule
from forq.app.places import place_of
from forq.app.tasks import AsyncTask, Task
from forq.errors import InvalidTask
from forq.settings import suggestion

FORMAT = 1

# Not a class, because `async` is a keyword.
DefinedTask = TypedDict(
    "DefinedTask",
    {
        "queue": str,
        "aliases": list[str],
        "async": bool,
        "signature": str,
        "place": str,
        "options": dict[str, Any],
    },
)


class Definitions(TypedDict):
    """`queues` and `schedules` hold the tables of forq.toml: [queues.NAME], [queues.NAME.schedules.KEY]."""

    format: int
    app: str
    tasks: dict[str, DefinedTask]
    queues: dict[str, dict[str, Any]]
    schedules: dict[str, dict[str, dict[str, Any]]]
    hooks: dict[str, int]


def define(
    app_name: str,
    tasks: Mapping[str, Task[..., Any]],
    queues: Mapping[str, DeclaredQueue],
    schedules: Mapping[tuple[str, str], DeclaredSchedule],
    hooks: dict[str, int],
) -> Definitions:
    """Checks everything that decoration could not check, and returns the definitions, sorted by name."""
    tables: dict[str, dict[str, Any]] = {}
    for name in sorted({task.queue for task in tasks.values()} | queues.keys()):
        tables[name] = queues[name].table(app_name) if name in queues else {}
    scheduled: dict[str, dict[str, dict[str, Any]]] = {}
    for (queue, key), schedule in sorted(schedules.items()):
        if queue not in tables:
            raise InvalidTask(
                f"app {app_name!r}, schedule {key!r} ({schedule.place}): the app has no queue {queue!r}"
                f"{suggestion(queue, tables)}; to declare it: app.queue({queue!r})"
            )
        scheduled.setdefault(queue, {})[key] = dict(schedule.table)
    return {
        "format": FORMAT,
        "app": app_name,
        "tasks": {name: _define_task(tasks[name]) for name in sorted(tasks)},
        "queues": tables,
        "schedules": scheduled,
        "hooks": hooks,
    }


def _define_task(task: Task[..., Any]) -> DefinedTask:
    place = place_of(task.function)
    try:
        task.signature.check()
    except InvalidTask as exc:
        raise InvalidTask(f"{exc} ({place})") from exc
    return {
        "queue": task.queue,
        "aliases": list(task.aliases),
        "async": isinstance(task, AsyncTask),
        "signature": task.signature.stable_text,
        "place": place,
        "options": task.declared_options.show(),
    }


def definitions_hash(definitions: Mapping[str, Any]) -> str:
    """SHA-256 in hex. Places do not count: code may move, and lies elsewhere on another machine."""
    tasks = definitions["tasks"]
    counted = {
        **definitions,
        "tasks": {name: {key: value for key, value in tasks[name].items() if key != "place"} for name in tasks},
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
