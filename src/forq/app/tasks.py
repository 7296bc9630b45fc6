"""Tasks as producers see them: calls with the types of a function become jobs, and refer to their results.

1. `Sender.enqueue` has the signature of the task's function and returns a JobRef of its result.
2. `Task.using` gives options of one job; they never mix with the function's arguments.
3. `Task.run_job` is the way back: in a worker it calls the function with the stored arguments.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack, cast

from forq.api_types import Durable, Duration, IfExists, OwnOptions, RefState, When
from forq.app.signature import NOT_DIRECTLY, Signature
from forq.broker.chunks import NewJob
from forq.broker.dependencies import AS_ARGUMENT, AS_LIST, NOT_USED, pack_after
from forq.broker.enqueue import JobIdentity, new_job, plain_job
from forq.broker.record import pack_names
from forq.errors import ArgumentsDoNotFit, ForqError, Permanent, Snooze, UnknownJob, UnknownQueue, UsageError
from forq.job import RUNNING, Job, TaskResult, current_trace
from forq.job_options import AttemptOptions, check_attempt_options, pack_job_options
from forq.settings import suggestion
from forq.values import shown

if TYPE_CHECKING:
    from forq.app.app import App
    from forq.batch import Batch

# A job that this version of the app cannot run waits for the other half of a rolling deploy.
DEPLOY_SECONDS = 600.0
DEPLOY_SNOOZE_SECONDS = 15.0
DEPLOY_SNOOZES = 40

P = ParamSpec("P")
T = TypeVar("T", covariant=True)


class JobOptions(TypedDict, total=False):
    """Options of one job, for `Task.using`. `on_commit`, `outbox`: the alias of a database, in Django projects only.

    `after`: jobs of the same queue that it waits for. `when`: how they have to end. `with_results`: it reads their
    results with `Job.results`.
    """

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
    after: "str | JobRef[Any] | Batch | Sequence[str | JobRef[Any] | Batch]"
    when: When
    with_results: bool
    on_commit: str
    outbox: str


NO_OPTIONS = AttemptOptions()
# Those that `new_job` takes.
_JOB_FIELDS = ("id", "identifier", "priority", "run_at", "run_in", "token")
_AFTER_FIELDS = frozenset(("after", "when", "with_results"))

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

    @property
    def keeps_result(self) -> bool:
        """Whether the job keeps its result, whatever the queue's keep_done is."""
        return self._keeps

    def state(self) -> RefState:
        """The job's state: waiting, scheduled, active, held, retry, done, dead; gone if nothing is known about it."""
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

    sender: "Sender[..., T]"
    job: NewJob

    @property
    def task(self) -> "Task[..., T]":
        return self.sender._task

    @property
    def options(self) -> JobOptions:
        return self.sender._options


# Options that say how one job is stored. Those of flows and batches are stored together.
_ALONE = ("if_exists", "durable", "token", "on_commit", "outbox")


def check_member(prepared: Any, what: str, call: str) -> None:
    """Checks a job of a flow or batch (`what`). `call`: an example of a right call."""
    if not isinstance(prepared, Prepared):
        raise UsageError(f"{shown(prepared)} is not a prepared job; pass one: {call}")
    for option in _ALONE:
        if option in prepared.options:
            raise UsageError(
                f"using({option}=…) is not allowed for jobs of {what}, which are stored together: leave it out"
            )


