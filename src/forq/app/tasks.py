"""Tasks as producers see them: calls with the types of a function become jobs, and refer to their results.

1. `Sender.enqueue` has the signature of the task's function and returns a JobRef of its result.
2. `Task.using` gives options of one job; they never mix with the function's arguments.
3. `Task.run_job` is the way back: in a worker it calls the function with the stored arguments.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack, cast

from forq.api_types import Durable, Duration, IfExists, OwnOptions, RefState
from forq.broker.enqueue import JobIdentity, NewJob, new_job
from forq.errors import ArgumentsDoNotFit, ForqError, Permanent, Snooze, UnknownJob, UnknownQueue, UsageError
from forq.job import RUNNING, Job, TaskResult
from forq.job_options import AttemptOptions, check_attempt_options, pack_job_options
from forq.settings import suggestion
from forq.values import shown

if TYPE_CHECKING:
    from forq.app.app import App
    from forq.app.signature import Signature
    from forq.async_client import AsyncQueue
    from forq.client import Queue

# A job that this version of the app cannot run waits for the other half of a rolling deploy.
DEPLOY_SECONDS = 600.0
DEPLOY_SNOOZE_SECONDS = 15.0
DEPLOY_SNOOZES = 40

P = ParamSpec("P")
T = TypeVar("T", covariant=True)


class JobOptions(TypedDict, total=False):
    """Options of one job, for `Task.using`."""

    queue: str
    id: str
    identifier: str
    priority: int
    run_at: datetime | float
    run_in: timedelta | float
    token: str
    if_exists: IfExists
    durable: Durable
    timeout: Duration
    max_retries: int
    backoff: Duration | Sequence[Duration]
    expires_in: Duration
    keep_done: Duration


NO_OPTIONS = AttemptOptions()
# Those that `new_job` takes.
_JOB_FIELDS = ("id", "identifier", "priority", "run_at", "run_in", "token")

# What users of Celery, RQ, Dramatiq, Taskiq and Procrastinate try first.
_ENQUEUE = "{task}.enqueue(…), with options {task}.using(run_in=60, id=…).enqueue(…)"
_OF_OTHER_QUEUES = {
    "delay": _ENQUEUE,
    "apply_async": _ENQUEUE,
    "send": _ENQUEUE,
    "kiq": "await {task}.aenqueue(…), with options await {task}.using(run_in=60, id=…).aenqueue(…)",
    "defer": _ENQUEUE,
    "s": "{task}.prepare(…), for app.enqueue_many and app.schedule",
}


class JobRef(Generic[T]):
    """A job of a task, by its id.

    The ref that `enqueue` returns means that job alone, even if its id is used again. One made from an id, or by a call
    with a known token, means the last job with it.
    """

    __slots__ = ("_has_ended", "_identity", "_keeps", "_task", "id", "queue")

    def __init__(
        self,
        task: "Task[..., T]",
        queue: str,
        id: str,
        identity: JobIdentity | None = None,
        *,
        keeps: bool | None = None,
    ) -> None:
        self._task = task
        self.queue = queue
        self.id = id
        self._identity = identity
        # Whether the job's result is kept, whatever the queue's keep_done is.
        self._keeps = task.keeps_results if keeps is None else keeps
        # `as_completed` has seen its end: the result needs no subscription.
        self._has_ended = False

    @property
    def app(self) -> "App":
        return self._task.app

    def state(self) -> RefState:
        """The job's state: waiting, scheduled, active, retry, done, dead; gone if nothing is known about it."""
        try:
            job = self._task.app.client.queue(self.queue).job(self.id)
        except UnknownJob:
            return "gone"
        return "gone" if self._identity is not None and self._identity.is_other(job) else job["state"]

    def cancel(self) -> bool:
        """Removes the job if it has not started; False if it has."""
        return self._task.app.client.queue(self.queue)._cancel(self.id, self._identity)

    def result(self, timeout: float | timedelta | None = None) -> T:
        """Waits until the job is done and returns its result, with the type that the task declares.

        JobDead if it failed for good, WaitTimeout after `timeout` seconds, UsageError if the queue keeps no results.
        """
        queue = self._task.app.client.queue(self.queue)
        stored = queue._wait(self.id, timeout, self._identity, keeps=self._keeps)
        return cast(T, self._task.signature.unpack_result(stored))

    async def aresult(self, timeout: float | timedelta | None = None) -> T:
        """The same for asyncio."""
        queue = self._task.app.async_client.queue(self.queue)
        stored = await queue._wait_for_end(
            self.id, timeout, self._identity, keeps=self._keeps, has_ended=self._has_ended
        )
        return cast(T, self._task.signature.unpack_result(stored))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobRef) and (self.queue, self.id) == (other.queue, other.id)

    def __hash__(self) -> int:
        return hash((self.queue, self.id))

    def __repr__(self) -> str:
        return f"JobRef({self._task.name!r}, queue={self.queue!r}, id={self.id!r})"


