"""Reads the jobs of a Redis for tests: lists them with their arguments, and asserts that one is enqueued."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from forq.api_types import JobInfo, State
from forq.app.app import App
from forq.app.tasks import Task
from forq.broker.keys import queue_base
from forq.broker.record import unpacked_fields
from forq.client import Client, Queue
from forq.errors import ForqError, UnknownJob, UnknownQueue, UsageError
from forq.values import shown

# Live jobs, in the order in which they are listed.
LIVE: tuple[State, ...] = ("active", "waiting", "scheduled", "retry", "blocked", "held")
_SHOWN_JOBS = 20


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job in Redis.

    `task`: the name of its task, or its type. `args`: the arguments of the task by name, defaults included; of other
    jobs empty. `data`: as stored. `attempts`: the last unsuccessful ones. `result`, `error`: of a done and of a dead
    job. `info`: all fields, as `Queue.job` returns them.
    """

    queue: str
    id: str
    task: str | None
    args: dict[str, Any]
    data: Any
    state: State
    run_at: datetime | None
    priority: int
    enqueued_at: datetime | None
    attempts: Sequence[Any]
    result: Any
    error: Any
    info: JobInfo

    def __str__(self) -> str:
        call = f"{self.task}({_show_arguments(self.args)})" if self.args or self.data == {} else _show_plain(self)
        due = "" if self.run_at is None else f" for {self.run_at.isoformat(timespec='seconds')}"
        return f"{self.queue}: {call} {self.state}{due}, id {self.id}"


