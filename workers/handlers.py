"""Finds the functions, and programs, that a queue's jobs are given to."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forq.errors import ConfigError, Permanent
from forq.job import Job
from forq.options import QueueSpec
from forq.program_line import check_program, is_program
from forq.workers.exec_handler import ExecHandler, ExecOnceHandler, close_handlers

# Characters of an exception's name and message.
MAX_REASON = 2000

Handler = Callable[[Any, Job], Any]


class Handlers:
    """The handler of each job type of one queue; `None` is the type of jobs that name none."""

    def __init__(self, by_type: Mapping[str | None, Handler]) -> None:
        self._by_type = by_type
        self.default = by_type.get(None)

    def for_type(self, job_type: str | None) -> Handler:
        handler = self._by_type.get(job_type)
        if handler is None:
            known = ", ".join(sorted(name for name in self._by_type if name)) or "none"
            wanted = f"jobs of type {job_type!r}" if job_type else "jobs without a type"
            raise Permanent(f"the queue has no handler for {wanted}; it has types: {known}")
        return handler

    def for_worker(self) -> "Handlers":
        """The same for one worker: a program has one job at a time, so each worker has instances of its own."""
        if not any(isinstance(handler, ExecHandler) for handler in self._by_type.values()):
            return self
        own = {name: each.another() if isinstance(each, ExecHandler) else each for name, each in self._by_type.items()}
        return Handlers(own)

    def close(self) -> None:
        """Ends the programs that were kept running for one worker."""
        close_handlers(list(self._by_type.values()))


def load_handlers(spec: QueueSpec, keep_fds: Sequence[int] = ()) -> Handlers:
    """Imports every handler of the queue; ConfigError says which one cannot be had, and why.

    `keep_fds`: descriptors that programs inherit.
    """
    for directory in reversed(spec.path):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    by_type: dict[str | None, Handler] = {}
    if spec.handler is not None:
        by_type[None] = _load(spec.handler, spec, keep_fds)
    for job_type, path in spec.handlers.items():
        by_type[job_type] = _load(path, spec, keep_fds)
    return Handlers(by_type)


def load_fail_handler(spec: QueueSpec, keep_fds: Sequence[int] = ()) -> Handlers | None:
    """The handler for jobs that failed for good, if the queue has one. After load_handlers, which sets the path."""
    return None if spec.fail_handler is None else Handlers({None: _load(spec.fail_handler, spec, keep_fds)})


def _load(handler: str, spec: QueueSpec, keep_fds: Sequence[int]) -> Handler:
    if is_program(handler):
        line = check_program(handler)
        return ExecOnceHandler(line, keep_fds) if line.once else ExecHandler(line, spec.name, keep_fds=keep_fds)
    try:
        return load_handler(handler)
    except ConfigError as exc:
        missing = [text for directory in spec.path if (text := _why_unusable(directory))]
        if missing and isinstance(exc.__cause__, ModuleNotFoundError):
            raise ConfigError(f"{exc}; {'; '.join(missing)}") from exc
        raise


def _why_unusable(directory: str) -> str | None:
    """What keeps Python from looking into a directory of `path`; Python itself passes over it without a word."""
    if not os.path.exists(directory):
        return f"its path {directory} does not exist"
    return None if os.access(directory, os.R_OK) else f"its path {directory} may not be read by user {os.geteuid()}"


def leave_if_copy_of(pid: int) -> None:
    """After user code: a copy of process `pid` that the code forked, and that came back from it, ends here. It must not
    go on as a second worker under the same name."""
    if os.getpid() != pid:
        os._exit(0)


def load_handler(path: str) -> Handler:
    """`package.module:function`, or a module that has a function `handle`."""
    module_name, _, function = path.partition(":")
    function = function or "handle"
    pid = os.getpid()
    try:
        handler: Any = getattr(importlib.import_module(module_name), function, None)
        usable = callable(handler)
    except BaseException as exc:  # user code: whatever it raises at import is a reason to show, even SystemExit
        raise ConfigError(f"handler {path!r} cannot be imported: {described(exc)}") from exc
    finally:
        leave_if_copy_of(pid)
    if not usable:
        raise ConfigError(f"handler {path!r}: module {module_name} has no function {function}")
    return handler  # type: ignore[no-any-return]


# The name of a class, past its metaclass, which may have a property of that name.
name_of: Callable[[type], str] = type.__dict__["__name__"].__get__


def said(ask: Callable[[], object]) -> str:
    """What a class of the user's says of itself. It may raise anything, SystemExit too, or not be text at all; lone
    surrogates, which JSON cannot hold, are replaced."""
    try:
        # The method of `str` itself: the answer may be of a subclass with methods of its own.
        return str.encode(str(ask()), "utf-8", "replace").decode()
    except BaseException as broken:
        return f"(cannot be told: {name_of(type(broken))})"


def described(exc: BaseException) -> str:
    """An exception in a line or more, whatever its class does."""
    return f"{name_of(type(exc))}: {said(lambda: str(exc))}"[:MAX_REASON]
