"""What every test may use: a real server, an empty one per test, and --spec-report."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.redis_cluster import RedisCluster, redis_cluster
from tests.support.server import Server
from tests.support.spec_ids import SPEC_IDS


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The session's server. A test that stops or kills it need not start it again."""
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """The session's Redis Cluster of three masters."""
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """The address of the session's server, emptied; with FORQ_TEST_REDIS=cluster of its cluster."""
    place = "cluster" if os.environ.get("FORQ_TEST_REDIS") == "cluster" else "server"
    used: Server | RedisCluster = request.getfixturevalue(place)
    used.flush()
    return used.url


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("one_server") and os.environ.get("FORQ_TEST_REDIS") == "cluster":
        pytest.skip("it restarts or looks at the one server itself")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spec-report", action="store_true", help="which test shows which behaviour of docs/spec.md")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--spec-report"):
        config.pluginmanager.register(SpecReport(SPEC_IDS), "spec-report")


class SpecReport:
    """Collects `@pytest.mark.spec("N1", ...)` and how the tests that carry it ended."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        self.wanted = wanted
        self._ids_of_test: dict[str, list[str]] = {}
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            ids = [str(spec_id) for mark in item.iter_markers("spec") for spec_id in mark.args]
            if ids:
                self._ids_of_test[item.nodeid] = ids

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._gaps() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tests = self._tests_by_id()
        terminalreporter.section("spec report")
        for spec_id in [*self.wanted, *sorted(set(tests) - set(self.wanted))]:
            count = f"{len(tests[spec_id])} passing" if spec_id in tests else "NO PASSING TEST"
            terminalreporter.write_line(f"{spec_id:<4} {count}")
            for nodeid in tests.get(spec_id, ()):
                terminalreporter.write_line(f"       {nodeid}")
        gaps = self._gaps()
        missing = f"; missing: {' '.join(gaps)}" if gaps else ""
        terminalreporter.write_line(f"{len(self.wanted) - len(gaps)} of {len(self.wanted)} shown{missing}")

    def _gaps(self) -> list[str]:
        tests = self._tests_by_id()
        return [spec_id for spec_id in self.wanted if spec_id not in tests]

    def _tests_by_id(self) -> dict[str, list[str]]:
        tests: dict[str, list[str]] = defaultdict(list)
        for nodeid, ids in self._ids_of_test.items():
            if nodeid in self._passed - self._failed:
                for spec_id in ids:
                    tests[spec_id].append(nodeid)
        return dict(tests)
