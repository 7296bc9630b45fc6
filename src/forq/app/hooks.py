"""Hooks around the jobs of an app: generator functions that yield once, while the job runs."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from typing import Any

from forq.errors import InvalidTask
from forq.job import RUNNING, Job

_NONE: nullcontext[None] = nullcontext()


class Hooks:
    """The hooks of one app, in the order in which they are entered."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._entered: list[Callable[[Job], Any]] = []
        self._first_async: str | None = None
        # Description, generator function, whether it is async: see workers/lifespan.py.
        self.lifespans: list[tuple[str, Callable[[], Any], bool]] = []

    def add_lifespan(self, hook: Callable[[], Any]) -> None:
        is_async = inspect.isasyncgenfunction(hook)
        name = getattr(hook, "__name__", repr(hook))
        if not is_async and not inspect.isgeneratorfunction(hook):
            raise InvalidTask(
                f"app {self._app_name!r}: the lifespan {name} is not a generator function; "
                f"write def {name}(): … yield …"
            )
        try:
            inspect.signature(hook).bind()
        except TypeError as exc:
            raise InvalidTask(
                f"app {self._app_name!r}: the lifespan {name} cannot be called without arguments: {exc}"
            ) from exc
        self.lifespans.append((f"the lifespan {name} of app {self._app_name!r}", hook, is_async))

    def around_handler(self, handler: Callable[[Any, Job], Any], name: str) -> Callable[[Any, Job], Any]:
        """A plain handler of a queue of this app, with the hooks around it."""
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004

            async def handle_async(data: Any, job: Job) -> Any:
                RUNNING.set(job)
                async with self.asynchronous(job):
                    return await handler(data, job)

            return handle_async
        if self._first_async is not None:
            raise InvalidTask(
                f"app {self._app_name!r}: the async hook {self._first_async} cannot run around handler {name!r}, which "
                "is not async; make the hook a plain generator, or the handler async"
            )

        def handle(data: Any, job: Job) -> Any:
            before = RUNNING.set(job)
            try:
                with self.sync(job):
                    return handler(data, job)
            finally:
                RUNNING.reset(before)

        return handle

    def add(self, hook: Callable[[Job], Any], sync_tasks: list[str]) -> None:
        is_async = inspect.isasyncgenfunction(hook)
        name = getattr(hook, "__name__", repr(hook))
        if not is_async and not inspect.isgeneratorfunction(hook):
            raise InvalidTask(
                f"app {self._app_name!r}: the hook {name} is not a generator function; write def {name}(job): … yield …"
            )
        try:
            inspect.signature(hook).bind(None)
        except TypeError as exc:
            raise InvalidTask(f"app {self._app_name!r}: the hook {name} cannot be called with (job): {exc}") from exc
        if is_async and sync_tasks:
            raise self._mismatch(name, sync_tasks[0])
        if is_async:
            self._first_async = self._first_async or name
        self._entered.append(asynccontextmanager(hook) if is_async else contextmanager(hook))

    def add_first(self, hook: Callable[[Job], Any]) -> None:
        """Adds a hook that is entered before the others: a class whose instances are context managers of both kinds."""
        self._entered.insert(0, hook)

    def counts(self) -> dict[str, int]:
        """The number of hooks of each kind."""
        return {"around": len(self._entered), "lifespan": len(self.lifespans)}

    def check_sync_task(self, task_name: str) -> None:
        """Refuses a task that is not async in an app with an async hook."""
        if self._first_async is not None:
            raise self._mismatch(self._first_async, task_name)

    def _mismatch(self, hook_name: str, task_name: str) -> InvalidTask:
        return InvalidTask(
            f"app {self._app_name!r}: the async hook {hook_name} cannot run around task {task_name!r}, which is not "
            "async; make the hook a plain generator, or the task async"
        )

    def sync(self, job: Job) -> AbstractContextManager[object]:
        return self._around(job) if self._entered else _NONE

    def asynchronous(self, job: Job) -> AbstractAsyncContextManager[object]:
        return self._async_around(job) if self._entered else _NONE

    @contextmanager
    def _around(self, job: Job) -> Iterator[None]:
        failure: BaseException | None = None
        with ExitStack() as stack:
            for hook in self._entered:
                stack.enter_context(hook(job))
            try:
                yield
            except BaseException as exc:
                failure = exc
                raise
        # A hook has swallowed it.
        if failure is not None:
            raise failure

    @asynccontextmanager
    async def _async_around(self, job: Job) -> AsyncIterator[None]:
        failure: BaseException | None = None
        async with AsyncExitStack() as stack:
            for hook in self._entered:
                entered = hook(job)
                if isinstance(entered, AbstractAsyncContextManager):
                    await stack.enter_async_context(entered)
                else:
                    stack.enter_context(entered)
            try:
                yield
            except BaseException as exc:
                failure = exc
                raise
        if failure is not None:
            raise failure
