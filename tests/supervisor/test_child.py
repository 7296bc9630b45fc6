"""A child and the table of children without forks: messages, stop, and the cleanup after its end."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forq.errors import InvalidData
from forq.supervisor import child as child_module
from forq.supervisor.child import (
    LEASH_CLOSED_SECONDS,
    LINES_PER_PASS,
    TERM_GROUP_SECONDS,
    Child,
    ChildTable,
    Exit,
    ProcessHandle,
)
from tests.supervisor.fakes import FakeLoop

PID = 4_000_000
PIDFD = 9_999
CRASHED = Exit(None, 9)


class Stage:
    """One child; `leash` is its end of the leash, `warden` are unanswered requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = FakeLoop()
        self.log: list[str] = []
        self.lines: list[bytes] = []
        self.ends: list[Exit] = []
        self.warden: list[tuple[str, Callable[[Any], None]]] = []
        self.leash: socket.socket
        monkeypatch.setattr(child_module, "spawn", self._spawn)
        monkeypatch.setattr(child_module, "reap", self._reap)
        monkeypatch.setattr(child_module, "signal_child", self._signal)
        monkeypatch.setattr(os, "killpg", lambda pid, signum: self.log.append(f"group {signal.Signals(signum).name}"))
        monkeypatch.setattr(os, "close", self._close)
        self._real_close = os.close
        self.table = ChildTable(self.loop, (), None, request_warden=self._request)  # type: ignore[arg-type]
        self.child = Child(
            self.table,
            "q main",
            lambda leash: 0,
            runs_user_code=True,
            on_line=self._on_line,
            on_invalid=lambda cause: self.log.append(f"invalid {cause}"),
            on_end=self.ends.append,
        )

    def _spawn(self, run: Any, *, keep_fds: tuple[int, ...], **options: Any) -> ProcessHandle:
        self.leash = socket.socket(fileno=os.dup(keep_fds[-1]))
        return ProcessHandle(PID, PIDFD)

    def _reap(self, handle: ProcessHandle) -> Exit:
        self.log.append("reap")
        return CRASHED

    def _signal(self, handle: ProcessHandle, signum: int) -> bool:
        self.log.append(signal.Signals(signum).name)
        return True

    def _close(self, fd: int) -> None:
        if fd != PIDFD:
            self._real_close(fd)

    def _request(self, verb: str, params: dict[str, Any], answer: Callable[[Any], None]) -> bool:
        self.warden.append((verb, answer))
        return True

    def _on_line(self, line: bytes) -> None:
        if line == b"bad":
            raise InvalidData("bad line")
        self.lines.append(line)

    def answer_warden(self, answer: object = None) -> str:
        verb, callback = self.warden.pop(0)
        callback({} if answer is None else answer)
        return verb

    def read(self) -> None:
        """The loop finds input on the leash."""
        for fd, callback in list(self.loop.readers.items()):
            if fd != PIDFD:
                callback()

    def exit(self) -> None:
        """The pidfd reports the end."""
        self.loop.readers.pop(PIDFD)()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(monkeypatch)
    yield stage
    stage.leash.close()


def test_each_line_is_handled_once(stage: Stage) -> None:
    stage.leash.send(b"one\ntw")
    stage.read()
    stage.leash.send(b"o\n")
    stage.read()
    assert stage.lines == [b"one", b"two"]


def test_a_flood_of_lines_is_handled_in_parts(stage: Stage) -> None:
    stage.leash.send(b"x\n" * (3 * LINES_PER_PASS))
    stage.read()
    assert len(stage.lines) == LINES_PER_PASS
    stage.loop.run()
    assert len(stage.lines) == 3 * LINES_PER_PASS


def test_an_invalid_line_kills_the_child_and_the_rest_is_ignored(stage: Stage) -> None:
    stage.leash.send(b"good\nbad\ngood\n")
    stage.read()
    stage.loop.run()
    assert stage.lines == [b"good"]
    assert stage.log[0] == "invalid garbage_on_leash"
    assert stage.answer_warden() == "kill"
    stage.leash.send(b"later\n")
    stage.exit()
    stage.loop.run()
    stage.answer_warden()
    stage.loop.run()
    assert (stage.lines, stage.ends) == ([b"good"], [CRASHED]), "later messages are ignored, too"


