"""Jobs in memory: forq on fakeredis in this process, with a clock that tests move. No other process, no network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from forq.app.app import App
from forq.errors import UsageError
from forq.paths import DEFAULT_PREFIX
from forq.testing.clock import Clock
from forq.testing.in_thread import GivenHandler, Handler, InThread, Target, closing, read_apps
from forq.testing.redirect import redirected
from forq.testing.waiting import answer_waits

try:
    from forq.testing.fake_server import FakeServer
except ImportError as missing:
    raise ImportError(f"jobs in memory need fakeredis with Lua: pip install 'forq[testing]' ({missing})") from missing


class Memory(InThread):
    """What `memory()` yields. `clock`: the time of jobs, schedules, tokens and results."""

    def __init__(
        self,
        server: FakeServer,
        apps: Sequence[App],
        handlers: Mapping[str, GivenHandler],
        fail_handlers: Mapping[str, Handler],
    ) -> None:
        super().__init__(server.url, DEFAULT_PREFIX, apps, handlers, fail_handlers)
        self.clock: Clock = server.clock
        self.clock.before_going_back = self._before_going_back

    def _before_going_back(self) -> Callable[[], None]:
        """For the clock. Times in Redis would lie in the future; schedules get new ones afterwards."""
        if jobs := self.jobs():
            raise UsageError(
                f"the clock cannot go back while there are jobs, such as {jobs[0]}; set it before the first enqueue"
            )
        return self._restart_schedules


@contextmanager
def memory(
    *targets: Target,
    handlers: Mapping[str, GivenHandler] | None = None,
    fail_handlers: Mapping[str, Handler] | None = None,
) -> Iterator[Memory]:
    """Jobs in memory: these apps (or clients) use it instead of their Redis until the end of the block.

        with forq.testing.memory(app) as memory:
            send.enqueue("a@b.c")
            memory.run_all()

    An app may be given as "package.module:app". New clients without a URL use it, too. `handlers`: functions
    handle(data, job) of queues without an app, by queue. `fail_handlers`: their fail handlers.
    """
    apps, redirect = read_apps(targets)
    with ExitStack() as stack:
        server = FakeServer()
        stack.enter_context(server.installed())
        place = Memory(server, apps, handlers or {}, fail_handlers or {})
        stack.enter_context(closing(place))
        stack.enter_context(answer_waits(place))
        stack.enter_context(redirected(redirect, server.url, DEFAULT_PREFIX))
        place._create_queues()
        yield place
