"""The census of an app, in a process of its own: imports the app and writes its definitions to the supervisor.

The supervisor imports no user code. This process has neither the scoreboard nor a connection, and nothing waits for its
exit code. It writes one line of JSON:

    {"definitions": {…}, "hash": "…", "files": […]}     or     {"error": "…", "traceback": "…", "files": […]}
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import orjson

from forq.app.definitions import definitions_hash
from forq.app_spec import AppSpec
from forq.errors import CannotImport, ForqError
from forq.output.streams import install
from forq.procs.context import Context
from forq.procs.stacks import STACK_SIGNAL
from forq.procs.treekill import set_parent_death_signal
from forq.workers.child import apply_resource_limits
from forq.workers.handlers import describe_exception, exit_if_forked_from, load_app, user_traceback

log = logging.getLogger("forq")

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_FILES = 10_000


@dataclass(frozen=True)
class CensusSettings:
    """Passed from the supervisor at the fork. `supervisor`: its pid. `stack_fd`: receives a stack dump on a signal."""

    context: Context
    app: AppSpec
    supervisor: int
    # Directory of the output FIFO; None: writes to the supervisor's stdout and stderr.
    output: str | None
    stack_fd: int


def run_census(settings: CensusSettings, pipe: socket.socket) -> int:
    # Unlike a queue's process it has no leash to watch.
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != settings.supervisor:
        return 1
    if settings.context.tree_mark is not None:
        settings.context.tree_mark.apply()
    if settings.output is not None:
        try:
            install(settings.output, (), settings.context.log_level)
        except (ForqError, OSError) as exc:
            log.error("failed to open the output FIFO; output is not captured app=%s error=%s", settings.app.label, exc)
    faulthandler.register(STACK_SIGNAL, file=settings.stack_fd, all_threads=True, chain=False)
    apply_resource_limits({})
    line = _encode(_read(settings.app))
    try:
        pipe.sendall(line)
    except OSError as exc:
        # The module has closed descriptors that it did not open.
        log.error("cannot report the definitions of an app app=%s error=%s", settings.app.label, exc)
    return 0


def _read(spec: AppSpec) -> dict[str, Any]:
    pid = os.getpid()
    try:
        app = load_app(spec.app, spec.path)
        made = app.definitions()
        found = {"definitions": made, "hash": definitions_hash(made)}
    except CannotImport as exc:
        found = {"error": str(exc), "traceback": exc.traceback}
    except BaseException as exc:  # user code may raise anything
        trace, place = user_traceback(exc)
        found = {"error": f"app {spec.app!r} is not valid: {describe_exception(exc)}{place}", "traceback": trace}
    finally:
        exit_if_forked_from(pid)
    return {**found, "files": _files(spec.path)}


def _encode(found: dict[str, Any]) -> bytes:
    try:
        line = orjson.dumps(found) + b"\n"
    except (TypeError, ValueError) as exc:
        line = orjson.dumps({"error": f"its definitions are not JSON: {exc}", "traceback": None, "files": []}) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        reason = f"its definitions have {len(line)} bytes as JSON, but at most {MAX_LINE_BYTES} are allowed"
        return orjson.dumps({"error": reason, "traceback": None, "files": []}) + b"\n"
    return line


def _files(directories: tuple[str, ...]) -> list[str]:
    """The source files of the modules that were imported from these directories, without installed packages."""
    roots = tuple(os.path.join(directory, "") for directory in directories)
    found: list[str] = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(roots) and "site-packages" not in file and len(found) < MAX_FILES:
            found.append(file)
    return found
