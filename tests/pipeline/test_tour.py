"""`make demo` without its pauses. In this folder because its last step is the audit."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.drive.processes import alive
from tests.support.drive.wait import wait_until

DEMO = Path(__file__).resolve().parents[2] / "etc" / "demo"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """The directory of the tour: a short path, since it has sockets."""
    directory = Path(tempfile.mkdtemp(prefix="t-"))
    yield directory
    shutil.rmtree(directory)


def begin(scratch: Path, *args: str, demo: Path = DEMO) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(demo / "tour.py"), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )


def left_in(scratch: Path) -> list[str]:
    """Without the wrapper script of Java, which later runs reuse."""
    return [name for name in os.listdir(scratch) if not name.startswith("forq-java-")]


@pytest.mark.timeout(400)
def test_all_checks_of_the_tour_pass_and_no_file_is_left(scratch: Path) -> None:
    tour = begin(scratch, "--fast")
    out, err = tour.communicate(timeout=390)
    assert (tour.returncode, err) == (0, "")
    assert out.count("checked: ") == 12
    assert "checked: the audit found nothing wrong" in out
    assert left_in(scratch) == []


def test_the_tour_exits_with_1_when_a_check_fails(scratch: Path, tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    shutil.copytree(DEMO, demo)
    handlers = demo / "handlers.py"
    twice = 'note(job, "began")\n    note(job, "began")'
    handlers.write_text(handlers.read_text().replace('note(job, "began")', twice, 1))
    tour = begin(scratch, "--fast", "--no-audit", demo=demo)
    _, err = tour.communicate(timeout=110)
    assert tour.returncode == 1
    assert "CHECK FAILED: the handler was called 1001 times" in err
    assert left_in(scratch) == []


def test_ctrl_c_stops_the_tour_and_cleans_up(scratch: Path) -> None:
    tour = begin(scratch)
    try:
        top = psutil.Process(tour.pid)
        wait_until(lambda: len(top.children(recursive=True)) > 5, seconds=60, what="the supervisor has children")
        pids = {process.pid for process in top.children(recursive=True)}
        tour.send_signal(signal.SIGINT)
        _, err = tour.communicate(timeout=60)
    finally:
        tour.kill()
        tour.wait()
    assert (tour.returncode, err) == (130, "\ninterrupted; cleaning up\n")
    assert alive(pids) == set()
    assert left_in(scratch) == []
