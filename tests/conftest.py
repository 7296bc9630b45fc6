"""Fixtures for every test: a real server, emptied for each test; and the reports of marked tests."""

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.drive.redis_cluster import RedisCluster, redis_cluster
from tests.support.drive.server import Server, put_on_path
from tests.support.marks import SPEC_IDS, MarkReport, fault_rows

# Spark is large and only its own tests need it: `make test-all` installs it.
SPARK_INSTALLED = find_spec("pyspark") is not None
# `make test-web` installs Selenium and the browser.
BROWSER_INSTALLED = find_spec("selenium") is not None and shutil.which("chromedriver") is not None
collect_ignore = [
    *([] if SPARK_INSTALLED else ["pipeline"]),
    *([] if BROWSER_INSTALLED else ["web/browser"]),
]

# The seed of all random choices of the tests.
SEED = "FORQ_TEST_SEED"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The session's server. A test that stops or kills it need not restart it."""
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """The session's Redis Cluster of three masters."""
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """The address of the session's server, emptied; with FORQ_TEST_REDIS=cluster, of its cluster."""
    place = "cluster" if os.environ.get("FORQ_TEST_REDIS") == "cluster" else "server"
    used: Server | RedisCluster = request.getfixturevalue(place)
    used.flush()
    return used.url


def pytest_report_header() -> str:
    left_out = (
        [] if SPARK_INSTALLED else ["Spark is not installed: tests/pipeline is left out (make test-all installs it)"]
    )
    if not BROWSER_INSTALLED:
        left_out.append("no Selenium or chromedriver: tests/web/browser is left out (make test-web installs them)")
    return "\n".join(left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("one_server") and os.environ.get("FORQ_TEST_REDIS") == "cluster":
        pytest.skip("it restarts or looks at the one server itself")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"To repeat the random choices of this run: {SEED}={os.environ[SEED]}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spec-report", action="store_true", help="tests for each behaviour of docs/design/spec.md")
    parser.addoption("--fault-report", action="store_true", help="tests for each row of docs/design/faults.md")


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(tempfile.mkdtemp(prefix="forq-server-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    put_on_path(folder, os.environ)
    # With it, test programs that forget to flush pass here and hang elsewhere.
    os.environ.pop("PYTHONUNBUFFERED", None)
    # A shell that starts this in the background ignores SIGINT, and so would every process that the tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not int(os.environ.get(SEED, "0")):
        os.environ[SEED] = str(random.randrange(1, 10**6))
    if config.getoption("--spec-report"):
        config.pluginmanager.register(MarkReport("spec", SPEC_IDS), "spec-report")
    if config.getoption("--fault-report"):
        config.pluginmanager.register(MarkReport("fault", tuple(fault_rows())), "fault-report")
