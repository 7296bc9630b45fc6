"""The warden: what it measures of a process tree, how often it checks, and what it reports."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from forq.procs import jsonrpc
from forq.procs.cgroups import Exceeded, Resources
from forq.procs.scoreboard import Scoreboard
from forq.services import warden as module
from forq.services.warden import CHECK_SECONDS, IDLE_CHECK_SECONDS, Warden, check_tree
from tests.support.drive.contexts import context

MB = 1024 * 1024


HOLDING = """
import mmap, signal, sys
size = int(sys.argv[1])
held = mmap.mmap(-1, size)
for at in range(0, size, mmap.PAGESIZE):
    held[at] = 1
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def start_holding() -> Iterator[Callable[[int], int]]:
    """Starts a process that uses the given number of megabytes; returns its pid."""
    with contextlib.ExitStack() as ends:

        def start(megabytes: int) -> int:
            command = [sys.executable, "-S", "-c", HOLDING, str(megabytes * MB)]
            process = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            ends.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            return process.pid

        yield start


def test_memory_is_measured_over_the_whole_tree(start_holding: Callable[[int], int]) -> None:
    pid = start_holding(80)
    found = check_tree(pid, Resources(memory_bytes=60 * MB))
    assert found is not None
    assert found.cause == "oom"
    assert found.peak_bytes is not None
    assert 80 * MB <= found.peak_bytes < 120 * MB
    assert check_tree(pid, Resources(memory_bytes=2000 * MB)) is None


def test_shared_pages_are_counted_once(start_holding: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    pid = start_holding(1)
    monkeypatch.setattr(module, "pss_bytes", lambda each: 10 * MB)
    monkeypatch.setattr(module, "_threads_and_resident", lambda each: (1, 100 * MB))
    assert check_tree(pid, Resources(memory_bytes=50 * MB)) is None
    assert check_tree(pid, Resources(memory_bytes=9 * MB)) == Exceeded("oom", 10 * MB)


def test_threads_count_as_tasks() -> None:
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        found = check_tree(os.getpid(), Resources(tasks=20))
        assert found is not None
        assert found.cause == "pids"
        assert check_tree(os.getpid(), Resources(tasks=1000)) is None
    finally:
        release.set()
        for thread in threads:
            thread.join()


def test_a_process_that_has_exited_uses_nothing() -> None:
    assert check_tree(2**22 + 1, Resources(memory_bytes=1, tasks=1)) is None


class WardenRig:
    """A warden with a fake clock; `checked` lists the pids it has checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.checked: list[int] = []
        self.over: set[int] = set()
        self.board = Scoreboard.create(4)
        self.slot = self.board.slot(self.board.take())
        self.ours, theirs = socket.socketpair()
        monkeypatch.setattr(module, "check_tree", self._check)
        self.warden = Warden(context(scoreboard=self.board), theirs, clock=lambda: self.now)

    def _check(self, pid: int, resources: Resources) -> Exceeded | None:
        self.checked.append(pid)
        self.now += 0.001
        return Exceeded("oom", 7) if pid in self.over else None

    def watch(self, *pids: int) -> None:
        processes = [{"key": pid, "pid": pid, "slots": [0], "memory_bytes": 1, "tasks": 0} for pid in pids]
        self.ours.sendall(jsonrpc.request(1, "watch", {"processes": processes}))
        self.warden._loop.tick(5)
        self.ours.recv(4096)

    def tick(self, after: float = CHECK_SECONDS) -> list[int]:
        self.now += after
        before = len(self.checked)
        self.warden.tick()
        return self.checked[before:]


def test_a_busy_process_is_checked_each_time_and_an_idle_one_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WardenRig(monkeypatch)
    rig.watch(11)
    assert rig.tick() == [11]
    assert rig.tick() == []
    rig.slot.position = 1
    assert rig.tick() == [11]
    rig.slot.position = 0
    assert rig.tick() == []
    assert rig.tick(IDLE_CHECK_SECONDS) == [11]


def test_a_process_over_its_limit_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WardenRig(monkeypatch)
    rig.watch(11, 12)
    rig.over = {12}
    rig.slot.position = 1
    assert rig.tick() == [11, 12]
    assert jsonrpc.decode(rig.ours.recv(4096)) == {"event": "exceeded", "key": 12, "cause": "oom", "peak": 7}
    assert rig.tick() == [11]


def test_slow_checks_are_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WardenRig(monkeypatch)
    rig.watch(*range(100))
    rig.slot.position = 1
    rig.tick()
    assert rig.warden._pause_seconds == pytest.approx(0.9)
