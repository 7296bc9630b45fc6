"""Parses and checks the definition of a queue, from a config file, forqctl or the state directory.

A handler is a Python function, or a program: "exec:PROGRAM ARGS…", "exec-once:PROGRAM ARGS…".
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forq.errors import ConfigError, ForqError, InvalidOption, UsageError
from forq.settings import WORK, Value, check_mode, parse_options
from forq.values import check_queue_name, check_type, shown

ALLOWED_PROGRAMS = '"exec:/path/program ARGS…" or "exec-once:/path/program ARGS…"'

_HANDLER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")


@dataclass(frozen=True)
class QueueSpec:
    """`options` holds only options that were set, so that a new release can change defaults.

    `app`: the app whose hooks run around its jobs, as "package.module:attribute". For a queue that an app defines,
    `definitions_hash` is the hash of the definitions that the supervisor has read, and `task_options` are those of the
    tables [apps.NAME.tasks.TASK].
    """

    name: str
    mode: str
    handler: str | None
    handlers: Mapping[str, str]
    path: tuple[str, ...]
    options: Mapping[str, Value]
    fail_handler: str | None = None
    app: str | None = None
    task_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    definitions_hash: str | None = None

    @classmethod
    def from_mapping(
        cls, name: str, mapping: Mapping[str, object], where: str, default_mode: str = WORK
    ) -> "QueueSpec":
        """Options may be given beside handler and path, as in a config file, or in their own table `options`."""
        fields = {key: value for key, value in mapping.items() if value is not None}
        options = _table(fields.pop("options", {}), "options", where)
        for key, value in options.items():
            if key in fields:
                raise InvalidOption(f"{where}: {shown(key)} is given twice")
            fields[key] = value
        mode = check_mode(fields.pop("mode", default_mode), where)
        path = _check_path(fields.pop("path", ()), where)
        handler = _check_handler(fields.pop("handler"), "handler", where) if "handler" in fields else None
        fail = _check_handler(fields.pop("fail_handler"), "fail_handler", where) if "fail_handler" in fields else None
        handlers = _take_handlers(fields, where)
        checked = _checked(check_queue_name, name, where)
        spec = cls(checked, mode, handler, handlers, path, parse_options(fields, where, mode), fail)
        spec._check_handlers(where)
        return spec

    def _check_handlers(self, where: str) -> None:
        if self.mode == WORK:
            if self.handler is None and not self.handlers:
                raise InvalidOption(
                    f'{where}: a queue of mode work needs handler = "package.module:function" or handlers.TYPE'
                )
            return
        for key in ("handler", "handlers", "fail_handler", "path"):
            if getattr(self, key):
                raise InvalidOption(f"{where}: {key} is not allowed: a queue of mode {self.mode} runs no code")

    def to_mapping(self) -> dict[str, object]:
        """The inverse of from_mapping; JSON types only."""
        return {
            "mode": self.mode,
            "handler": self.handler,
            "handlers": dict(self.handlers),
            "fail_handler": self.fail_handler,
            "path": list(self.path),
            "options": dict(self.options),
        }


def _check_path(given: object, where: str) -> tuple[str, ...]:
    folders = [given] if isinstance(given, str) else given
    if not isinstance(folders, list | tuple):
        raise InvalidOption(f"{where}: path = {shown(given)} is not allowed: a directory, or a list of directories")
    for folder in folders:
        # A relative path would depend on the supervisor's working directory.
        if not isinstance(folder, str) or not os.path.isabs(folder) or "\0" in folder:
            raise InvalidOption(f"{where}: path = {shown(folder)} is not allowed: an absolute directory, as text")
    return tuple(folders)


def _take_handlers(fields: dict[str, object], where: str) -> dict[str, str]:
    """Removes `handlers` and every `handlers.TYPE` from the fields, and returns the handlers by type."""
    handlers = dict(_table(fields.pop("handlers", {}), "handlers", where))
    for key in [key for key in fields if key.startswith("handlers.")]:
        job_type = key.removeprefix("handlers.")
        if job_type in handlers:
            raise InvalidOption(f"{where}: {shown(key)} is given twice")
        handlers[job_type] = fields.pop(key)
    return {
        _checked(check_type, job_type, where): _check_handler(handler, f"handlers.{job_type}", where)
        for job_type, handler in handlers.items()
    }


def _check_handler(handler: object, key: str, where: str) -> str:
    if isinstance(handler, str) and is_program(handler):
        try:
            read_program(handler)
        except UsageError as exc:
            raise InvalidOption(f"{where}: {key} = {shown(handler)} is not allowed: {exc}") from exc
    elif not isinstance(handler, str) or not _HANDLER.fullmatch(handler):
        raise InvalidOption(
            f"{where}: {key} = {shown(handler)} is not allowed: "
            f'"package.module:function", "package.module" with a function handle, or {ALLOWED_PROGRAMS}'
        )
    return handler


def _table(given: object, key: str, where: str) -> Mapping[str, object]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidOption(f"{where}: {key} = {shown(given)} is not allowed: a table of names and values")
    return given


def _checked(check: Callable[[object], str], value: object, where: str) -> str:
    try:
        return check(value)
    except ForqError as exc:
        raise type(exc)(f"{where}: {exc}") from exc


class ProgramLine(NamedTuple):
    """`once`: the program is started for each job; otherwise it keeps running and gets one job after another."""

    once: bool
    argv: tuple[str, ...]


def is_program(handler: str) -> bool:
    return handler.startswith(("exec:", "exec-once:"))


def read_program(handler: str) -> ProgramLine:
    """Splits the arguments as a shell would, without expansions. UsageError if it cannot be parsed."""
    kind, _, rest = handler.partition(":")
    try:
        argv = tuple(shlex.split(rest))
    except ValueError as exc:
        raise UsageError(f"{exc}; allowed: {ALLOWED_PROGRAMS}") from exc
    # A relative path would depend on the supervisor's working directory.
    if not argv or not os.path.isabs(argv[0]) or "\0" in rest:
        raise UsageError(f"the program must be an absolute path: {ALLOWED_PROGRAMS}")
    return ProgramLine(kind == "exec-once", argv)


def check_program(handler: str) -> ProgramLine:
    """ConfigError if the program does not exist or is not executable."""
    line = read_program(handler)
    path = line.argv[0]
    if not os.path.isfile(path):
        raise ConfigError(f"handler {handler!r} cannot be run: {path} is not a file")
    if not os.access(path, os.X_OK):
        raise ConfigError(f"handler {handler!r} cannot be run: {path} is not executable")
    return line
