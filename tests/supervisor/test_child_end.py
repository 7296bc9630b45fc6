"""The end of a real child, seen from the supervisor's side of its leash, and its effect on the loop."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forq.errors import ForqError, OutcomeUnknown
from forq.procs.cgroups import Cgroup, Cgroups
from forq.procs.loop import Loop
from forq.procs.treekill import read_stat
from forq.supervisor.child import Child, ChildTable, Exit
from tests.support.drive.processes import in_a_process_of_its_own


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_a_child_that_ends_without_reading_its_leash_ends_normally() -> None:
    """If its end of the leash is closed with unread lines, the supervisor gets ECONNRESET."""

    def check() -> None:
        loop, log = Loop(), Kept()
        logging.getLogger("forq").addHandler(log)
        gate_read, gate_write = os.pipe()
        ends: list[Exit] = []
        received: list[bytes] = []

        def run(leash: socket.socket) -> int:
            leash.sendall(b"{}\n")
            os.read(gate_read, 1)
            return 0

        children = ChildTable(loop, (gate_read,), None)
        child = Child(children, "test", run, on_line=received.append, on_end=ends.append)
        child.send(b"unread\n")
        os.write(gate_write, b"x")
        deadline = time.monotonic() + 20.0
        while not ends and time.monotonic() < deadline:
            loop.tick(0.05)
        assert (ends, received, log.messages) == ([Exit(0, None)], [b"{}"], [])

    in_a_process_of_its_own(check)


def test_a_child_stopped_and_continued_endlessly_does_not_occupy_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signals may arrive as fast as the supervisor reads them, so there is always another one to handle."""
    loop = Loop()
    children = ChildTable(loop, (), None)
    reads = 0
    stopped = SimpleNamespace(si_pid=1, si_code=os.CLD_STOPPED)

    def waitid(*_: int) -> SimpleNamespace | None:
        nonlocal reads
        reads += 1
        assert reads <= 1000, "nothing else has run"
        return stopped if reads < 300 else None

    monkeypatch.setattr(os, "waitid", waitid)
    called: list[int] = []
    loop.call_later(0.0, lambda: called.append(reads))
    children._check_stops()
    while reads < 300:
        loop.tick(0.0)
    assert called
    assert called[0] < 100
    assert reads == 300, "the rest is read without another signal"


def test_a_child_killed_before_it_joined_its_control_group_is_cleaned_up() -> None:
    groups = Cgroups.find(f"forq-test-{os.getpid()}")
    if groups is None:
        pytest.skip("no writable cgroup2 with cgroup.kill here")

    def check() -> None:
        Cgroup.join = lambda group, pid: signal.pause()  # type: ignore[assignment, misc]
        loop = Loop()
        ends: list[Exit] = []
        children = ChildTable(loop, (), groups)
        child = Child(children, "test", lambda leash: 0, runs_user_code=True, on_line=print, on_end=ends.append)
        child.kill()
        deadline = time.monotonic() + 20.0
        while not ends and time.monotonic() < deadline:
            loop.tick(0.05)
        assert ends == [Exit(None, signal.SIGKILL)]

    in_a_process_of_its_own(check)
    assert groups.remove()


class Warden:
    """Answers when the test calls `answer`; `error`: the process that should have answered has died."""

    def __init__(self, error: ForqError | None = None) -> None:
        self.requests: list[tuple[str, dict[str, Any], Callable[[Any], None]]] = []
        self.error = error

    def request(self, verb: str, params: dict[str, Any], answer: Callable[[Any], None]) -> bool:
        self.requests.append((verb, params, answer))
        return True

    def answer(self) -> str:
        """Answers the oldest request; returns its verb."""
        verb, params, answer = self.requests.pop(0)
        if self.error is not None:
            answer(self.error)
        elif verb == "kill":
            os.kill(params["pid"], signal.SIGKILL)
            answer({"gone": True})
        else:
            answer({})
        return verb


def tick_until(loop: Loop, condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        loop.tick(0.05)


def pause(leash: socket.socket) -> int:
    signal.pause()
    return 0


def test_a_child_is_reaped_after_the_warden_has_killed_it_and_ends_after_the_cleanup() -> None:
    """Until then no other process can get its pid."""

    def check() -> None:
        loop, warden, ends = Loop(), Warden(), list[Exit]()
        children = ChildTable(loop, (), None, request_warden=warden.request)
        child = Child(children, "test", pause, runs_user_code=True, on_line=print, on_end=ends.append)
        child.kill()
        ((verb, params, _),) = warden.requests
        assert (verb, params) == ("kill", {"pid": child.pid})
        os.kill(child.pid, signal.SIGKILL)
        tick_until(loop, lambda: child._gone)
        assert not child.ended
        assert read_stat(child.pid) is not None, "it is a zombie, so no other process has its pid"
        assert warden.answer() == "kill"
        assert child.ended
        tick_until(loop, lambda: warden.requests)
        assert ends == [], "it may have left processes behind"
        assert warden.answer() == "clean_up"
        assert ends == [Exit(None, signal.SIGKILL)]

    in_a_process_of_its_own(check)


def test_the_supervisor_does_the_work_of_a_warden_that_died() -> None:
    def check() -> None:
        loop, warden, ends = Loop(), Warden(OutcomeUnknown("the warden process died")), list[Exit]()
        children = ChildTable(loop, (), None, request_warden=warden.request)
        child = Child(children, "test", pause, runs_user_code=True, on_line=print, on_end=ends.append)
        orphan = os.fork()
        if orphan == 0:
            signal.pause()
        child.kill()
        assert warden.answer() == "kill"
        tick_until(loop, lambda: warden.requests)
        assert warden.answer() == "clean_up"
        assert ends == [Exit(None, signal.SIGKILL)]
        assert read_stat(orphan) is None

    in_a_process_of_its_own(check)


def test_real_children_that_die_during_a_cleanup_share_the_next_one() -> None:
    def check() -> None:
        loop, warden, ends = Loop(), Warden(), list[Exit]()
        table = ChildTable(loop, (), None, request_warden=warden.request)
        children = [
            Child(table, f"test {n}", pause, runs_user_code=True, on_line=print, on_end=ends.append) for n in range(5)
        ]
        os.kill(children[0].pid, signal.SIGKILL)
        tick_until(loop, lambda: warden.requests)
        for child in children[1:]:
            os.kill(child.pid, signal.SIGKILL)
        tick_until(loop, lambda: all(child.ended for child in children))
        loop.tick(0)
        assert len(warden.requests) == 1
        assert warden.answer() == "clean_up"
        assert len(ends) == 1
        tick_until(loop, lambda: warden.requests)
        assert warden.answer() == "clean_up"
        assert (len(ends), warden.requests) == (5, [])

    in_a_process_of_its_own(check)
