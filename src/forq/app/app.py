"""App: the tasks of an application. Making one, and importing it, opens no connection."""

import inspect
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from forq.api_types import Durable, Duration, IfExists
from forq.app.declarations import (
    DeclaredQueue,
    DeclaredSchedule,
    QueueOptions,
    ScheduleOptions,
    declare_queue,
    declare_schedule,
    schedule_of_task,
)
from forq.app.flow import Flow
from forq.app.hooks import Hooks
from forq.app.places import calling_module, calling_place, place_of
from forq.app.signature import Signature
from forq.app.tasks import (
    AsyncTask,
    JobOptions,
    JobRef,
    Prepared,
    RemoteTask,
    Sender,
    SyncTask,
    Task,
    check_member,
    later_or_dead,
)
from forq.batch import Batch, callback_queue, membership_of, open_batch
from forq.broker.batches import check_batch_id
from forq.broker.chunks import NewJob
from forq.broker.link import CALL_TIMEOUT_SECONDS, CONNECT_TIMEOUT_SECONDS
from forq.client import Client, Queue, check_timeout
from forq.errors import ConfigError, ForqError, InvalidOption, InvalidTask, Permanent, UnknownQueue, UsageError
from forq.job import Job, new_id
from forq.job_options import AttemptOptions, check_attempt_options
from forq.settings import Value, suggestion
from forq.values import check_queue_name, check_type, shown

if TYPE_CHECKING:
    from forq.app.definitions import Definitions
    from forq.async_batch import AsyncBatch
    from forq.async_client import AsyncClient

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[[Job], Any])
L = TypeVar("L", bound=Callable[[], Any])


# Results of tasks that declare one are kept this long, unless `keep_done` is given.
KEEP_RESULTS_MS = 3_600_000


class TaskOptions(TypedDict, total=False):
    """Options of `App.task`."""

    queue: str | None
    name: str | None
    aliases: Iterable[str]
    dead_on: tuple[type[BaseException], ...]
    timeout: Duration
    max_retries: int
    backoff: Duration | Sequence[Duration]
    keep_done: Duration
    every: Duration
    cron: str
    zone: str