class Prepared(NamedTuple, Generic[T]):
    """A job that was checked but not sent yet, for `App.enqueue_many`."""

    task: "Task[..., T]"
    queue: str
    job: NewJob
    if_exists: IfExists
    durable: Durable | None
    options: JobOptions

    def ref(self, id: str, identity: JobIdentity | None) -> JobRef[T]:
        if self.if_exists == "skip":
            # It may be the ref of a job that an earlier call stored.
            identity = None
        keeps: bool | None = None
        if "keep_done" in self.options:
            keeps = bool(check_attempt_options(keep_done=self.options["keep_done"]).keep_done_ms)
        return JobRef(self.task, self.queue, id, identity, keeps=keeps)


class Sender(Generic[P, T]):
    """Enqueues a task with some options."""

    def __init__(self, task: "Task[P, T] | None", options: JobOptions) -> None:
        self._task = cast("Task[P, T]", self if task is None else task)
        self._options = options
        self._queue = options.get("queue")
        self._fields: dict[str, Any] = {name: value for name, value in options.items() if name in _JOB_FIELDS}
        own = {name: value for name, value in options.items() if name in OwnOptions.__annotations__}
        if own:
            self._fields["options"] = pack_job_options(**cast(OwnOptions, own))
        self._if_exists: IfExists = options.get("if_exists", "update")
        self._durable = options.get("durable")

    if not TYPE_CHECKING:
        # Type checkers would accept every attribute otherwise.
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{_hint(self, name)}")

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[T]:
        """Stores a job that will call the function with these arguments; when it returns, the job is in Redis.

        Arguments that do not fit the function's signature or annotations raise a TypeError here.
        """
        prepared, app = self.prepare(*args, **kwargs), self._task.app
        try:
            return _store(app._client_queue(prepared.queue), prepared)
        except UnknownQueue:
            app.create_absent_queue(prepared.queue)
            return _store(app._client_queue(prepared.queue), prepared)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[T]:
        """The same for asyncio. A cancelled call has stored the job or not."""
        prepared, app = self.prepare(*args, **kwargs), self._task.app
        try:
            return await _astore(app.async_client.queue(prepared.queue), prepared)
        except UnknownQueue:
            await app.acreate_absent_queue(prepared.queue)
            return await _astore(app.async_client.queue(prepared.queue), prepared)

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[T]:
        """Checks the arguments and packs the job, for `App.enqueue_many`."""
        task = self._task
        job = new_job(task.signature.pack(args, kwargs), type=task.name, **self._fields)
        queue = task.queue if self._queue is None else self._queue
        return Prepared(task, queue, job, self._if_exists, self._durable, self._options)


def _hint(sender: Sender[..., Any], name: str) -> str:
    """How to write in forq what other queues call by this name; '' for other names."""
    if name not in _OF_OTHER_QUEUES:
        return ""
    task = "task" if isinstance(sender._task, RemoteTask) else sender._task.__name__
    return f"; in forq: {_OF_OTHER_QUEUES[name].format(task=task)}"


def _store(queue: "Queue", prepared: Prepared[T]) -> JobRef[T]:
    ((id, identity),) = queue._enqueue_identified([prepared.job], prepared.if_exists, prepared.durable)
    return prepared.ref(id, identity)


async def _astore(queue: "AsyncQueue", prepared: Prepared[T]) -> JobRef[T]:
    ((id, identity),) = await queue._enqueue_identified([prepared.job], prepared.if_exists, prepared.durable)
    return prepared.ref(id, identity)


