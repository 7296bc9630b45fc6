"""`[pipeline]` in forq.toml: ingest as a queue of forq's own, with its Java in the queue's process tree."""

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
        # What Java starts for a moment may be gone again.
        with suppress(psutil.NoSuchProcess):
            if "java" in process.name():
                found.add(process.pid)
    return found


def rows(history: Path) -> int:
    """As another program sees them; in the moment in which small files are put together there is nothing to count."""
    try:
        if not list(history.glob("events/**/*.parquet")):
            return 0
        return int(pyarrow.dataset.dataset(str(history / "events"), format="parquet", partitioning="hive").count_rows())
    except FileNotFoundError:
        return 0


def test_history_is_filled_by_a_queue_whose_java_dies_with_it(tmp_path: Path) -> None:
    history = tmp_path / "history"
    with running(settings=f'[pipeline]\nhistory = "{history}"\nevery = "2s"\n') as forq:
        forq.create("work")
        forq.client().queue("work").enqueue_many(range(100))
        wait_until(lambda: forq.queue_status("work")["done"] == 100)
        wait_until(lambda: rows(history) >= 300, 120.0, "its events are history")
        child = forq.child("forq-pipeline")["pid"]
        java = java_below(forq, child)
        assert len(java) == 1
        forq.client().queue("work").enqueue_many(range(50))
        wait_until(lambda: rows(history) >= 450, 60.0, "it runs again by itself")
        assert java_below(forq, child) == java, "with the session that it has"
        psutil.Process(child).kill()
        wait_until(lambda: not alive(java), 10.0, "Java is gone with its process")
        forq.client().queue("work").enqueue_many(range(50))
        wait_until(lambda: rows(history) >= 600, 120.0, "and another one goes on where it was")
        everything = {process.pid for process in forq.processes()}
        assert forq.stop() == 0
        assert not alive(everything), "nothing is left of it"
