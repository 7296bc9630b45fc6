"""Loads the handlers of a queue: imports Python functions, prepares programs, and explains why one cannot be loaded."""

import importlib
import inspect
import mmap
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import forq
from forq.app.definitions import definitions_hash
from forq.errors import CannotImport, ConfigError, InvalidTask, Permanent
from forq.job import Job
from forq.job_options import AttemptOptions
from forq.queue_spec import QueueSpec, check_program, is_program
from forq.workers.exec_handlers import ExecHandler, ExecOnceHandler, close_handlers

# Characters of an exception's name and message, and of a traceback.
MAX_REASON = 2000
MAX_TRACEBACK = 6000
SHOWN_FUNCTIONS = 10
# Job types of which is_async remembers the answer.
MAX_TYPES = 1000

Handler = Callable[[Any, Job], Any]


class Handlers:
    """The handlers of one queue by job type; `None` stands for jobs without a type."""

    def __init__(self, by_type: Mapping[str | None, Handler]) -> None:
        self._by_type = by_type
        default = by_type.get(None)
        # The apps whose lifespans the process enters.
        self.apps: list[Any] = [each for each in by_type.values() if is_app(each)]
        # A forq.App finds the task of a type itself.
        self._other_types = default if is_app(default) else None
        self._is_async: dict[str | None, bool] = {}

    def for_type(self, job_type: str | None) -> Handler:
        """The handler or the task of this type; an app itself if none of its tasks has it: the app reports that."""
        handler: Any = self._by_type.get(job_type, self._other_types)
        if handler is None:
            known = ", ".join(sorted(name for name in self._by_type if name)) or "none"
            wanted = f"jobs of type {job_type!r}" if job_type else "jobs without a type"
            raise Permanent(f"the queue has no handler for {wanted}; it has types: {known}")
        return cast(Handler, handler._handler_of(job_type) if is_app(handler) else handler)

    @cached_property
    def some_async(self) -> bool:
        """Whether some handler is async for certain."""
        types = [*self._by_type, *(name for app in self.apps for name in app.tasks)]
        return any(self.is_async(job_type) for job_type in types)

    def is_async(self, job_type: str | None) -> bool:
        """Whether the handler of this type only creates a coroutine when it is called. False if unknown."""
        known = self._is_async.get(job_type)
        if known is None:
            handler: Any = self._by_type.get(job_type, self._other_types)
            known = handler._is_async(job_type) if is_app(handler) else _is_async(handler)
            # A job's type may be any text.
            if len(self._is_async) < MAX_TYPES:
                self._is_async[job_type] = known
        return known

    def options_of(self, job_type: str | None) -> AttemptOptions | None:
        """The options of the task that runs jobs of this type; None for a plain handler."""
        handler: Any = self._by_type.get(job_type, self._other_types)
        return handler._task_options(job_type) if is_app(handler) else None

    def for_worker(self) -> "Handlers":
        """A copy for one worker: a program runs one job at a time, so each worker has its own instances."""
        if not any(isinstance(handler, ExecHandler) for handler in self._by_type.values()):
            return self
        own = {
            name: each.for_another_worker() if isinstance(each, ExecHandler) else each
            for name, each in self._by_type.items()
        }
        return Handlers(own)

    def close(self) -> None:
        """Stops the programs of one worker."""
        close_handlers(list(self._by_type.values()))


def load_handlers(spec: QueueSpec, keep_fds: Sequence[int] = ()) -> Handlers:
    """Loads every handler of the queue. Raises ConfigError. `keep_fds`: descriptors that programs inherit."""
    _add_to_path(spec.path)
    # First: its import may prepare that of the handlers, as django.setup() does.
    app = None if spec.app is None else load_app(spec.app, spec.path)
    by_type: dict[str | None, Handler] = {}
    if spec.handler is not None:
        by_type[None] = _load(spec.handler, spec, keep_fds)
    if spec.definitions_hash is not None:
        _prepare_app(by_type[None], spec)
    for job_type, path in spec.handlers.items():
        by_type[job_type] = _load(path, spec, keep_fds)
    return Handlers(by_type) if app is None else _with_app(by_type, app, str(spec.app))


def _is_async(handler: Any) -> bool:
    called = handler if type(handler) is FunctionType else getattr(type(handler), "__call__", None)  # noqa: B004
    return type(called) is FunctionType and bool(called.__code__.co_flags & inspect.CO_COROUTINE)


def is_app(handler: object) -> bool:
    return getattr(type(handler), "runs_all_types", False) is True