class JobStore:
    """The jobs of one Redis. `client`: connected to it. `apps`: their tasks explain the data of jobs."""

    def __init__(self, url: str, prefix: str, apps: Sequence[App]) -> None:
        self.url = url
        self.apps = apps
        self.client = Client(url, prefix=prefix)

    def queue(self, name: str) -> Queue:
        return self.client.queue(name)

    def jobs(self, of: "Task[..., Any] | str | None" = None, state: State | None = None) -> list[StoredJob]:
        """The jobs of a task, of a queue, or all. Without a `state`, those that have not ended, in the order in which
        they will run: active, waiting, scheduled, in the retry lane, blocked, held."""
        return list(self._read(of, LIVE if state is None else (state,)))

    def assert_enqueued(self, of: "Task[..., Any] | str", /, *args: Any, **kwargs: Any) -> StoredJob:
        """Asserts that a job of this task, with these arguments, has been enqueued and has not ended; returns the first
        one. Without arguments any call of the task will do. For a queue without tasks: the name of the queue, and the
        data of the job."""
        __tracebackhide__ = True
        found = self._find(of, args, kwargs)
        if not found:
            raise AssertionError(f"not enqueued: {_show_wanted(of, args, kwargs)}\n{self._show_all()}")
        return found[0]

    def assert_not_enqueued(self, of: "Task[..., Any] | str", /, *args: Any, **kwargs: Any) -> None:
        """The opposite."""
        __tracebackhide__ = True
        found = self._find(of, args, kwargs)
        if found:
            lines = "\n".join(f"  {job}" for job in found[:_SHOWN_JOBS])
            raise AssertionError(f"enqueued: {_show_wanted(of, args, kwargs)}\n{lines}")

    def _find(self, of: "Task[..., Any] | str", args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StoredJob]:
        jobs = self.jobs(of)
        if not args and not kwargs:
            return jobs
        if isinstance(of, str):
            if len(args) != 1 or kwargs:
                raise UsageError("for a queue pass its name and the data of the job: assert_enqueued('mails', {…})")
            return [job for job in jobs if args[0] == job.data]
        wanted = _bound(of, args, kwargs)
        try:
            packed = of.signature.pack(args, kwargs)
        except TypeError:
            # A value that stands for others, such as unittest.mock.ANY.
            packed = None
        return [job for job in jobs if packed == job.data or wanted == job.args]

    def _read(self, of: "Task[..., Any] | str | None", states: Sequence[State]) -> Iterator[StoredJob]:
        if isinstance(of, Task):
            names = {of.name, *of.aliases}
            yield from (job for job in self._read(None, states) if job.info["type"] in names)
            return
        if of is not None and not isinstance(of, str):
            raise UsageError(f"{shown(of)} is not allowed: a task, or the name of a queue")
        for queue in sorted(self.client.queues()) if of is None else [of]:
            try:
                for state in states:
                    for id in self._ids(queue, state):
                        info = self._info(queue, id, state)
                        if info is not None and "type" in info:
                            yield self._stored(queue, state, info)
            except UnknownQueue:
                continue

    def _ids(self, queue: str, state: State) -> list[str]:
        found, after = [], None
        while True:
            page = self.queue(queue).jobs(state, limit=1000, after=after)
            found += [job["id"] for job in page.jobs]
            after = page.next
            if after is None:
                return found

    def _info(self, queue: str, id: str, state: State) -> JobInfo | None:
        """None if the job has ended meanwhile."""
        if state == "blocked":
            # `job` shows the job that it waits for.
            entry = self.client.link().call("HGET", f"{queue_base(self.client.prefix, queue)}:blocked", id)
            if entry is None:
                return None
            return cast(JobInfo, {"id": id, "state": state, **unpacked_fields(b"p5 0\n" + entry.partition(b"\n")[2])})
        try:
            return self.queue(queue).job(id)
        except UnknownJob:
            return None

    def _stored(self, queue: str, state: State, info: JobInfo) -> StoredJob:
        task = self._task(info["type"])
        run_at = info.get("run_at")
        return StoredJob(
            queue=queue,
            id=info["id"],
            task=info["type"] if task is None else task.name,
            args={} if task is None else _arguments(task, info["data"]),
            data=info["data"],
            state=state,
            run_at=None if run_at is None else datetime.fromtimestamp(run_at, UTC),
            priority=info["priority"],
            enqueued_at=datetime.fromtimestamp(info["enqueued_at"], UTC) if "enqueued_at" in info else None,
            attempts=info.get("attempts", []),
            result=info.get("result"),
            error=info.get("error"),
            info=info,
        )

    def _task(self, type: str | None) -> "Task[..., Any] | None":
        return next((app._by_type[type] for app in self.apps if type in app._by_type), None)

    def _show_all(self) -> str:
        jobs = self.jobs()
        ended = {state: len(self.jobs(state=state)) for state in cast(tuple[State, ...], ("done", "dead"))}
        counts = ", ".join(f"{count} {state}" for state, count in ended.items() if count)
        past = f"; ended: {counts}" if counts else ""
        if not jobs:
            return f"no job is enqueued{past}"
        more = [f"  … and {len(jobs) - _SHOWN_JOBS} more"] if len(jobs) > _SHOWN_JOBS else []
        return "\n".join([f"enqueued ({len(jobs)}){past}:", *(f"  {job}" for job in jobs[:_SHOWN_JOBS]), *more])


def _arguments(task: Task[..., Any], data: Any) -> dict[str, Any]:
    """The arguments of a stored call, as the function would get them; empty if they do not fit."""
    try:
        args, kwargs = task.signature.unpack(data)
        return _bound(task, tuple(args), kwargs)
    except (ForqError, TypeError):
        return {}


def _bound(task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Raises the TypeError of the call for wrong arguments."""
    try:
        bound = inspect.signature(task.function).bind(*args, **kwargs)
    except TypeError as exc:
        raise TypeError(f"{task.__name__}(): {exc}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _show_wanted(of: "Task[..., Any] | str", args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if isinstance(of, str):
        return f"a job of queue {of!r}" + (f" with data {args[0]!r}" if args else "")
    if not args and not kwargs:
        return f"a job of task {of.name}"
    return f"{of.name}({_show_arguments(_bound(of, args, kwargs))})"


def _show_arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _show_plain(job: StoredJob) -> str:
    return f"{f'type {job.task}, ' if job.task else ''}data {shown(job.data)}"