class Task(Sender[P, T]):
    """A registered function. `enqueue` runs it in a worker; a plain call runs it here.

    `declared_options`: those of the decorator. `options`: those for a worker, with [apps.APP.tasks.TASK] of forq.toml.
    """

    def __init__(
        self,
        app: "App",
        function: Callable[..., Any],
        name: str,
        queue: str,
        dead_on: tuple[type[BaseException], ...],
        signature: "Signature | _ByName",
        options: AttemptOptions = NO_OPTIONS,
    ) -> None:
        super().__init__(None, {})
        self.app = app
        self.function = function
        self.name = name
        self.queue = queue
        self.dead_on = dead_on
        # Earlier names.
        self.aliases: tuple[str, ...] = ()
        self.declared_options = self.options = options
        self.signature = cast("Signature", signature)
        self.__wrapped__, self.__doc__, self.__module__ = function, function.__doc__, function.__module__
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__

    @property
    def keeps_results(self) -> bool:
        return bool(self.declared_options.keep_done_ms)

    def using(self, **options: Unpack[JobOptions]) -> Sender[P, T]:
        """The task with options for its next jobs: when to run, id, priority, queue …"""
        unknown = [name for name in options if name not in JobOptions.__annotations__]
        if unknown:
            known = JobOptions.__annotations__
            raise UsageError(f"using() has no option {shown(unknown[0])}{suggestion(unknown[0], known)}")
        return Sender(self, options)

    def ref(self, id: str, queue: str | None = None) -> JobRef[T]:
        """The job of this task with this id; `queue`: if it is not the task's own."""
        return JobRef(self, queue or self.queue, id)

    def run_job(self, data: Any, job: Job) -> Any:
        """In a worker: calls the function with the stored arguments. Returns a TaskResult, or None."""
        args: Sequence[Any] = ()
        if not self.signature.is_call(data):
            args, data = self._unpack(data, job)
        before = RUNNING.set(job)
        try:
            if self.app._has_hooks:
                with self.app.hooks_around(job):
                    result = self.function(*args, **data)
            else:
                result = self.function(*args, **data)
            # Most tasks return nothing, which needs no packing.
            if result is None and not self.signature.keeps_result:
                return None
            return TaskResult(result, self.signature.pack_result)
        except self.dead_on as exc:
            _make_permanent(exc)
            raise
        finally:
            RUNNING.reset(before)

    def _unpack(self, data: Any, job: Job) -> tuple[list[Any], dict[str, Any]]:
        try:
            return self.signature.unpack(data)
        except ArgumentsDoNotFit as exc:
            raise later_or_dead(job, str(exc)) from exc

    def __repr__(self) -> str:
        return f"<task {self.name!r} of app {self.app.name!r}>"


class SyncTask(Task[P, T]):
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the function here and now."""
        return cast(T, self.function(*args, **kwargs))


class AsyncTask(Task[P, T]):
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Runs the function here and now."""
        return cast("Coroutine[Any, Any, T]", self.function(*args, **kwargs))

    async def run_job(self, data: Any, job: Job) -> Any:
        args, kwargs = self._unpack(data, job)
        RUNNING.set(job)
        try:
            async with self.app.async_hooks_around(job):
                result = await self.function(*args, **kwargs)
            return TaskResult(result, self.signature.pack_result)
        except self.dead_on as exc:
            _make_permanent(exc)
            raise


class RemoteTask(Task[..., Any]):
    """A task whose code is not installed here: only its name and its queue are known. Arguments are given by name, and
    arguments and results are of JSON types."""

    def __init__(self, app: "App", name: str, queue: str) -> None:
        super().__init__(app, _not_here, name, queue, (), _ByName(name))


def _not_here() -> None:
    """The function of a RemoteTask."""


class _ByName:
    """Packs arguments without knowing the parameters."""

    def __init__(self, task_name: str) -> None:
        self._task_name = task_name

    def pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if args:
            raise TypeError(f"the parameters of task {self._task_name!r} are unknown here: pass arguments by name")
        return dict(kwargs)

    def unpack_result(self, data: Any) -> Any:
        return data


def later_or_dead(job: Job, reason: str) -> ForqError:
    """The exception for a job that this version of the app cannot run: Snooze while a rolling deploy may be under way,
    then Permanent."""
    # A fence is the server's time in µs at the claim, so both times are of the same clock.
    young = job.fence / 1e6 - job.enqueued_at < DEPLOY_SECONDS
    if young or job.snoozes < DEPLOY_SNOOZES:
        return Snooze(DEPLOY_SNOOZE_SECONDS, f"{reason}; waiting for a worker that knows it")
    return Permanent(reason)


def _make_permanent(exc: BaseException) -> None:
    """The worker reads the attribute. The exception keeps its name and traceback."""
    exc.kind = "permanent"  # type: ignore[attr-defined]