def _with_app(by_type: Mapping[str | None, Handler], app: Any, path: str) -> Handlers:
    """Plain handlers of a queue with `app`: the app's hooks run around them. Programs have none."""

    def wrapped(handler: Handler) -> Handler:
        return handler if is_app(handler) or isinstance(handler, ExecHandler) else app.around_handler(handler, path)

    try:
        handlers = Handlers({name: wrapped(each) for name, each in by_type.items()})
    except InvalidTask as exc:
        raise CannotImport(str(exc)) from exc
    if app not in handlers.apps:
        handlers.apps.append(app)
    return handlers


def _add_to_path(directories: Sequence[str]) -> None:
    for directory in reversed(directories):
        if directory not in sys.path:
            sys.path.insert(0, directory)


class CodeChanged(ConfigError):
    """The definitions of an app differ from those that the supervisor has read."""


def _prepare_app(app: Any, spec: QueueSpec) -> None:
    """Raises CodeChanged if the supervisor has read other definitions than those of the imported code: queues, their
    options and schedules would not fit the tasks."""
    pid = os.getpid()
    try:
        changed = definitions_hash(app.definitions()) != spec.definitions_hash
        if spec.task_options and not changed:
            app.override_task_options(spec.task_options)
    except BaseException as exc:  # user code may raise anything
        trace, place = user_traceback(exc)
        raise CannotImport(f"app {spec.handler!r} is not valid: {describe_exception(exc)}{place}", trace) from exc
    finally:
        exit_if_forked_from(pid)
    if changed:
        raise CodeChanged(
            f"the code of app {app.name!r} has changed since its definitions were read; "
            f"run: forqctl restart --app {app.name}"
        )


def load_app(path: str, directories: Sequence[str]) -> Any:
    """Loads the forq.App `package.module:attribute`. Raises CannotImport."""
    _add_to_path(directories)
    try:
        app = load_handler(path, "app")
    except CannotImport as exc:
        raise _with_unusable_path(exc, directories) from exc.__cause__
    if not getattr(type(app), "runs_all_types", False):
        raise CannotImport(f"app {path!r} is not an app, but of type {class_name(type(app))}; write app = forq.App(…)")
    return app


def load_fail_handler(spec: QueueSpec, apps: Sequence[Any] = (), keep_fds: Sequence[int] = ()) -> Handlers | None:
    """The queue's fail handler, if it has one. Call load_handlers first: it sets sys.path. `apps`: of the queue."""
    if spec.fail_handler is None:
        return None
    handler = _load(spec.fail_handler, spec, keep_fds)
    if not is_app(handler) and not isinstance(handler, ExecHandler | ExecOnceHandler):
        for app in apps:
            handler = app._around_fail_handler(handler, spec.fail_handler)
    return Handlers({None: handler})


def _load(handler: str, spec: QueueSpec, keep_fds: Sequence[int]) -> Handler:
    if is_program(handler):
        line = check_program(handler)
        return ExecOnceHandler(line, keep_fds) if line.once else ExecHandler(line, spec.name, keep_fds=keep_fds)
    try:
        return load_handler(handler)
    except CannotImport as exc:
        raise _with_unusable_path(exc, spec.path) from exc.__cause__


def _with_unusable_path(exc: CannotImport, directories: Sequence[str]) -> CannotImport:
    """The error, with the directories that Python cannot import from, if a module was not found."""
    missing = [text for directory in directories if (text := _why_unusable(directory))]
    if missing and isinstance(exc.__cause__, ModuleNotFoundError):
        return CannotImport(f"{exc}; {'; '.join(missing)}", exc.traceback)
    return exc


def _why_unusable(directory: str) -> str | None:
    """The reason why Python cannot import from a directory of `path`, which it skips silently; None if it can."""
    if not os.path.exists(directory):
        return f"its path {directory} does not exist"
    return None if os.access(directory, os.R_OK) else f"its path {directory} is not readable by user {os.geteuid()}"


def exit_if_forked_from(pid: int) -> None:
    """Called after user code. If that code forked and the forked process returned, exits: it must not continue as a
    second worker with the same id."""
    if os.getpid() != pid:
        os._exit(0)


# Of madvise(2), since Linux 4.14; the module mmap does not name it.
_MADV_WIPEONFORK = 18
_mark: memoryview | None = None


def fork_mark() -> memoryview:
    """One byte: 1 in this process, 0 in every process that it forks.

    The kernel clears the page in the child, whatever code has forked. A worker reads the byte after each job: that
    takes a tenth of the time of a system call such as getpid.
    """
    global _mark
    if _mark is None or not _mark[0]:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mark = memoryview(page)
        try:
            page.madvise(_MADV_WIPEONFORK)
        except OSError:  # an older kernel: forks by C code are not noticed
            os.register_at_fork(after_in_child=partial(mark.__setitem__, 0, 0))
        mark[0] = 1
        _mark = mark
    return _mark


