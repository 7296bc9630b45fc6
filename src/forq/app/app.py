"""App: the tasks of an application. Making one, and importing it, opens no connection."""

import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from forq.app.hooks import Hooks
from forq.app.signature import Signature
from forq.app.tasks import AsyncTask, JobRef, Prepared, RemoteTask, SyncTask, Task, later_or_dead
from forq.client import Client, Queue
from forq.errors import InvalidTask
from forq.job import Job
from forq.values import check_queue_name, check_type, shown

if TYPE_CHECKING:
    from forq.async_client import AsyncClient

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[[Job], Any])


class Decorator(Protocol):
    """What `app.task(…)` returns: keeps the signature of the function that it decorates."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first one wins
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


class App:
    """A registry of tasks.

    `name`: also the default queue of its tasks. `url`, `prefix`: as for Client. An app is a handler, too: a queue whose
    handler is `package.module:app` runs its tasks.
    """

    runs_all_types = True

    def __init__(self, name: str, *, url: str | None = None, prefix: str | None = None) -> None:
        self.name = check_queue_name(name)
        self.tasks: dict[str, Task[..., Any]] = {}
        # Tasks by their name and their aliases.
        self._by_type: dict[str, Task[..., Any]] = {}
        self._url = url
        self._prefix = prefix
        self._hooks = Hooks(self.name)
        self._has_hooks = False
        self._client: Client | None = None
        self._queues: dict[str, Queue] = {}
        self._async_client: AsyncClient | None = None
        self._lock = threading.Lock()

    @property
    def client(self) -> Client:
        """The client of this process."""
        if self._client is None:
            with self._lock:
                self._client = self._client or Client(self._url, prefix=self._prefix)
        return self._client

    def _client_queue(self, name: str) -> Queue:
        """The same Queue for the same name: it keeps what it needs for the next call."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = self.client.queue(name)
        return queue

    @property
    def async_client(self) -> "AsyncClient":
        """The client of this process for asyncio; each event loop has its own connections. Close them before the loop
        ends: `await app.async_client.aclose()`."""
        if self._async_client is None:
            from forq.async_client import AsyncClient

            with self._lock:
                self._async_client = self._async_client or AsyncClient(self._url, prefix=self._prefix)
        return self._async_client

    @overload
    def task(  # type: ignore[overload-overlap]  # as in Decorator
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        aliases: Iterable[str] = (),
        dead_on: tuple[type[BaseException], ...] = (),
    ) -> Decorator: ...

    def task(  # type: ignore[misc]  # mypy wants to pass the function of the third signature
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        queue: str | None = None,
        name: str | None = None,
        aliases: Iterable[str] = (),
        dead_on: tuple[type[BaseException], ...] = (),
    ) -> Any:
        """Registers a function as a task: `@app.task` or `@app.task(queue=…, …)`.

        `queue`: default: the app's name. `name`: stored with each job as its type; default: the function's name.
        `aliases`: earlier names, whose jobs it also runs. `dead_on`: exceptions after which a job is not retried.
        """
        register = partial(self._register, queue or self.name, name, tuple(aliases), dead_on)
        return register if function is None else register(function)

    def task_ref(self, name: str, *, queue: str | None = None) -> Task[..., Any]:
        """A task by its name, for producers without its code; `queue`: default: the app's name."""
        return RemoteTask(self, check_type(name), check_queue_name(queue or self.name))

    def enqueue_many(self, jobs: Iterable[Prepared[R]]) -> list[JobRef[R]]:
        """Stores prepared jobs in bulk, in one call per queue; returns their refs in the same order."""
        prepared = list(jobs)
        groups: dict[tuple[str, str, str | None], list[int]] = {}
        for number, (_, queue, _, update, durable) in enumerate(prepared):
            groups.setdefault((queue, update.if_exists, durable), []).append(number)
        refs: list[JobRef[R] | None] = [None] * len(prepared)
        for (queue, if_exists, durable), numbers in groups.items():
            ids = self._client_queue(queue).enqueue_jobs(
                (prepared[number].job for number in numbers), if_exists=if_exists, durable=durable
            )
            for number, id in zip(numbers, ids, strict=True):
                refs[number] = prepared[number].ref(id)
        return [ref for ref in refs if ref is not None]

    def around(self, hook: H) -> H:
        """Registers a hook that runs around every job: a generator function, or an async one, that yields once.

            @app.around
            def transaction(job):
                with database.transaction():
                    yield

        It sees an exception of the task at its `yield`. If it swallows it, the job fails nevertheless. Hooks are
        entered in the order of their registration. An async hook needs an app whose tasks are all async.
        """
        self._hooks.add(hook, [task.name for task in self.tasks.values() if not isinstance(task, AsyncTask)])
        self._has_hooks = True
        return hook

    def hooks_around(self, job: Job) -> AbstractContextManager[object]:
        """The hooks of a job of a task that is not async."""
        return self._hooks.sync(job)

    def async_hooks_around(self, job: Job) -> AbstractAsyncContextManager[object]:
        return self._hooks.asynchronous(job)

    def __call__(self, data: Any, job: Job) -> Any:
        """Runs a job in a worker."""
        task = self._by_type.get(job.type or "")
        if task is None:
            known = ", ".join(sorted(self.tasks)) or "none"
            raise later_or_dead(job, f"app {self.name!r} has no task {shown(job.type)}; it has: {known}")
        return task.run_job(data, job)

    def _register(
        self,
        queue: str,
        name: str | None,
        aliases: tuple[str, ...],
        dead_on: tuple[type[BaseException], ...],
        function: Callable[..., Any],
    ) -> Task[..., Any]:
        signature = Signature(function, name or str(getattr(function, "__name__", shown(function))))
        names = [check_type(each) for each in (name or function.__name__, *aliases)]
        kind: type[Task[..., Any]] = AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
        task = kind(self, function, names[0], check_queue_name(queue), dead_on, signature)
        if kind is SyncTask:
            self._hooks.check_sync_task(task.name)
        for each in names:
            if each in self._by_type:
                places = f"{_place(self._by_type[each].function)} and {_place(function)}"
                raise InvalidTask(
                    f"app {self.name!r} has two tasks of the name {each!r}: {places}; "
                    "give one of them another name: @app.task(name=…)"
                )
        self.tasks[task.name] = task
        self._by_type |= dict.fromkeys(names, task)
        return task


def _place(function: Callable[..., Any]) -> str:
    code = function.__code__
    return f"{function.__module__}.{function.__qualname__} ({code.co_filename}, line {code.co_firstlineno})"
