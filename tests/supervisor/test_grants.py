"""The messages between workers and the capacity, with a fake clock."""

from typing import Any

import pytest

from forq.procs.scoreboard import Scoreboard, State
from forq.supervisor.capacity import PATIENCE_SECONDS, SLICE_SECONDS, Grants
from tests.supervisor.fakes import FakeLoop


class Process:
    def __init__(self, name: str, *slots: int) -> None:
        self.name = name
        self.slots = slots
        self.sent: list[dict[str, Any]] = []

    @property
    def main_of(self) -> str | None:
        return self.name.split()[0]

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class Stage:
    """Two processes with a worker each, and 10 units."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.board = Scoreboard.create(4)
        self.first, self.second = Process("a main", self.board.take()), Process("b main", self.board.take())
        self.grants = Grants(self.loop, self.board, 10, 100.0)  # type: ignore[arg-type]
        for process in (self.first, self.second):
            self.grants.add(process)

    def want(self, process: Process, units: int = 10, priority: int = 0) -> None:
        self.grants.handle({"want": process.slots[0], "units": units, "priority": priority})

    def busy(self, process: Process) -> None:
        self.board.slot(process.slots[0]).state = State.BUSY


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_each_answer_goes_to_the_process_of_its_worker(stage: Stage) -> None:
    stage.want(stage.first)
    stage.want(stage.second)
    assert stage.first.sent == [{"go": stage.first.slots[0]}]
    assert stage.second.sent == [{"wait": stage.second.slots[0]}]
    stage.grants.handle({"done": stage.first.slots[0]})
    assert stage.second.sent[1:] == [{"go": stage.second.slots[0]}]


def test_units_of_a_dead_process_go_to_the_next_waiter_at_once(stage: Stage) -> None:
    stage.want(stage.first)
    stage.want(stage.second)
    stage.grants.remove(stage.first)
    assert stage.second.sent[-1] == {"go": stage.second.slots[0]}
    assert stage.first.sent == [{"go": stage.first.slots[0]}], "a dead process gets no message"


def test_a_process_that_dies_while_it_waits_is_granted_nothing_later(stage: Stage) -> None:
    stage.want(stage.first)
    stage.want(stage.second)
    stage.grants.remove(stage.second)
    stage.grants.handle({"done": stage.first.slots[0]})
    assert stage.second.sent == [{"wait": stage.second.slots[0]}]
    assert stage.grants.describe()["free"] == 10


def test_an_idle_holder_must_yield_after_its_slice_without_a_new_message(stage: Stage) -> None:
    stage.want(stage.first)
    stage.want(stage.second)
    stage.loop.run(SLICE_SECONDS + 0.1)
    assert stage.first.sent[1:] == [{"yield": stage.first.slots[0]}], "a timer found it"
    stage.loop.run(10 * PATIENCE_SECONDS)
    assert len(stage.first.sent) == 2, "requested only once"


def test_busy_holders_count_as_in_use_and_idle_ones_as_unused(stage: Stage) -> None:
    stage.want(stage.first, 4)
    stage.want(stage.second, 3)
    stage.busy(stage.first)
    assert stage.grants.unused_units() == 6
    described = stage.grants.describe()
    assert [(held["worker"], held["in_use"]) for held in described["held"]] == [("a main", True), ("b main", False)]
    assert (described["in_use"], described["free"]) == (4, 3)


def test_waiting_time_is_reported_per_process(stage: Stage) -> None:
    stage.want(stage.first)
    stage.busy(stage.first)
    stage.want(stage.second)
    stage.loop.run(2.0)
    assert stage.grants.waiting_seconds("b") == pytest.approx(2.0)
    assert stage.grants.waiting_seconds("a") is None
