"""The private memory of an idle process of a queue."""

import py_compile
import statistics
from pathlib import Path

import pytest

from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

QUEUES = 6
# CPython 3.11 with redis-py 8 has 5.1 MB, and 5.2 after a job.
IDLE_KB = 5500
AFTER_JOB_KB = 5700


def private_kb(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in rollup if line.startswith(("Private_Clean", "Private_Dirty")))


def median_kb(forq: Forq, names: list[str], role: str) -> float:
    return statistics.median(private_kb(forq.child(name, role)["pid"]) for name in names)


@pytest.fixture
def handlers(tmp_path: Path) -> Path:
    """With bytecode: otherwise each process would compile it, which takes memory."""
    source = tmp_path / "still.py"
    source.write_text("def handle(data, job):\n    return None\n")
    py_compile.compile(str(source))
    return tmp_path


def test_an_idle_process_shares_most_of_its_memory(handlers: Path) -> None:
    names = [f"still{number}" for number in range(QUEUES)]
    with running() as forq:
        for name in names:
            forq.ctl("create", name, "--handler", "still:handle", "--path", str(handlers))
        for name in names:
            forq.wait_for_child(name)
            forq.wait_for_child(name, "parked", "retry")
        main, retry = median_kb(forq, names, "main"), median_kb(forq, names, "retry")
        for name in names:
            forq.client().queue(name).enqueue(1)
        wait_until(lambda: all(forq.queue_status(name)["done"] == 1 for name in names))
        after_job = median_kb(forq, names, "main")
    print(f"private to a process: main {main} kB, retry {retry} kB, main after a job {after_job} kB")
    assert max(main, retry) < IDLE_KB
    assert after_job < AFTER_JOB_KB