_ATTEMPT_OPTIONS = ("timeout", "max_retries", "backoff", "keep_done")
_RULE_OPTIONS = ("every", "cron", "zone")


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

    `name`: also the default queue of its tasks. `url`, `prefix`, `timeout`, `connect_timeout`: as for Client. An app is
    a handler, too: a queue whose handler is `package.module:app` runs its tasks.
    """

    runs_all_types = True

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        prefix: str | None = None,
        timeout: float | timedelta = CALL_TIMEOUT_SECONDS,
        connect_timeout: float | timedelta = CONNECT_TIMEOUT_SECONDS,
    ) -> None:
        self.name = check_queue_name(name)
        self.tasks: dict[str, Task[..., Any]] = {}
        # Tasks by their name and their aliases.
        self._by_type: dict[str, Task[..., Any]] = {}
        self._declared_queues: dict[str, DeclaredQueue] = {}
        # By queue and key.
        self._declared_schedules: dict[tuple[str, str], DeclaredSchedule] = {}
        self._module = calling_module()
        self._url = url
        self._prefix = prefix
        self._timeout_seconds = check_timeout("timeout", timeout)
        self._connect_timeout_seconds = check_timeout("connect_timeout", connect_timeout)
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
                self._client = self._client or Client(
                    self._url,
                    prefix=self._prefix,
                    timeout=self._timeout_seconds,
                    connect_timeout=self._connect_timeout_seconds,
                )
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
                self._async_client = self._async_client or AsyncClient(
                    self._url,
                    prefix=self._prefix,
                    timeout=self._timeout_seconds,
                    connect_timeout=self._connect_timeout_seconds,
                )
        return self._async_client

    @overload
    def task(  # type: ignore[overload-overlap]  # as in Decorator
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, **options: Unpack[TaskOptions]) -> Decorator: ...

    def task(  # type: ignore[misc]  # mypy wants to pass the function of the third signature
        self, function: Callable[..., Any] | None = None, /, **options: Any
    ) -> Any:
        """Registers a function as a task: `@app.task` or `@app.task(queue=…, …)`.

        `queue`: default: the app's name. `name`: stored with each job as its type; default: the function's name.
        `aliases`: earlier names, whose jobs it also runs. `dead_on`: exceptions after which a job is not retried.

        `timeout`, `max_retries`, `backoff` (delays before the retries; the last one repeats) and `keep_done` replace
        those of the queue. A task that declares a result has keep_done 1h by default.

        `every`, or `cron` and `zone`: calls the task at these times; see `schedule`.
        """
        register = partial(self._register, options)
        return register if function is None else register(function)

    def queue(self, name: str, **options: Unpack[QueueOptions]) -> None:
        """Declares a queue, with options as in [queues.NAME] of forq.toml. The file overrides them.

        `on_dead`: a function that is called with ([data, job, error], job) for each dead job.
        """
        place = calling_place()
        earlier = self._declared_queues.get(check_queue_name(name))
        if earlier is not None:
            raise InvalidOption(
                f"app {self.name!r} declares queue {name!r} twice: {earlier.place} and {place}; "
                "give all options in one call"
            )
        self._declared_queues[name] = declare_queue(name, options, self.name, place)

    def schedule(self, key: str, job: Prepared[Any], **options: Unpack[ScheduleOptions]) -> None:
        """Enqueues a prepared job at each tick: `app.schedule("report", send.prepare("a@b.c"), cron="30 2 * * *")`.

        `every`: the interval; or `cron` (5 fields) and `zone` (default UTC). `overlap`, `catch_up`, `jitter`: as for
        `Queue.schedule`.
        """
        place = calling_place()
        if not isinstance(job, Prepared) or self.tasks.get(job.task.name) is not job.task:
            raise InvalidTask(
                f"app {self.name!r}, schedule {shown(key)} ({place}): {shown(job)} is not a prepared job of this app; "
                "pass TASK.prepare(ARGUMENTS)"
            )
        self._add_schedule(declare_schedule(key, job, options, self.name, place))

    def _add_schedule(self, schedule: DeclaredSchedule) -> None:
        earlier = self._declared_schedules.setdefault((schedule.queue, schedule.key), schedule)
        if earlier is not schedule:
            raise InvalidTask(
                f"app {self.name!r} has two schedules {schedule.key!r} of queue {schedule.queue!r}: "
                f"{earlier.place} and {schedule.place}; give one of them another key: app.schedule(KEY, …)"
            )

    def definitions(self) -> "Definitions":
        """The tasks, queues, schedules and hooks as JSON types. Raises UsageError for what decoration could not check,
        such as an annotation that cannot be converted."""
        from forq.app.definitions import define

        return define(self.name, self.tasks, self._declared_queues, self._declared_schedules, self._hooks.counts())

    def queue_names(self) -> list[str]:
        """The queues of the tasks and of `queue`, sorted."""
        return sorted({task.queue for task in self.tasks.values()} | self._declared_queues.keys())

    def override_task_options(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets options of tasks, from the tables [apps.APP.tasks.TASK] of a config file. ConfigError if invalid."""
        overridden: dict[str, AttemptOptions] = {}
        for name, table in tables.items():
            where = f"[apps.{self.name}.tasks.{name}]"
            if name not in self.tasks:
                raise ConfigError(f"{where}: app {self.name!r} has no task {shown(name)}{suggestion(name, self.tasks)}")
            if not isinstance(table, Mapping):
                raise ConfigError(f"{where}: {shown(table)} is not allowed: a table with {', '.join(_ATTEMPT_OPTIONS)}")
            for option in table:
                if option not in _ATTEMPT_OPTIONS:
                    near = suggestion(option, _ATTEMPT_OPTIONS)
                    raise ConfigError(f"{where}: there is no option {shown(option)}{near}")
            try:
                overridden[name] = check_attempt_options(**table, where=where)
            except UsageError as exc:
                raise ConfigError(str(exc)) from exc
        for name, task in self.tasks.items():
            task.options = overridden[name].over(task.declared_options) if name in overridden else task.declared_options

    def create_queue(self, name: str) -> bool:
        """Creates a queue of this app in Redis, with its declared options. False if it exists: it stays as it is."""
        from forq.app.queue_creation import create_absent

        return create_absent(self.client, name, self._options_of(name))

    def create_absent_queue(self, name: str) -> None:
        """For producers. UnknownQueue if it was deleted, if the user of Redis may not create it, or if the app does not
        declare it."""
        self._create_absent(self.client, name)

    def _create_absent(self, client: Client, name: str) -> None:
        from forq.app.queue_creation import create_if_never_deleted

        create_if_never_deleted(client, name, self._options_of(name), self._create_command())

    async def acreate_absent_queue(self, name: str) -> None:
        await self.async_client._run(lambda client: self._create_absent(client, name))

    def _options_of(self, queue: str) -> Mapping[str, Value]:
        names = self.queue_names()
        if queue not in names:
            raise UnknownQueue(
                f"no queue {queue!r}: it is not in Redis, and app {self.name!r} does not declare it"
                f"{suggestion(queue, names) if names else ''}; to declare it: app.queue({queue!r})"
            )
        declared = self._declared_queues.get(queue)
        return {} if declared is None else declared.options

    def _create_command(self) -> str:
        module = sys.modules.get(self._module)
        names = [name for name, value in vars(module).items() if value is self] if module else []
        known = names and self._module != "__main__"
        return f"forq app {f'{self._module}:{names[0]}' if known else 'MODULE:APP'} --create"

    def task_ref(self, name: str, *, queue: str | None = None) -> Task[..., Any]:
        """A task by its name, for producers without its code; `queue`: default: the app's name."""
        return RemoteTask(self, check_type(name), check_queue_name(queue or self.name))

    def enqueue_many(self, jobs: Iterable[Prepared[R]]) -> list[JobRef[R]]:
        """Stores prepared jobs in bulk, in one call per queue; returns their refs in the same order."""
        prepared = list(jobs)
        calls: dict[tuple[str, IfExists, Durable | None], list[int]] = {}
        last: Sender[..., R] | None = None
        for number, (sender, _) in enumerate(prepared):
            if sender is not last:
                last, numbers = sender, calls.setdefault(sender._call(), [])
            numbers.append(number)
        refs: list[JobRef[R] | None] = [None] * len(prepared)
        for (queue, if_exists, durable), numbers in calls.items():
            new_jobs = [prepared[number].job for number in numbers]
            try:
                stored = self._client_queue(queue)._enqueue_identified(new_jobs, if_exists, durable)
            except UnknownQueue:
                self.create_absent_queue(queue)
                stored = self._client_queue(queue)._enqueue_identified(new_jobs, if_exists, durable)
            for number, (id, identity) in zip(numbers, stored, strict=True):
                refs[number] = prepared[number].sender._ref(id, identity)
        return [ref for ref in refs if ref is not None]

    def flow(self, id: str | None = None) -> Flow:
        """A flow of this app's tasks, stored at the end of a `with` or `async with` block: see Flow."""
        return Flow(self, id)

    def batch(
        self,
        *,
        queue: str | None = None,
        id: str | None = None,
        on_done: Prepared[Any] | None = None,
        on_end: Prepared[Any] | None = None,
        on_dead: Prepared[Any] | None = None,
        results: bool = False,
    ) -> Batch:
        """Opens a batch: tasks added in a `with` block (`batch.add(send.prepare(…))`), and tasks that run when all of
        them are done, when all have ended, or when the first one is dead. An exception in the block cancels it.

        It lives in the queue of its callbacks; without any, in `queue`, by default that of the app. `results`: it keeps
        the results of its members, for `batch.results()`.
        """
        home, jobs = self._read_callbacks(queue, {"on_done": on_done, "on_end": on_end, "on_dead": on_dead})
        return self._open_batch(self.client, home, id, jobs, results)

    def abatch(
        self,
        *,
        queue: str | None = None,
        id: str | None = None,
        on_done: Prepared[Any] | None = None,
        on_end: Prepared[Any] | None = None,
        on_dead: Prepared[Any] | None = None,
        results: bool = False,
    ) -> "AsyncBatch":
        """The same for asyncio: `async with app.abatch(…) as batch: await batch.add(…)`."""
        from forq.async_batch import AsyncBatch

        home, jobs = self._read_callbacks(queue, {"on_done": on_done, "on_end": on_end, "on_dead": on_dead})
        batch_id = new_id() if id is None else check_batch_id(id)

        def open(client: Client) -> Batch:
            return self._open_batch(client, home, batch_id, jobs, results)

        return AsyncBatch(self.async_client, home, batch_id, open, self._create_absent)

    def _read_callbacks(
        self, queue: str | None, callbacks: Mapping[str, Prepared[Any] | None]
    ) -> tuple[str, dict[str, NewJob | None]]:
        """The home of a batch, and its callbacks as jobs."""
        given = {name: each for name, each in callbacks.items() if each is not None}
        for name, each in given.items():
            check_member(each, "a batch", f"app.batch({name}=TASK.prepare(…))")
            if "id" in each.options:
                raise UsageError(f"{name}: the id of a callback is that of its batch and its name: leave `id` out")
        home = callback_queue(queue if given or queue else self.name, given)
        return home, {name: each.job for name, each in given.items()}

    def _open_batch(
        self, client: Client, home: str, id: str | None, callbacks: Mapping[str, NewJob | None], results: bool
    ) -> Batch:
        create = partial(self._create_absent, client)
        if home not in client.queues():
            create(home)
        return open_batch(
            client.link, client.prefix, home, id, callbacks=callbacks, results=results, create_queue=create
        )

    def batch_of(self, job: Job) -> Batch:
        """The batch of a running member, which may add others to it: see `Client.batch_of`."""
        return self._batch_of(self.client, job)

    def _batch_of(self, client: Client, job: Job) -> Batch:
        batch = client.batch_of(job)
        batch._create_queue = partial(self._create_absent, client)
        return batch

    def abatch_of(self, job: Job) -> "AsyncBatch":
        """The same for asyncio."""
        from forq.async_batch import AsyncBatch

        home, id, _ = membership_of(job)
        return AsyncBatch(self.async_client, home, id, partial(self._batch_of, job=job), self._create_absent)

    def lifespan(self, hook: L) -> L:
        """Registers a hook for the life of a process that runs this app's tasks: a generator function without
        arguments, or an async one, that yields once.

            @app.lifespan
            def resources():
                with open_pool() as app.pool:
                    yield

        It is entered after the import and before the first job, and left after the last one; an async one in a single
        asyncio task. Each half may take 60 s. If it cannot be entered, the process exits and is started again later.
        Producers and `forq app` do not enter it. Several lifespans are left in reverse order.
        """
        self._hooks.add_lifespan(hook)
        return hook

    @property
    def lifespans(self) -> list[tuple[str, Callable[[], Any], bool]]:
        """Description, generator function, and whether it is async."""
        return self._hooks.lifespans

    def around_handler(self, handler: Callable[[Any, Job], Any], name: str) -> Callable[[Any, Job], Any]:
        """A plain handler with the hooks of this app around it."""
        return self._hooks.around_handler(handler, name)

    def _around_fail_handler(self, handler: Callable[[Any, Job], Any], name: str) -> Callable[[Any, Job], Any]:
        """A fail handler of a queue of this app. Hooks run around jobs only; a subclass may add its own."""
        return handler

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

    def _task_options(self, job_type: str | None) -> AttemptOptions | None:
        """The options of the task that runs jobs of this type."""
        task = self._by_type.get(job_type or "")
        return None if task is None else task.options

    def _is_async(self, job_type: str | None) -> bool:
        """Whether the task that runs jobs of this type is async."""
        return isinstance(self._by_type.get(job_type or ""), AsyncTask)

    def _handler_of(self, job_type: str | None) -> Callable[[Any, Job], Any]:
        task = self._by_type.get(job_type or "")
        # A subclass may override the call.
        return self if task is None or type(self).__call__ is not App.__call__ else task.run_job

    def __call__(self, data: Any, job: Job) -> Any:
        """Runs a job in a worker."""
        task = self._by_type.get(job.type or "")
        if task is None:
            known = ", ".join(sorted(self.tasks)) or "none"
            if not job.type:
                # No other version of the app could run it either.
                raise Permanent(
                    f"app {self.name!r} cannot run a job without a type, which names the task; it has: {known}; "
                    f"enqueue it with TASK.enqueue(…), or run: forqctl push {job.queue} --type TASK JSON"
                )
            raise later_or_dead(job, f"app {self.name!r} has no task {shown(job.type)}; it has: {known}")
        return task.run_job(data, job)

    def _default_name(self, function: Callable[..., Any]) -> str:
        """The name of a task that is given none."""
        return getattr(function, "__name__", shown(function))

    def _sender(self, task: Task[P, R], queue: str, options: JobOptions) -> Sender[P, R]:
        """Enqueues the task with these options, for `Task.using`."""
        for option in ("on_commit", "outbox"):
            if option in options:
                raise UsageError(f"using({option}=…) needs the app of a Django project: forq.contrib.django.app")
        return Sender(task, queue, options)

    def _register(self, given: Mapping[str, Any], function: Callable[..., Any]) -> Task[..., Any]:
        given = {option: value for option, value in given.items() if value is not None}
        name = given["name"] if "name" in given else self._default_name(function)
        signature = Signature(function, name)
        place = place_of(function)
        where = f"task {name} ({place})"
        for option in given:
            if option not in TaskOptions.__annotations__:
                near = suggestion(option, TaskOptions.__annotations__)
                raise InvalidTask(f"{where}: @app.task has no option {shown(option)}{near}")
        try:
            names = [check_type(each) for each in (name, *_check_aliases(given.get("aliases", ())))]
            queue = check_queue_name(given.get("queue", self.name))
            dead_on = _check_dead_on(given.get("dead_on", ()))
            attempt = {option: given[option] for option in _ATTEMPT_OPTIONS if option in given}
            options = check_attempt_options(**attempt, where=where)
        except ForqError as exc:
            raise InvalidTask(f"{'' if str(exc).startswith(where) else f'{where}: '}{exc}") from exc
        if signature.keeps_result:
            options = options.over(AttemptOptions(keep_done_ms=KEEP_RESULTS_MS))
        kind: type[Task[..., Any]] = AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
        task = kind(self, function, name, queue, dead_on, signature, options)
        task.aliases = tuple(names[1:])
        self._check_names(task)
        rule = {option: given[option] for option in _RULE_OPTIONS if option in given}
        if rule:
            self._add_schedule(schedule_of_task(task, rule, place))
        self._add(task)
        return task

    def _check_names(self, task: Task[..., Any]) -> None:
        """Refuses a task whose name another one has, or whose kind does not fit the hooks."""
        if not isinstance(task, AsyncTask):
            self._hooks.check_sync_task(task.name)
        for each in (task.name, *task.aliases):
            if each in self._by_type:
                first, function = self._by_type[each].function, task.function
                places = " and ".join(f"{one.__qualname__} ({place_of(one)})" for one in (first, function))
                raise InvalidTask(
                    f"app {self.name!r} has two tasks of the name {each!r}: {places}; "
                    "give one of them another name: @app.task(name=…)"
                )

    def _add(self, task: Task[..., Any]) -> None:
        self.tasks[task.name] = task
        self._by_type |= dict.fromkeys((task.name, *task.aliases), task)


def _check_aliases(aliases: object) -> list[object]:
    # The characters of a text would become names.
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise InvalidTask(f"aliases = {shown(aliases)} is not allowed: a list of names")
    return list(aliases)


def _check_dead_on(dead_on: object) -> tuple[type[BaseException], ...]:
    classes = dead_on if isinstance(dead_on, tuple) else (dead_on,)
    if not all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
        raise InvalidTask(f"dead_on = {shown(dead_on)} is not allowed: a tuple of exceptions, such as (ValueError,)")
    return classes
