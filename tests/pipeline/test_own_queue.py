"""`[pipeline]` in forq.toml: a queue runs the ingest, with Java in its process tree."""

from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.dataset
import pytest

from tests.support.drive.processes import alive
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(240)


def java_below(forq: Forq, pid: int) -> set[int]:
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        # Java starts short-lived processes.
        with suppress(psutil.NoSuchProcess):
            if "java" in process.name():
                found.add(process.pid)
    return found


def rows(history: Path) -> int:
    """Counted as by another program; 0 while small files are being compacted."""
    try:
        if not list(history.glob("events/**/*.parquet")):
            return 0
        return int(pyarrow.dataset.dataset(str(history / "events"), format="parquet", partitioning="hive").count_rows())
    except FileNotFoundError:
        return 0


def test_a_queue_fills_the_history_and_its_java_dies_with_its_process(tmp_path: Path) -> None:
    history = tmp_path / "history"
    with running(settings=f'[pipeline]\nhistory = "{history}"\nevery = "2s"\n') as forq:
        forq.create("work")
        forq.client().queue("work").enqueue_many(range(100))
        wait_until(lambda: forq.queue_status("work")["done"] == 100)
        wait_until(lambda: rows(history) >= 300, 120.0, "its events are in the history")
        child = forq.child("forq-pipeline")["pid"]
        java = java_below(forq, child)
        assert len(java) == 1
        forq.client().queue("work").enqueue_many(range(50))
        wait_until(lambda: rows(history) >= 450, 60.0, "it runs again")
        assert java_below(forq, child) == java, "in the same session"
        psutil.Process(child).kill()
        wait_until(lambda: not alive(java), 10.0, "Java died with its process")
        forq.client().queue("work").enqueue_many(range(50))
        wait_until(lambda: rows(history) >= 600, 120.0, "the next process continues")
        everything = {process.pid for process in forq.processes()}
        assert forq.stop() == 0
        assert not alive(everything), "no process is left"
