"""When an unresponsive process of a queue is reported, killed or replaced; with a fake clock."""

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest

from forq.procs.liveness import LATE_SECONDS
from forq.procs.scoreboard import Scoreboard, Slot, pack_position
from forq.supervisor.unresponsive import (
    KILL_SECONDS,
    LONGEST_SECONDS,
    NOTICE_SECONDS,
    WAITING_SWITCHES,
    ProcessWatch,
)


class Stage:
    """A process with two workers, and the supervisor's timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, MagicMock, Callable[[], None]]] = []
        loop = MagicMock()
        loop.now.side_effect = lambda: self.now
        loop.call_later.side_effect = self._later
        self.child = MagicMock(ended=False, stopped=False, pid=77)
        self.child.frozen.return_value = False
        board = Scoreboard.create(4)
        self.slots: list[Slot] = [board.slot(board.take()) for _ in range(2)]
        for slot in self.slots:
            slot.minder = 78
        self.actions: list[str] = []
        self.switches = 0
        self.watch = ProcessWatch(
            loop,
            self.child,
            self.slots,
            ping=lambda: self.actions.append("ping"),
            on_unresponsive=lambda: self.actions.append("unresponsive"),
            on_stuck=self._kill,
            replace=lambda: self.actions.append("replace"),
        )
        self.watch._minder_switches = lambda: self.switches  # type: ignore[method-assign]

    def _kill(self) -> None:
        self.actions.append("kill")
        self.child.ended = True

    def _later(self, seconds: float, call: Callable[[], None]) -> MagicMock:
        timer = MagicMock()
        self._timers.append((self.now + seconds, timer, call))
        return timer

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while due := sorted((each for each in self._timers if each[0] <= until), key=lambda each: each[0])[:1]:
            self._timers.remove(due[0])
            self.now = max(self.now, due[0][0])
            if not due[0][1].cancel.called:
                due[0][2]()
        self.now = max(self.now, until)

    def begin_job(self) -> None:
        self.slots[0].position = pack_position(0, 1, 0, True)

    def end_job(self) -> None:
        self.slots[0].position = pack_position(0, 1, 1, False)

    def beat(self) -> None:
        for slot in self.slots:
            slot.beat_ns = 2**62


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_process_that_answers_is_not_probed_again(stage: Stage) -> None:
    stage.watch.probe(unread=True)
    stage.beat()
    stage.run(60)
    assert stage.actions == ["ping"]
    assert stage._timers == [], "no timer is left"


def test_a_process_without_an_answer_is_reported_after_the_notice_time(stage: Stage) -> None:
    stage.watch.probe()
    stage.run(NOTICE_SECONDS - 0.05)
    assert not stage.watch.unresponsive
    stage.run(0.2)
    assert stage.watch.unresponsive
    stage.beat()
    stage.run(0.2)
    assert not stage.watch.unresponsive


@pytest.mark.parametrize("how", ["stopped", "frozen", "interpreter"])
def test_an_idle_process_that_cannot_recover_is_killed_after_a_second(stage: Stage, how: str) -> None:
    if how == "stopped":
        stage.child.stopped = True
        stage.watch.stopped_or_continued()
    else:
        stage.watch.probe()
        stage.child.frozen.return_value = how == "frozen"
        stage.switches = WAITING_SWITCHES if how == "interpreter" else 0
    stage.run(KILL_SECONDS - 0.2)
    assert "kill" not in stage.actions
    stage.run(0.4)
    assert stage.actions[-1] == "kill"


def test_a_throttled_process_is_not_stuck(stage: Stage) -> None:
    """As cpulimit does, ten times a second."""
    for _ in range(50):
        stage.child.stopped = True
        stage.watch.stopped_or_continued()
        stage.run(0.05)
        stage.child.stopped = False
        stage.watch.stopped_or_continued()
        stage.run(0.05)
    assert set(stage.actions) == {"ping"}


def test_an_idle_process_that_is_only_slow_gets_ten_seconds(stage: Stage) -> None:
    stage.watch.probe()
    stage.switches = WAITING_SWITCHES - 1
    stage.run(LONGEST_SECONDS - 0.5)
    assert "kill" not in stage.actions
    stage.run(1)
    assert stage.actions[-1] == "kill"


def test_a_process_is_not_killed_while_a_job_runs(stage: Stage) -> None:
    stage.begin_job()
    stage.child.stopped = True
    stage.watch.stopped_or_continued()
    stage.run(600)
    assert stage.actions == ["ping", "unresponsive"], "no successor either: its workers have no unread jobs"
    stage.end_job()
    stage.run(2)
    assert stage.actions[-1] == "kill"


def test_a_process_that_runs_a_job_and_has_unread_ones_is_replaced_once(stage: Stage) -> None:
    stage.begin_job()
    stage.watch.probe(unread=True)
    stage.run(30)
    assert stage.actions == ["ping", "unresponsive", "replace"]


def test_a_continued_process_is_responsive_after_its_answer(stage: Stage) -> None:
    stage.child.stopped = True
    stage.watch.stopped_or_continued()
    stage.run(0.5)
    stage.child.stopped = False
    stage.watch.stopped_or_continued()
    assert stage.watch.unresponsive
    stage.beat()
    stage.run(0.2)
    assert not stage.watch.unresponsive
    assert "kill" not in stage.actions


def test_time_in_which_the_supervisor_did_not_run_is_not_counted(stage: Stage) -> None:
    stage.watch.probe()
    stage.switches = WAITING_SWITCHES
    stage.now += 100 * LATE_SECONDS
    stage.run(0.05)
    assert not stage.watch.unresponsive
    stage.run(KILL_SECONDS + 0.2)
    assert stage.actions[-1] == "kill"


def test_a_dead_process_is_not_probed(stage: Stage) -> None:
    stage.child.ended = True
    stage.watch.probe(unread=True)
    stage.run(60)
    assert stage.actions == []


def test_a_process_stopped_during_its_start_is_not_killed_when_it_continues(stage: Stage) -> None:
    for slot in stage.slots:
        slot.minder = 0
    stage.child.stopped = True
    stage.watch.stopped_or_continued()
    stage.run(0.5)
    stage.child.stopped = False
    stage.watch.stopped_or_continued()
    stage.run(60)
    assert "kill" not in stage.actions
    assert not stage.watch.unresponsive