def exit_if_forked(mark: memoryview) -> None:
    """The same as `exit_if_forked_from`, with the mark of this process."""
    if not mark[0]:
        os._exit(0)


def load_handler(path: str, what: str = "handler") -> Handler:
    """Loads `package.module:function`, or `handle` of a module. Raises CannotImport if that fails, or if it cannot be
    called with (data, job). `what` names it in errors."""
    module_name, _, function = path.partition(":")
    function = function or "handle"
    pid = os.getpid()
    try:
        module = importlib.import_module(module_name)
        handler: Any = getattr(module, function, None)
        usable = callable(handler)
        mismatch = _why_not_callable_with_job(handler) if usable and what == "handler" else None
    except BaseException as exc:  # user code may raise anything at import, even SystemExit
        trace, place = user_traceback(exc)
        reason = f"{what} {path!r} cannot be imported: {describe_exception(exc)}{place}"
        raise CannotImport(reason, trace) from exc
    finally:
        exit_if_forked_from(pid)
    if not usable:
        others = _functions_of(module)
        kind = "function" if what == "handler" else "attribute"
        raise CannotImport(f"{what} {path!r}: module {module_name} has no {kind} {function}; it has {others}")
    if mismatch is not None:
        raise CannotImport(f"{what} {path!r} cannot be called with (data, job): {mismatch}")
    return handler  # type: ignore[no-any-return]


def _functions_of(module: ModuleType) -> str:
    found = [name for name, value in vars(module).items() if type(value) is FunctionType and name.isidentifier()]
    more = "" if len(found) <= SHOWN_FUNCTIONS else f" and {len(found) - SHOWN_FUNCTIONS} more"
    return (", ".join(found[:SHOWN_FUNCTIONS]) or "none") + more


def _why_not_callable_with_job(handler: Any) -> str | None:
    """None if it takes two arguments, or if that is unknown: some C callables have no signature. A decorated function
    is judged by the decorator's signature."""
    if type(handler) is FunctionType and _takes_two_arguments(handler):
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
        return f"it is {name}{signature}{place}, {exc}; define it as def {name}(data, job)"


def _takes_two_arguments(function: FunctionType) -> bool:
    """The usual case without `inspect`, which would cost private memory in each of many processes."""
    code, defaults = function.__code__, function.__defaults__ or ()
    if code.co_kwonlyargcount:
        return False
    return code.co_argcount - len(defaults) <= 2 and (code.co_argcount >= 2 or bool(code.co_flags & inspect.CO_VARARGS))


_SKIPPED_FRAMES = ("<frozen importlib", importlib.__file__, str(Path(forq.__file__).parent) + os.sep)


def user_traceback(exc: BaseException) -> tuple[str | None, str]:
    """The traceback without frames of importlib and forq, and its last place as text; (None, "") if nothing is left."""
    try:
        trace = traceback.TracebackException.from_exception(exc)
        lines = "".join(_without_skipped(trace).format())
        last = trace.stack[-1] if trace.stack else None
    except BaseException:  # a user's exception may raise while it is formatted
        return None, ""
    if last is None and not isinstance(exc, SyntaxError):
        return None, ""
    place = "" if last is None else f" ({last.filename}, line {last.lineno})"
    text = str.encode(lines, "utf-8", "replace").decode()
    if len(text) > MAX_TRACEBACK:
        tail = text[-MAX_TRACEBACK:]
        text = "…\n" + (tail.partition("\n")[2] or tail)
    return text.rstrip("\n"), place


def _without_skipped(trace: traceback.TracebackException) -> traceback.TracebackException:
    """Includes chained exceptions."""
    kept = [frame for frame in trace.stack if not frame.filename.startswith(_SKIPPED_FRAMES)]
    trace.stack = traceback.StackSummary.from_list(kept)
    for earlier in (trace.__cause__, trace.__context__):
        if earlier is not None:
            _without_skipped(earlier)
    return trace


# Ignores a metaclass that overrides __name__.
class_name: Callable[[type], str] = type.__dict__["__name__"].__get__


def safe_text(make_text: Callable[[], object]) -> str:
    """Text from user code, which may raise anything, even SystemExit, or return something other than text. Replaces
    lone surrogates, which JSON cannot hold."""
    try:
        # Calls str.encode directly: a subclass may override it.
        return str.encode(str(make_text()), "utf-8", "replace").decode()
    except BaseException as broken:
        return f"(unprintable: {class_name(type(broken))})"


def describe_exception(exc: BaseException) -> str:
    """An exception as text, even if its class misbehaves."""
    return f"{class_name(type(exc))}: {safe_text(lambda: str(exc))}"[:MAX_REASON]
