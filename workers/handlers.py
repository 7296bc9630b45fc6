"""Finds the functions, and programs, that a queue's jobs are given to."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import forq
from forq.errors import CannotImport, Permanent
from forq.job import Job
from forq.queue_spec import QueueSpec, check_program, is_program
from forq.workers.exec_handlers import ExecHandler, ExecOnceHandler, close_handlers

# Characters of an exception's name and message, and of a traceback.
MAX_REASON = 2000
MAX_TRACEBACK = 6000
SHOWN_FUNCTIONS = 10

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
        own = {
            name: each.for_another_worker() if isinstance(each, ExecHandler) else each
            for name, each in self._by_type.items()
        }
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
    except CannotImport as exc:
        missing = [text for directory in spec.path if (text := _why_unusable(directory))]
        if missing and isinstance(exc.__cause__, ModuleNotFoundError):
            raise CannotImport(f"{exc}; {'; '.join(missing)}", exc.traceback) from exc
        raise


def _why_unusable(directory: str) -> str | None:
    """What keeps Python from looking into a directory of `path`; Python itself passes over it without a word."""
    if not os.path.exists(directory):
        return f"its path {directory} does not exist"
    return None if os.access(directory, os.R_OK) else f"its path {directory} may not be read by user {os.geteuid()}"


def exit_if_forked_from(pid: int) -> None:
    """After user code: a copy of process `pid` that the code forked, and that came back from it, ends here. It must not
    go on as a second worker under the same name."""
    if os.getpid() != pid:
        os._exit(0)


def load_handler(path: str) -> Handler:
    """`package.module:function`, or a module that has a function `handle`. CannotImport if it cannot be had, or cannot
    be called with (data, job)."""
    module_name, _, function = path.partition(":")
    function = function or "handle"
    pid = os.getpid()
    try:
        module = importlib.import_module(module_name)
        handler: Any = getattr(module, function, None)
        usable = callable(handler)
        mismatch = _why_not_callable_with_job(handler) if usable else None
    except BaseException as exc:  # user code: whatever it raises at import is a reason to show, even SystemExit
        trace, place = user_traceback(exc)
        reason = f"handler {path!r} cannot be imported: {describe_exception(exc)}{place}"
        raise CannotImport(reason, trace) from exc
    finally:
        exit_if_forked_from(pid)
    if not usable:
        others = _functions_of(module)
        raise CannotImport(f"handler {path!r}: module {module_name} has no function {function}; it has {others}")
    if mismatch is not None:
        raise CannotImport(f"handler {path!r} cannot be called with (data, job): {mismatch}")
    return handler  # type: ignore[no-any-return]


def _functions_of(module: ModuleType) -> str:
    """Those that are defined in it, by name."""
    found = [name for name, value in vars(module).items() if type(value) is FunctionType and name.isidentifier()]
    more = "" if len(found) <= SHOWN_FUNCTIONS else f" and {len(found) - SHOWN_FUNCTIONS} more"
    return (", ".join(found[:SHOWN_FUNCTIONS]) or "none") + more


def _why_not_callable_with_job(handler: Any) -> str | None:
    """None if it takes two arguments, or if nobody can say: some callables of C code have no signature. Of a decorated
    one its own counts, and not that of what it wraps."""
    if type(handler) is FunctionType and _takes_two(handler):
        return None
    try:
        signature = inspect.signature(handler, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, None)
        return None
    except TypeError as exc:
        code = getattr(handler, "__code__", None)
        place = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
        name = getattr(handler, "__name__", type(handler).__name__)
        return f"it is {name}{signature}{place}, {exc}; the form is def {name}(data, job)"


def _takes_two(function: FunctionType) -> bool:
    """The usual case, without inspect: what that touches is memory which each of many processes has for itself."""
    code, defaults = function.__code__, function.__defaults__ or ()
    if code.co_kwonlyargcount:
        return False
    return code.co_argcount - len(defaults) <= 2 and (code.co_argcount >= 2 or bool(code.co_flags & inspect.CO_VARARGS))


_OUR_FRAMES = ("<frozen importlib", importlib.__file__, str(Path(forq.__file__).parent) + os.sep)


def user_traceback(exc: BaseException) -> tuple[str | None, str]:
    """The traceback without the frames of importlib and of forq's own way to it, and the place in it as a remark; None
    and no remark if nothing is left."""
    try:
        trace = traceback.TracebackException.from_exception(exc)
        lines = "".join(_without_ours(trace).format())
        last = trace.stack[-1] if trace.stack else None
    except BaseException:  # the user's own exceptions may do anything when they are looked at
        return None, ""
    if last is None and not isinstance(exc, SyntaxError):
        return None, ""
    place = "" if last is None else f" ({last.filename}, line {last.lineno})"
    text = str.encode(lines, "utf-8", "replace").decode()
    if len(text) > MAX_TRACEBACK:
        tail = text[-MAX_TRACEBACK:]
        text = "…\n" + (tail.partition("\n")[2] or tail)
    return text.rstrip("\n"), place


def _without_ours(trace: traceback.TracebackException) -> traceback.TracebackException:
    """Also in the exceptions that led to it."""
    kept = [frame for frame in trace.stack if not frame.filename.startswith(_OUR_FRAMES)]
    trace.stack = traceback.StackSummary.from_list(kept)
    for earlier in (trace.__cause__, trace.__context__):
        if earlier is not None:
            _without_ours(earlier)
    return trace


# The name of a class, past its metaclass, which may have a property of that name.
class_name: Callable[[type], str] = type.__dict__["__name__"].__get__


def safe_text(ask: Callable[[], object]) -> str:
    """What a class of the user's says of itself. It may raise anything, SystemExit too, or not be text at all; lone
    surrogates, which JSON cannot hold, are replaced."""
    try:
        # The method of `str` itself: the answer may be of a subclass with methods of its own.
        return str.encode(str(ask()), "utf-8", "replace").decode()
    except BaseException as broken:
        return f"(cannot be told: {class_name(type(broken))})"


def describe_exception(exc: BaseException) -> str:
    """An exception in a line or more, whatever its class does."""
    return f"{class_name(type(exc))}: {safe_text(lambda: str(exc))}"[:MAX_REASON]