class Sender(Generic[P, T]):
    """Enqueues a task with some options."""

    def __init__(self, task: "Task[P, T] | None", queue: str, options: JobOptions) -> None:
        self._task = cast("Task[P, T]", self if task is None else task)
        self._options = options
        self.queue = queue
        self._fields: dict[str, Any] = {name: value for name, value in options.items() if name in _JOB_FIELDS}
        own = {name: value for name, value in options.items() if name in OwnOptions.__annotations__}
        if own:
            self._fields["options"] = pack_job_options(**cast(OwnOptions, own))
        # What its jobs wait for.
        self._after = ""
        if not _AFTER_FIELDS.isdisjoint(options):
            about = (options.get("after", ()), options.get("when", "done"), options.get("with_results", False))
            self._after = pack_after(*about, queue=queue)
        self._if_exists: IfExists = options.get("if_exists", "update")
        self._durable = options.get("durable")
        # Whether the results of its jobs are kept, whatever the queue's keep_done is. None: as the task says.
        self._keeps: bool | None = None
        if "keep_done" in options:
            self._keeps = bool(check_attempt_options(keep_done=options["keep_done"]).keep_done_ms)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[T]:
        """Stores a job that will call the function with these arguments; when it returns, the job is in Redis.

        Arguments that do not fit the function's signature or annotations raise a TypeError here.
        """
        job, queue, app = self._new_job(args, kwargs), self.queue, self._task.app
        try:
            ((id, identity),) = app._client_queue(queue)._enqueue_identified([job], self._if_exists, self._durable)
        except UnknownQueue:
            app.create_absent_queue(queue)
            ((id, identity),) = app._client_queue(queue)._enqueue_identified([job], self._if_exists, self._durable)
        return self._ref(id, identity)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[T]:
        """The same for asyncio. A cancelled call has stored the job or not."""
        job, queue, app = self._new_job(args, kwargs), self.queue, self._task.app
        about = ([job], self._if_exists, self._durable)
        try:
            ((id, identity),) = await app.async_client.queue(queue)._enqueue_identified(*about)
        except UnknownQueue:
            await app.acreate_absent_queue(queue)
            ((id, identity),) = await app.async_client.queue(queue)._enqueue_identified(*about)
        return self._ref(id, identity)

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[T]:
        """Checks the arguments and packs the job, for `App.enqueue_many`."""
        return Prepared(self, self._new_job(args, kwargs))

    def _new_job(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, without_first: bool = False) -> NewJob:
        task = self._task
        data = task.signature.pack_rest(args, kwargs) if without_first else task.signature.pack(args, kwargs)
        if not self._fields:
            job = plain_job(data, task._names, current_trace())
        else:
            job = new_job(data, type=task.name, **self._fields)
        return job._replace(after=self._after) if self._after else job

    def _ref(self, id: str, identity: JobIdentity | None) -> JobRef[T]:
        # With "skip" it may be a job that an earlier call stored.
        identity = None if self._if_exists == "skip" else identity
        return JobRef(self._task, self.queue, id, identity, keeps=self._keeps)

    def _call(self) -> tuple[str, IfExists, Durable | None]:
        """Jobs for which these are equal are stored in one call."""
        return self.queue, self._if_exists, self._durable


class _OfOtherQueues:
    """A method that tasks of other queues have: says how to write it in forq.

    A `__getattr__` of Sender would do the same, but it makes every attribute of every task slow.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, sender: "Sender[..., Any] | None", owner: type) -> Any:
        task = "task" if sender is None or isinstance(sender._task, RemoteTask) else sender._task.__name__
        hint = self._instead.format(task=task)
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}; in forq: {hint}")


for _name, _instead in _OF_OTHER_QUEUES.items():
    # Not in the class body, where type checkers would accept them.
    setattr(Sender, _name, _OfOtherQueues(_name, _instead))


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
        super().__init__(None, queue, {})
        self.app = app
        self.function = function
        self.name = name
        # As its jobs have it.
        self._names = pack_names(None, name)
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
        return self.app._sender(self, options.get("queue", self.queue), options)

    def ref(self, id: str, queue: str | None = None) -> JobRef[T]:
        """The job of this task with this id; `queue`: if it is not the task's own."""
        return JobRef(self, queue or self.queue, id)

    def run_job(self, data: Any, job: Job) -> Any:
        """In a worker: calls the function with the stored arguments. Returns a TaskResult, or None."""
        if job._inputs is not None:
            data = self._with_results(data, job)
        if self.app._has_hooks:
            return self._run_converted(data, job)
        before = RUNNING.set(job)
        try:
            result = self.signature.call_directly(data)
            # Most tasks return nothing, which needs no packing.
            if result is None and not self.signature.keeps_result:
                return None
            if result is not NOT_DIRECTLY:
                return TaskResult(result, self.signature.pack_result)
        except self.dead_on as exc:
            _make_permanent(exc)
            raise
        finally:
            RUNNING.reset(before)
        return self._run_converted(data, job)

    def _run_converted(self, data: Any, job: Job) -> Any:
        args, kwargs = self._unpack(data, job)
        before = RUNNING.set(job)
        try:
            with self.app.hooks_around(job):
                return TaskResult(self.function(*args, **kwargs), self.signature.pack_result)
        except self.dead_on as exc:
            _make_permanent(exc)
            raise
        finally:
            RUNNING.reset(before)

    def _with_results(self, data: Any, job: Job) -> Any:
        """The stored arguments, with the results of other jobs as the first one if the job was enqueued so."""
        use = NOT_USED if job._inputs is None else job._inputs.use
        if use not in (AS_ARGUMENT, AS_LIST) or type(data) is not dict:
            return data
        try:
            first = self.signature.first_parameter()
        except UsageError as exc:
            raise later_or_dead(job, str(exc)) from exc
        results = job.results()
        return {first: results[0] if use == AS_ARGUMENT else results, **data}

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
        if job._inputs is not None:
            data = self._with_results(data, job)
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

    def pack_rest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        raise UsageError(
            f"the parameters of task {self._task_name!r} are unknown here, so it cannot get the result of another job "
            "as its first argument; use the task itself, or after=… and with_results=True"
        )

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
