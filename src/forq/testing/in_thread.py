"""A Redis whose jobs the test runs itself, in its own thread: what memory and server have in common, and the server."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, cast

from forq.app.app import App
from forq.broker.keys import queue_base
from forq.broker.registry import Registry
from forq.broker.schedules import Schedules, read_head
from forq.client import DEFAULT_MAX_QUEUES, Client
from forq.errors import UsageError
from forq.job import Job
from forq.paths import DEFAULT_PREFIX
from forq.settings import WORK, Value, parse_options, stored, stored_defaults, stored_for_fail_queue
from forq.testing.processes import ServerProcess
from forq.testing.runner import DEFAULT_LIMIT, Attempt, JobRunner, ServedQueue, running_loop
from forq.testing.store import JobStore
from forq.testing.targets import Target, read_apps, redirected
from forq.values import check_queue_name, shown
from forq.workers.handlers import Handlers, load_handler

Handler = Callable[[Any, Job], Any]
# A handler, handlers by job type, or "module:function".
GivenHandler = Handler | Mapping[str | None, Handler] | str
_APP_SCHEDULES = "app"


class InThread(JobStore):
    """The jobs of a Redis, and what runs them: the tasks of apps, and handlers by queue."""

    def __init__(
        self,
        url: str,
        prefix: str,
        apps: Sequence[App],
        handlers: Mapping[str, GivenHandler],
        fail_handlers: Mapping[str, Handler],
    ) -> None:
        super().__init__(url, prefix, apps)
        self._handlers = {check_queue_name(name): read_handlers(given) for name, given in handlers.items()}
        self._fail_handlers = dict(fail_handlers)
        for name in self._fail_handlers:
            if name not in self._handlers:
                raise UsageError(f"fail_handlers: queue {name!r} has no handler; add it to handlers={{{name!r}: …}}")
        for name in self._handlers:
            app = next((app for app in apps if name in app.queue_names()), None)
            if app is not None:
                raise UsageError(f"handlers: queue {name!r} belongs to app {app.name!r}, which runs its jobs")
        self._runner = JobRunner(self.client, self._served)

    def run_all(self, *, raises: bool = True, limit: int = DEFAULT_LIMIT) -> list[Attempt]:
        """Runs all jobs that are due, also those that these jobs enqueue, and returns what ran.

        Raises the first exception of a handler, after that job is settled; the other jobs stay. With raises=False it
        goes on, and failed jobs are retried when they are due. Snooze and RetryAt are no errors. LimitReached if more
        than `limit` jobs are due.
        """
        __tracebackhide__ = True
        return self._run(raises, limit, sys.maxsize)

    def run_one(self, *, raises: bool = True) -> Attempt | None:
        """Runs the next job that is due; None if there is none."""
        __tracebackhide__ = True
        ran = self._run(raises, sys.maxsize, 1)
        return ran[0] if ran else None

    async def arun_all(self, *, raises: bool = True, limit: int = DEFAULT_LIMIT) -> list[Attempt]:
        """`run_all` in a coroutine: async tasks run in the event loop of the caller."""
        __tracebackhide__ = True
        from forq.broker.async_connection import run_blocking

        loop = running_loop()
        if loop is None:
            raise UsageError("arun_all() needs the event loop of asyncio; without one: run_all()")
        limit = _check_limit(limit)
        return await run_blocking(lambda: self._runner.run(limit=limit, raises=raises, most=sys.maxsize, outer=loop))

    def _run(self, raises: bool, limit: int, most: int) -> list[Attempt]:
        __tracebackhide__ = True
        if running_loop() is not None:
            raise UsageError("an event loop runs in this thread: await arun_all() instead of run_all()")
        return self._runner.run(limit=_check_limit(limit), raises=raises, most=most, outer=None)

    def _served(self) -> list[ServedQueue]:
        served = []
        for app in self.apps:
            for name in app.queue_names():
                declared = app._declared_queues.get(name)
                on_dead = None if declared is None else declared.on_dead
                fails = None if on_dead is None else Handlers({None: on_dead})
                served.append(ServedQueue(name, Handlers({None: app}), fails))
        for name, handlers in self._handlers.items():
            fail_handler = self._fail_handlers.get(name)
            served.append(ServedQueue(name, handlers, Handlers({None: fail_handler}) if fail_handler else None))
        return served

    def clear(self) -> None:
        """Removes everything; creates the queues and schedules anew."""
        self.client.link().call("FLUSHDB")
        self._create_queues()

    def _create_queues(self) -> None:
        """Creates the queues and schedules, as a supervisor does at its start."""
        registry = Registry(self.client.link(), self.client.prefix)
        for queue in self._served():
            app = next((app for app in queue.handlers.apps), None)
            options = {} if app is None else app._options_of(queue.name)
            _create(registry, queue, options)
        for app in self.apps:
            for (name, key), schedule in app._declared_schedules.items():
                schedules = Schedules(self.client.link(), self.client.prefix, name)
                schedules.apply({key: schedule.table}, _APP_SCHEDULES, remove=False)
        self._restart_schedules()

    def _restart_schedules(self) -> None:
        """The first tick of every schedule is the next one from now. A new schedule with an interval would otherwise
        tick at once, in every test."""
        link, prefix = self.client.link(), self.client.prefix
        for name in self.client.queues():
            schedules = Schedules(link, prefix, name)
            for key, definition in schedules._stored().items():
                rule, _ = read_head(definition.rpartition(b"\n")[0])
                next_ms = next(rule.after(schedules.now_ms()), None)
                if next_ms is not None:
                    link.call("ZADD", f"{queue_base(prefix, name)}:schedules:next", next_ms, key)


def _create(registry: Registry, queue: ServedQueue, options: Mapping[str, Value]) -> None:
    parsed = parse_options(options, f"queue {queue.name!r}", WORK)
    fails = queue.fail_handler is not None
    registry.create(
        queue.name,
        WORK,
        DEFAULT_MAX_QUEUES,
        stored_defaults(WORK),
        stored(parsed) | {"fail_handler": int(fails)},
        fail_options=stored_for_fail_queue(parsed) if fails else None,
    )


def read_handlers(given: GivenHandler) -> Handlers:
    if isinstance(given, str):
        return Handlers({None: load_handler(given)})
    if isinstance(given, Mapping):
        return Handlers(dict(given))
    if not callable(given):
        raise UsageError(f"handler {shown(given)} is not allowed: a function handle(data, job), or functions by type")
    return Handlers({None: given})


def _check_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise UsageError(f"limit {shown(limit)} is not allowed: a number of jobs from 1")
    return limit


@contextmanager
def closing(place: InThread) -> Iterator[None]:
    try:
        yield
    finally:
        place.client.close()
        place.client = place._runner.client = cast(Client, _Ended())


class _Ended:
    """In place of the client after the block: its URL may belong to the next test by then."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(
            "this memory or server has ended: use it inside of its with block, or in the test of its fixture"
        )


class Server(InThread):
    """What `server()` yields: the methods of Memory, without its clock. `process`: the server itself."""

    process: ServerProcess


@contextmanager
def server(
    *targets: Target,
    handlers: Mapping[str, GivenHandler] | None = None,
    fail_handlers: Mapping[str, Handler] | None = None,
    process: ServerProcess | None = None,
) -> Iterator[Server]:
    """Starts a private Redis server: these apps (or clients) use it until the end of the block. Jobs run with
    `run_all`, in the thread of the test. `process`: a server that runs already; it is emptied. The other arguments: as
    for `memory`."""
    apps, redirect = read_apps(targets)
    with ExitStack() as stack:
        if process is None:
            process = ServerProcess()
            stack.callback(process.stop)
        place = Server(process.url(), DEFAULT_PREFIX, apps, handlers or {}, fail_handlers or {})
        place.process = process
        stack.enter_context(closing(place))
        stack.enter_context(redirected(redirect, place.url, DEFAULT_PREFIX))
        place.clear()
        yield place
