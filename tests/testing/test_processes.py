"""Private servers and supervisors for tests: what they clear, and what they report if they cannot start."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forq
from forq import testing
from forq.errors import UsageError, WaitTimeout
from forq.testing import CannotStart, Supervisor
from forq.testing.processes import ServerProcess, SupervisorProcess
from forq.testing.targets import path_of
from tests.support.drive.wait import wait_until
from tests.support.handlers import modes
from tests.testing import examples

# Kills everything in time.
QUICKLY_SECONDS = 15.0
SLEEPY = """
import time
import forq

app = forq.App("sleepy")

@app.task(keep_done="1h")
def sleep(seconds: float) -> None:
    time.sleep(seconds)
"""


@pytest.fixture(scope="module")
def server_process() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def sleepy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forq.App]:
    directory = tmp_path_factory.mktemp("sleepy")
    (directory / "sleepy_tasks.py").write_text(SLEEPY)
    (directory / "not_valid.py").write_text("1 / 0\n")
    sys.path.insert(0, str(directory))
    import sleepy_tasks  # type: ignore[import-not-found]

    yield sleepy_tasks.app
    sys.path.remove(str(directory))
    del sys.modules["sleepy_tasks"]


@pytest.fixture(scope="module")
def process(sleepy: forq.App, server_process: ServerProcess) -> Iterator[SupervisorProcess]:
    process = SupervisorProcess([path_of(sleepy)], server_process)
    yield process
    process.stop()


@pytest.fixture
def supervisor(sleepy: forq.App, process: SupervisorProcess) -> Iterator[Supervisor]:
    with testing.supervisor(sleepy, process=process) as supervisor:
        yield supervisor


def test_clear_kills_jobs_and_removes_everything(sleepy: forq.App, supervisor: Supervisor) -> None:
    sleep, queue = sleepy.tasks["sleep"], supervisor.queue("sleepy")
    done = sleep.using(id="done", token="t").enqueue(0)
    done.result(timeout=20)
    running, waiting = sleep.using(id="running").enqueue(60), sleep.enqueue(60)
    sleep.using(run_in=60).enqueue(0)
    dead = sleep.using(expires_in=0.001, run_at=time.time() - 60).enqueue(0)
    queue.schedule("often", every="1h", type="sleep", data={"seconds": 0})
    wait_until(lambda: running.state() == "active", what="a job runs")
    queue.pause()
    supervisor.clear()
    assert {ref.state() for ref in (done, running, waiting, dead)} == {"gone"}
    assert (supervisor.jobs(), queue.schedules(), queue.status()["paused"]) == ([], [], False)
    assert sleep.using(token="t").enqueue(0).id != done.id
    supervisor.drain()


def test_drain_shows_what_is_left(sleepy: forq.App, supervisor: Supervisor) -> None:
    sleepy.tasks["sleep"].using(id="slow").enqueue(60)
    with pytest.raises(WaitTimeout, match=r"queues sleepy are not drained within 0\.1 s\n  sleepy: sleep\(seconds=60"):
        supervisor.drain(timeout=0.1)


def test_the_log_the_socket_and_forqctl(supervisor: Supervisor) -> None:
    assert "read app app=sleepy" in supervisor.log
    assert os.environ["FORQ_SOCKET"] == str(supervisor.socket)
    assert [queue["name"] for queue in supervisor.call("status")["queues"]] == ["sleepy"]
    with pytest.raises(UsageError, match="forqctl job sleepy none ended with 4"):
        supervisor.ctl("job", "sleepy", "none")


def test_an_app_that_cannot_be_imported_is_reported(sleepy: forq.App, server_process: ServerProcess) -> None:
    began = time.monotonic()
    with pytest.raises(CannotStart, match=r"(?s)'not_valid:app' cannot be imported: ZeroDivisionError.*1 / 0"):
        SupervisorProcess(["not_valid:app"], server_process)
    assert time.monotonic() - began < QUICKLY_SECONDS


def test_settings_that_are_not_valid_are_reported(server_process: ServerProcess) -> None:
    with pytest.raises(CannotStart, match=r"(?s)ended with exit status 78: .*no setting 'nonsense'"):
        SupervisorProcess([], server_process, "nonsense = 1")


def test_an_app_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="it must be an attribute of a module"):
        path_of(forq.App("local"))
    assert path_of(examples.app) == "tests.testing.examples:app"


def test_a_server_is_emptied_and_its_directory_removed(server_process: ServerProcess) -> None:
    for _ in range(2):
        with testing.server(modes.app, process=server_process) as server:
            ref = modes.add.using(token="t", id="x").enqueue(1)
            assert len(server.run_all()) == 1
            assert ref.result(timeout=5) == 2
            server.clear()
            assert ref.state() == "gone"
    with testing.server(examples.app) as own:
        directory = Path(own.process.socket).parent
        assert directory.exists()
    assert not directory.exists()
