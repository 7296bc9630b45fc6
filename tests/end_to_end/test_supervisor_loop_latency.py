"""The supervisor has one thread: no pass of its loop may take long, whatever it processes."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from forq.ctl.client import ControlClient
from tests.end_to_end.fuzz_drive import open_many
from tests.end_to_end.fuzz_pinger import Pinger
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

# Without the time in which the machine had no CPU for it. The rest may be a disk that stalls the log now and then.
LONGEST_PASS_MS = 20.0
ANSWER_BYTES = 7_500_000
DAEMONS = 100
WINDOWS = 3
CONNECTIONS = 1000

pytestmark = pytest.mark.timeout(180)


class TimedForq(Forq):
    @property
    def passes(self) -> Path:
        """One file per measured window."""
        return self.directory / "passes"

    def program(self) -> list[str]:
        return [sys.executable, "-m", "tests.end_to_end.timed_supervisor", str(self.passes)]

    def longest_pass_ms(self, window: int) -> tuple[float, float]:
        """By the wall clock, and without waiting for a CPU."""
        wall, own = (self.passes / str(window)).read_text().split()
        return float(wall), float(own)


@pytest.fixture
def forq() -> Iterator[TimedForq]:
    # Control groups would kill the trees without the supervisor's help.
    forq = TimedForq(settings='cgroup = "off"\n', environment={"PYTHONPATH": os.getcwd()})
    forq.passes.mkdir()
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()


def _is_daemon(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name() == "sleep"
    return False


@contextmanager
def again_and_again(call: Callable[[], object]) -> Iterator[list[object]]:
    """In a thread; yields the results of the calls."""
    found: list[object] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            found.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def test_long_answers_many_connections_and_dying_trees_take_no_long_pass(forq: TimedForq) -> None:
    control = forq.state_dir / "control.sock"
    forq.create("box", max_data="8mb")
    forq.call("queue.pause", name="box")
    forq.client().queue("box").enqueue("x" * ANSWER_BYTES, id="long")
    forq.create("trees", "forest", max_stalls=0, max_retries=0)
    forq.wait_for_child("trees")

    # Opened before all others, which leave no room for more.
    ours, reader = ControlClient(str(control), 60.0), ControlClient(str(control), 60.0)

    def read_all() -> int:
        return len(reader.call("job", {"name": "box", "id": "long"})["data"])

    def daemons() -> int:
        return sum(_is_daemon(process) for process in forq.processes())

    def main_pid() -> int | None:
        (trees,) = ours.call("status", {"names": ["trees"]})["queues"]
        return next(child["pid"] for child in trees["children"] if child["role"] == "main")  # type: ignore[no-any-return]

    def kill_a_tree(name: str, kill: Callable[[int], object]) -> None:
        def planted() -> bool:
            return name in {trace.job for trace in forq.traces("planted")} and daemons() >= DAEMONS

        forq.client().queue("trees").enqueue(DAEMONS, id=name)
        wait_until(planted, what="the daemons are there")
        pid = main_pid()
        assert pid is not None
        kill(pid)
        # While they are re-parented, a look at the tree may miss them.
        wait_until(lambda: main_pid() not in (pid, None) and not daemons(), what="the daemons are gone")

    found: list[tuple[float, float]] = []
    pinger = Pinger(control, {"jsonrpc": "2.0", "id": 1, "method": "ping"}, forq.directory / "pings")
    try:
        pinger.wait_for(5)
        pinger.take()
        with again_and_again(read_all) as answers, again_and_again(lambda: open_many(control, CONNECTIONS)) as opened:
            for window in range(WINDOWS):
                before = len(answers), len(opened)
                (forq.passes / str(window)).touch()
                kill_a_tree(f"killed{window}", lambda pid: os.kill(pid, signal.SIGKILL))
                kill_a_tree(f"ended{window}", lambda _: ours.call("kill", {"name": "trees", "id": f"ended{window}"}))  # noqa: B023
                wait_until(lambda: len(answers) > before[0] and len(opened) > before[1], what="some of each")  # noqa: B023
                found.append(forq.longest_pass_ms(window))
        pings = pinger.take()
    finally:
        pinger.process.kill()
        pinger.process.wait()
        ours.close()
        reader.close()
    # The best of three: other tests compete for caches and memory bandwidth, which no clock shows.
    wall_ms, own_ms = min(found, key=lambda times: times[1])
    p99_ms = pings[len(pings) * 99 // 100]
    print(f"longest pass {wall_ms:.1f} ms, {own_ms:.1f} ms of its own; {len(pings)} pings, p99 {p99_ms:.1f} ms")
    assert set(answers) == {ANSWER_BYTES}
    assert 0 < own_ms < LONGEST_PASS_MS
