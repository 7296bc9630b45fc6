"""A private Redis server for tests: the one that a supervisor embeds, without persistence, on a Unix socket."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from forq.broker.link import Link
from forq.errors import RedisUnavailable
from forq.paths import DEFAULT_PREFIX
from forq.supervisor.embedded import find_server
from forq.testing.in_thread import GivenHandler, Handler, InThread, Target, closing, read_apps
from forq.testing.leashed import Leashed
from forq.testing.redirect import redirected


class ServerProcess:
    """A server that ends with this process."""

    def __init__(self) -> None:
        self._leashed = Leashed("the Redis server for tests")
        self.socket = self._leashed.directory / "redis.sock"
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self._leashed.directory),
            "daemonize": "no",
            "save": "",
            "appendonly": "no",
            "proc-title-template": "forq: redis {unixsocket} (tests)",
        }
        command = [find_server(None), *(part for name, value in settings.items() for part in (f"--{name}", value))]
        self._leashed.start(command, os.environ, self._answers)

    def url(self, database: int = 0) -> str:
        return f"unix://{self.socket}" + (f"?db={database}" if database else "")

    def flush(self, database: int = 0) -> None:
        """Removes all data of a database."""
        link = Link(self.url(database), name="forq-testing")
        try:
            link.call("FLUSHDB")
        finally:
            link.close()

    def stop(self) -> None:
        self._leashed.stop()

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        link = Link(self.url(), name="forq-testing")
        try:
            return bool(link.call("PING"))
        except RedisUnavailable:
            return False
        finally:
            link.close()


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