def test_the_last_messages_of_a_dead_child_are_handled_before_its_end_is_reported(stage: Stage) -> None:
    stage.leash.send(b"last\n")
    stage.exit()
    stage.loop.run()
    assert stage.ends == [], "its tree is not gone yet"
    assert stage.answer_warden() == "clean_up"
    stage.loop.run()
    assert (stage.lines, stage.ends) == ([b"last"], [CRASHED])


def test_a_child_is_not_reaped_while_the_warden_kills_it(stage: Stage) -> None:
    """After that, its pid could belong to another process."""
    stage.child.kill()
    stage.exit()
    assert "reap" not in stage.log
    assert not stage.child.ended
    assert stage.answer_warden() == "kill"
    assert stage.log[-1] == "reap"
    assert stage.child.ended


def test_a_stop_escalates_from_term_to_the_group_to_a_kill(stage: Stage) -> None:
    stage.child.stop(5.0)
    assert stage.log == ["SIGTERM"]
    stage.loop.run(4.9)
    assert stage.log == ["SIGTERM"]
    stage.loop.run(0.2)
    assert stage.log == ["SIGTERM", "group SIGTERM"]
    assert stage.answer_warden() == "term"
    stage.loop.run(TERM_GROUP_SECONDS)
    assert [verb for verb, _ in stage.warden] == ["kill"]


def test_a_child_that_ends_within_its_grace_period_is_not_killed(stage: Stage) -> None:
    stage.child.stop(5.0)
    stage.exit()
    stage.loop.run(60.0)
    assert "group SIGTERM" not in stage.log
    assert [verb for verb, _ in stage.warden] == ["clean_up"]


def test_a_child_that_closes_its_leash_and_keeps_running_is_killed(stage: Stage) -> None:
    stage.leash.close()
    stage.read()
    stage.loop.run(LEASH_CLOSED_SECONDS - 0.1)
    assert stage.warden == []
    stage.loop.run(0.2)
    assert stage.log[0] == "invalid leash_closed"
    assert [verb for verb, _ in stage.warden] == ["kill"]


def test_a_child_that_closes_its_leash_because_it_ends_is_not_killed(stage: Stage) -> None:
    stage.leash.close()
    stage.read()
    stage.exit()
    stage.loop.run(60.0)
    assert "invalid leash_closed" not in stage.log


def test_children_that_die_during_a_cleanup_share_the_next_one(stage: Stage) -> None:
    gone: list[int] = []
    for number in range(3):
        stage.table.clean_up(None, lambda survivors, number=number: gone.append(number))  # type: ignore[misc]
        stage.loop.run()
    assert [verb for verb, _ in stage.warden] == ["clean_up"]
    stage.answer_warden()
    stage.loop.run()
    assert gone == [0]
    stage.answer_warden()
    assert (gone, stage.warden) == ([0, 1, 2], [])


def test_a_callback_that_fails_does_not_keep_the_others_from_being_called(stage: Stage) -> None:
    gone: list[str] = []

    def fail(survivors: frozenset[int]) -> None:
        raise RuntimeError

    stage.table.clean_up(None, fail)
    stage.table.clean_up(None, lambda survivors: gone.append("second"))
    stage.loop.run()
    stage.answer_warden()
    assert gone == ["second"]


def test_without_a_warden_the_supervisor_kills_the_tree_itself(stage: Stage) -> None:
    stage.table.request_warden = lambda verb, params, answer: False
    answers: list[Any] = []
    stage.table.delegate("kill", {}, lambda: "done here", answers.append)
    assert answers == ["done here"]


def test_a_failure_in_the_supervisor_itself_still_calls_back(stage: Stage) -> None:
    def fail() -> object:
        raise OSError("no /proc")

    stage.table.request_warden = None
    answers: list[Any] = []
    stage.table.delegate("kill", {}, fail, answers.append)
    assert answers == [None]
