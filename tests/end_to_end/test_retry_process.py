"""The retry process imports the application when it has work, not before."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.drive.handler_module import Module
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until, whole_lines

# `imported`: the pids of the processes that have imported the module.
SOURCE = """
import os

with open({imported!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
from traced import fail as handle, on_fail_id as failed
"""


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    return tmp_path / "imported"


@pytest.fixture
def module(tmp_path: Path, imported: Path) -> Module:
    made = Module(tmp_path, f"lazy_{os.urandom(4).hex()}")
    made.write(SOURCE.format(imported=str(imported)))
    return made


def create(forq: Forq, module: Module) -> tuple[int, int]:
    """Returns the pids of the main and the retry process."""
    arguments = [*module.arguments(), f"--fail-handler={module.name}:failed", "max_retries=0", "min_backoff=0"]
    forq.ctl("create", module.name, *arguments)
    retry = forq.wait_for_child(module.name, "parked", "retry")["pid"]
    return forq.wait_for_child(module.name)["pid"], retry


def handled(forq: Forq, job: str) -> list[int]:
    """Pids of the processes that ran the fail handler for this job."""
    return [trace.pid for trace in forq.traces() if trace.event == f"failed={job}"]


def test_only_a_fail_job_makes_it_import_the_application(forq: Forq, module: Module, imported: Path) -> None:
    main, retry = create(forq, module)
    assert whole_lines(imported) == [str(main)]
    forq.client().queue(module.name).enqueue(1, id="first")
    assert wait_until(lambda: handled(forq, "first"), what="the fail handler ran") == [retry]
    assert whole_lines(imported) == [str(main), str(retry)]
    forq.client().queue(module.name).enqueue(1, id="second")
    assert wait_until(lambda: handled(forq, "second"), what="it ran again") == [retry]
    assert len(whole_lines(imported)) == 2


def test_a_new_one_finds_work_that_was_there_before(forq: Forq, module: Module) -> None:
    create(forq, module)
    good = module.file.read_text()
    module.write("import nowhere\n")
    forq.client().queue(module.name).enqueue(1, id="stuck")
    error = wait_until(lambda: forq.queue_status(module.name)["restart_error"], what="the import fails")
    assert "No module named 'nowhere'" in error["message"]
    assert forq.queue_status(module.name)["state"] == "running", "the main process continues"
    assert not handled(forq, "stuck")
    module.write(good)
    wait_until(lambda: handled(forq, "stuck"), what="a later process imports the mended code")
    wait_until(lambda: forq.queue_status(module.name)["restart_error"] is None, what="the error is over")
