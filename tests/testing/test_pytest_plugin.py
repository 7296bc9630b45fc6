"""The pytest plugin, in small projects that pytest runs in processes of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from tests.support.drive.wait import wait_until

TASKS = """
import asyncio
import forq

app = forq.App("shop")

@app.task(queue="mails")
def send(to: str) -> str:
    print(f"sending to {to}")
    return f"sent to {to}"

@app.task
async def fetch(number: int) -> int:
    await asyncio.sleep(0.001)
    return number + 1

@app.task
def sleep() -> None:
    import time
    time.sleep(60)
"""
INI = """
[pytest]
forq_app = shop_tasks:app
pythonpath = .
asyncio_default_fixture_loop_scope = function
"""
TESTS = """
import asyncio, os
import pytest
import forq
from shop_tasks import app, fetch, send

def test_memory(forq_memory):
    ref = send.enqueue("a")
    forq_memory.assert_enqueued(send, "a")
    forq_memory.run_all()
    assert ref.result() == "sent to a"

@pytest.mark.parametrize("number", range(2))
def test_server(forq_server, number):
    ref = send.using(token="t").enqueue(str(number))
    assert len(forq_server.run_all()) == 1
    assert ref.result(timeout=5) == f"sent to {number}"
    assert os.environ["FORQ_REDIS"] == forq_server.url == app.client.url

@pytest.mark.parametrize("number", range(3))
def test_supervisor(forq_supervisor, number):
    ref = send.using(id="same", token="t").enqueue(str(number))
    assert ref.result(timeout=20) == f"sent to {number}"
    later = send.using(run_in=60).enqueue("later")
    assert forq_supervisor.jobs() == [forq_supervisor.assert_enqueued(send, "later")]
    assert "mails" in forq_supervisor.ctl("status")
    assert forq.Client().queue("mails").job(later.id)["state"] == "scheduled"

@pytest.mark.asyncio
async def test_asyncio(forq_memory):
    await check(forq_memory)

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.anyio
async def test_anyio(forq_memory):
    await check(forq_memory)

async def check(memory):
    loop = asyncio.get_running_loop()
    refs = [await fetch.aenqueue(1), await send.aenqueue("b")]
    waiting = asyncio.create_task(refs[0].aresult(timeout=20))
    assert len(await memory.arun_all()) == 2
    assert [await waiting, await refs[1].aresult()] == [2, "sent to b"]
    await app.async_client.aclose()

@pytest.mark.asyncio
async def test_asyncio_with_a_supervisor(forq_supervisor):
    refs = [await fetch.aenqueue(number) for number in range(5)]
    assert sorted([await ref.aresult() async for ref in forq.as_completed(refs, timeout=20)]) == [1, 2, 3, 4, 5]
    await app.async_client.aclose()
"""
CONFTEST = """
import pytest
import shop_tasks

@pytest.fixture(scope="session")
def forq_app():
    return [shop_tasks.app]

@pytest.fixture(scope="session")
def forq_settings():
    return "[queues.mails]\\nmax_items = 1"
"""
FAILING = """
import pytest
from forq.errors import QueueFull
from shop_tasks import send

def test_memory(forq_memory):
    send.enqueue("a")
    assert forq_memory.run_all()

def test_fails(forq_supervisor):
    forq_supervisor.queue("mails").pause()
    ref = send.enqueue("c")
    with pytest.raises(QueueFull):
        send.enqueue("d")
    forq_supervisor.queue("mails").resume()
    assert ref.result(timeout=20) == "wrong"
"""
HANGING = """
import os, time
import psutil
from shop_tasks import send, sleep

def test_hangs(forq_supervisor):
    sleep.enqueue()
    assert send.enqueue("c").result(timeout=20)
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    with open("pids.new", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename("pids.new", "pids")
    time.sleep(60)
"""


class Project:
    """`temporary`: what its processes use for their directories; short, for paths of sockets."""

    def __init__(self, directory: Path, temporary: Path) -> None:
        self.directory = directory
        self.temporary = temporary
        self.write("shop_tasks.py", TASKS)
        self.write("pytest.ini", INI)

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=self.directory,
            env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as process:
            output, _ = process.communicate(timeout=100)
        return process.returncode, output

    def leftovers(self) -> list[str]:
        return [path.name for path in self.temporary.iterdir() if path.name.startswith("forq-")]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    temporary = Path(tempfile.mkdtemp(prefix="fq-"))
    yield Project(tmp_path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def test_the_plugin_is_installed() -> None:
    """After a change of the entry points: pip install --editable ."""
    assert [each.value for each in entry_points(group="pytest11", name="forq")] == ["forq.testing.pytest_plugin"]


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    program = "import pytest, sys; import forq.testing.pytest_plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.startswith("forq")} == {
        *("forq", "forq.version", "forq.testing", "forq.testing.pytest_plugin"),
    }
    assert not {"redis", "fakeredis", "orjson", "msgspec", "psutil"} & set(loaded)


def test_all_fixtures_in_two_processes_of_xdist(project: Project) -> None:
    project.write("test_shop.py", TESTS)
    code, output = project.run("-n", "2", "-W", "error::pytest.PytestUnraisableExceptionWarning")
    assert code == 0, output
    assert "9 passed" in output
    assert project.leftovers() == []


def test_forq_app_can_be_overridden_and_a_failed_test_shows_the_log_of_the_supervisor(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\npythonpath = .\n")
    project.write("conftest.py", CONFTEST)
    project.write("test_failing.py", FAILING)
    code, output = project.run()
    assert (code, "1 failed, 1 passed" in output) == (1, True), output
    assert re.search(r"-+ forq supervisor log -+\n(.*\n)*.*sending to c", output), output
    assert project.leftovers() == []


def test_without_an_app_the_error_says_how_to_name_it(project: Project) -> None:
    project.write("test_shop.py", "def test_memory(forq_memory): pass\ndef test_plain(): pass\n")
    code, output = project.run("-o", "forq_app=")
    assert (code, "1 passed, 1 error" in output) == (1, True), output
    assert "forq_app = shop.tasks:app" in output
    assert "def forq_app():" in output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind_by_a_pytest_that_was_stopped(project: Project, signum: signal.Signals) -> None:
    project.write("test_hanging.py", HANGING)
    with project.start() as process:
        try:
            wait_until((project.directory / "pids").exists, 60, "the supervisor runs")
            pids = [int(pid) for pid in (project.directory / "pids").read_text().split()]
            assert len(pids) > 8, "leashes, server, supervisor, services, processes of queues"
        finally:
            process.send_signal(signum)
        process.communicate(timeout=60)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="all processes have ended")
    wait_until(lambda: project.leftovers() == [], what="all directories are removed")
