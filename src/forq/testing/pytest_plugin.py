"""The pytest plugin of forq: fixtures for jobs in memory, on a private server, and with a real supervisor.

pytest imports it in every run, so it imports nothing else until a fixture is used.
"""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forq.app.app import App
    from forq.testing.in_memory import Memory
    from forq.testing.in_thread import Server
    from forq.testing.processes import ServerProcess, Supervisor, SupervisorProcess

_LOG_CHARACTERS = 8000
_MISSING = """The fixtures of forq need to know your app. Name it in the configuration of pytest:

    [pytest]
    forq_app = shop.tasks:app

or override the fixture forq_app in conftest.py:

    @pytest.fixture(scope="session")
    def forq_app():
        return app  # or "shop.tasks:app", or a list of apps; [] for queues without an app"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("forq_app", "apps for the fixtures of forq: package.module:app", type="linelist", default=[])


@pytest.fixture(scope="session")
def forq_app(request: pytest.FixtureRequest) -> "App | str | list[App | str]":
    """The app of the other fixtures: a forq.App, "package.module:app", or a list. Default: the ini option forq_app."""
    apps: list[App | str] = [name for line in request.config.getini("forq_app") for name in line.split()]
    if not apps:
        pytest.fail(_MISSING, pytrace=False)
    return apps


@pytest.fixture
def forq_memory(forq_app: Any) -> "Iterator[Memory]":
    """Jobs in memory for this test: see forq.testing.memory."""
    from forq.testing.in_memory import memory

    with memory(*_apps(forq_app)) as place:
        yield place


@pytest.fixture(scope="session")
def forq_server_process() -> "Iterator[ServerProcess]":
    """The private server of this session, or of this process of pytest-xdist."""
    from forq.testing.processes import ServerProcess

    process = ServerProcess()
    yield process
    process.stop()


@pytest.fixture
def forq_server(forq_app: Any, forq_server_process: "ServerProcess") -> "Iterator[Server]":
    """A private server, empty for this test: see forq.testing.server."""
    from forq.testing.in_thread import server

    with server(*_apps(forq_app), process=forq_server_process) as place:
        yield place


@pytest.fixture(scope="session")
def forq_settings() -> str:
    """The text of a config file for the supervisor; override it to set options or add queues."""
    return ""


@pytest.fixture(scope="session")
def forq_supervisor_process(
    forq_app: Any, forq_settings: str, forq_server_process: "ServerProcess"
) -> "Iterator[SupervisorProcess]":
    """The supervisor of this session."""
    from forq.testing.processes import SupervisorProcess
    from forq.testing.targets import path_of

    paths = [app if isinstance(app, str) else path_of(app) for app in _apps(forq_app)]
    process = SupervisorProcess(paths, forq_server_process, forq_settings)
    yield process
    process.stop()


@pytest.fixture
def forq_supervisor(
    request: pytest.FixtureRequest, forq_app: Any, forq_supervisor_process: "SupervisorProcess"
) -> "Iterator[Supervisor]":
    """A real supervisor, without jobs at the start of this test: see forq.testing.supervisor."""
    from forq.testing.processes import supervisor

    request.node.stash[_LOG] = (forq_supervisor_process, len(forq_supervisor_process.log))
    with supervisor(*_apps(forq_app), process=forq_supervisor_process) as place:
        yield place


_LOG = pytest.StashKey["tuple[SupervisorProcess, int]"]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the log of the supervisor to the report of a failed test."""
    report = yield
    if report.failed and (used := item.stash.get(_LOG, None)) is not None:
        process, start = used
        report.sections.append(("forq supervisor log", process.log[start:][-_LOG_CHARACTERS:]))
    return report


def _apps(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
