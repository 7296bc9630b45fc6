"""Handlers that are programs, as a queue's definition names them: "exec:PROGRAM ARGS…", "exec-once:PROGRAM ARGS…"."""

import os
import shlex
from typing import NamedTuple

from forq.errors import ConfigError, UsageError

ALLOWED = '"exec:/path/program ARGS…" or "exec-once:/path/program ARGS…"'


class ProgramLine(NamedTuple):
    """`once`: the program is started for each job; otherwise it is kept running and told of one after the other."""

    once: bool
    argv: tuple[str, ...]


def is_program(handler: str) -> bool:
    return handler.startswith(("exec:", "exec-once:"))


def read_program(handler: str) -> ProgramLine:
    """Arguments are split as a shell would, and nothing is expanded. UsageError says what cannot be understood."""
    kind, _, rest = handler.partition(":")
    try:
        argv = tuple(shlex.split(rest))
    except ValueError as exc:
        raise UsageError(f"{exc}; allowed is {ALLOWED}") from exc
    # A relative one would depend on the directory that the supervisor happens to run in.
    if not argv or not os.path.isabs(argv[0]) or "\0" in rest:
        raise UsageError(f"the program is an absolute path: {ALLOWED}")
    return ProgramLine(kind == "exec-once", argv)


def check_program(handler: str) -> ProgramLine:
    """ConfigError if there is no such program, or it may not be run."""
    line = read_program(handler)
    path = line.argv[0]
    if not os.path.isfile(path):
        raise ConfigError(f"handler {handler!r} cannot be run: {path} is not a file")
    if not os.access(path, os.X_OK):
        raise ConfigError(f"handler {handler!r} cannot be run: {path} is not executable")
    return line
