"""Three ways to run the same jobs: in memory, in the thread of the test on a real server, and by a supervisor."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from forq import testing
from forq.client import Client
from forq.testing.in_memory import Memory
from forq.testing.in_thread import Server
from forq.testing.processes import ServerProcess, SupervisorProcess
from forq.testing.store import JobStore
from tests.support.drive.wait import wait_until
from tests.support.handlers import modes

MODULE = "tests.support.handlers.modes"
PLAIN: dict[str, Any] = {"plain": {None: modes.handle, "typed": modes.handle_typed}}
FAILED = {"plain": modes.plain_failed}
SETTINGS = f"""
[queues.plain]
handler = "{MODULE}:handle"
handlers.typed = "{MODULE}:handle_typed"
fail_handler = "{MODULE}:plain_failed"
keep_done = "1h"
"""


class Driver(Protocol):
    @property
    def store(self) -> JobStore: ...

    def run(self, *, after: float = 0.0, until: Callable[[], object] | None = None) -> None:
        """Lets `after` seconds pass, runs all jobs that are due, and repeats that until the condition is true."""

    def now(self) -> float: ...


class InMemory:
    def __init__(self, memory: Memory) -> None:
        self.store = memory
        self._memory = memory

    def run(self, *, after: float = 0.0, until: Callable[[], object] | None = None) -> None:
        self._memory.clock.tick(after)
        self._memory.run_all(raises=False, limit=2000)
        assert until is None or until()

    def now(self) -> float:
        return self._memory.clock.now().timestamp()


class OnServer:
    def __init__(self, server: Server) -> None:
        self.store = server
        self._server = server

    def run(self, *, after: float = 0.0, until: Callable[[], object] | None = None) -> None:
        time.sleep(after)
        wait_until(lambda: (self._server.run_all(raises=False, limit=2000), until is None or until())[1])

    def now(self) -> float:
        return time.time()


class WithSupervisor:
    def __init__(self, supervisor: testing.Supervisor) -> None:
        self.store = supervisor
        self._supervisor = supervisor

    def run(self, *, after: float = 0.0, until: Callable[[], object] | None = None) -> None:
        time.sleep(after)
        self._supervisor.drain()
        if until is not None:
            wait_until(until)

    def now(self) -> float:
        return time.time()


@contextmanager
def in_memory() -> Iterator[InMemory]:
    with testing.memory(modes.app, modes.hooked, handlers=PLAIN, fail_handlers=FAILED) as memory:
        Client().create_queue("plain", keep_done="1h")
        yield InMemory(memory)


@contextmanager
def on_server(process: ServerProcess) -> Iterator[OnServer]:
    about: dict[str, Any] = {"handlers": PLAIN, "fail_handlers": FAILED, "process": process}
    with testing.server(modes.app, modes.hooked, **about) as server:
        Client().create_queue("plain", keep_done="1h")
        yield OnServer(server)


@contextmanager
def with_supervisor(process: SupervisorProcess) -> Iterator[WithSupervisor]:
    with testing.supervisor(modes.app, modes.hooked, process=process) as supervisor:
        yield WithSupervisor(supervisor)
