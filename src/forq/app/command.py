"""`forq app`: shows the tasks, queues, schedules and hooks of an app, and creates its queues.

It imports the app in this process: the user's own code, in the user's own shell.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

from forq.app.app import App
from forq.app.definitions import Definitions
from forq.app.loading import load_app, split_path
from forq.errors import CannotImport, ExitCode, ForqError, UsageError

ABOUT = (
    "Imports an app and shows its tasks, queues, schedules and hooks. Without --create it needs no Redis. "
    "Exit status: 0; 2: wrong arguments; 78: the app cannot be imported, or its definitions are invalid; "
    "1: a queue cannot be created."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = ABOUT
    parser.add_argument("app", metavar="MODULE:APP", help="such as shop.tasks:app; the current directory is searched")
    parser.add_argument("--json", action="store_true", help="print the definitions as JSON")
    parser.add_argument(
        "--create",
        action="store_true",
        help="create the queues that are absent in Redis (the app's url, else FORQ_REDIS); others stay as they are",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    sys.path.insert(0, os.getcwd())
    try:
        # Output of user code must not mix with JSON.
        with redirect_stdout(sys.stderr):
            app = load_app(arguments.app)
            definitions = app.definitions()
    except ForqError as exc:
        if isinstance(exc, CannotImport) and exc.traceback is not None:
            print(exc.traceback, file=sys.stderr)
        print(f"forq: {exc}", file=sys.stderr)
        return ExitCode.WRONG_ARGUMENTS if type(exc) is UsageError else ExitCode.CONFIG
    if arguments.create:
        return _create_queues(app, as_json=arguments.json)
    if arguments.json:
        print(json.dumps(definitions, ensure_ascii=False, indent=2))
    else:
        print("\n".join(describe(definitions, ":".join(split_path(arguments.app)))))
    return 0


def _create_queues(app: App, *, as_json: bool) -> int:
    """Creates what it can, and reports each queue."""
    failed = 0
    created: dict[str, bool] = {}
    for name in app.queue_names():
        try:
            created[name] = app.create_queue(name)
        except ForqError as exc:
            print(f"forq: queue {name!r}: {exc}", file=sys.stderr)
            failed = exc.exit_code
    if as_json:
        print(json.dumps(created))
    else:
        for name, new in created.items():
            print(f"{name}: {'created' if new else 'exists'}")
    return failed


def describe(definitions: Definitions, path: str) -> Iterator[str]:
    """The definitions as text, line by line."""
    yield f"app {definitions['app']} ({path})"
    yield ""
    yield "tasks:" if definitions["tasks"] else "tasks: none; decorate functions with @app.task"
    for name, task in definitions["tasks"].items():
        yield f"  {'async ' if task['async'] else ''}{name}{task['signature']}"
        aliases = {"aliases": ", ".join(task["aliases"])} if task["aliases"] else {}
        yield f"      {_pairs({'queue': task['queue'], **aliases, **task['options']})}  ({task['place']})"
    yield "queues:"
    for name, table in definitions["queues"].items():
        yield f"  {name}: {_pairs(table) or 'default options'}"
    if definitions["schedules"]:
        yield "schedules:"
        for queue, schedules in definitions["schedules"].items():
            for key, table in schedules.items():
                yield f"  {key} (queue {queue}): {_pairs(table)}"
    yield f"hooks: {', '.join(f'{count} {kind}' for kind, count in definitions['hooks'].items())}"


def _pairs(table: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} = {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in table.items()
    )
