"""One process of a queue, with a fake child: its messages, condemned jobs, and the recovery after its end."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from forq.errors import ExitCode, InvalidData
from forq.procs.scoreboard import Role, Scoreboard, State, pack_position
from forq.queue_spec import QueueSpec
from forq.settings import defaults
from forq.supervisor import process as process_module
from forq.supervisor.child import Exit
from forq.supervisor.process import BEAT_SECONDS, BLOCKED_NS, EXIT_SECONDS, Member, ProcessDeps, QueueProcess
from tests.supervisor.fakes import CRASHED, FakeLoop, fake_child_class


class Stage:
    """The supervisor of a process: recoveries are recorded, and `finish` gives a slot back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = FakeLoop()
        self.children = fake_child_class(self.loop)
        monkeypatch.setattr(process_module, "Child", self.children)
        self.board = Scoreboard.create(8)
        self.recoveries: list[tuple[dict[str, Any], Callable[[], None]]] = []
        self.owner = MagicMock()
        self.deps: Any = ProcessDeps(
            children=SimpleNamespace(loop=self.loop),  # type: ignore[arg-type]
            scoreboard=self.board,
            grants=MagicMock(),
            admission=MagicMock(),
            child_main=MagicMock(),
            recover=lambda params, finish: self.recoveries.append((params, finish)),
            queue_gone=MagicMock(),
            heartbeat=MagicMock(),
            changed=lambda: None,
            processor=lambda: "p",
            check_unread=MagicMock(),
            warden=MagicMock(),
        )

    def start(self, concurrency: int = 1) -> QueueProcess:
        options = {**defaults("work"), "concurrency": concurrency}
        spec = QueueSpec("q", "work", None, {}, (), {})
        process = QueueProcess(spec, options, Member(Role.MAIN), self.deps, self.owner)
        for number in process.slots:
            self.board.slot(number).worker = f"w{number}"
        return process

    def begin_job(self, number: int, job: str = "job") -> int:
        slot = self.board.slot(number)
        slot.started_ns = 1 + number
        slot.job = job.encode()
        slot.position = pack_position(slot.started_ns, 1, 0, True)
        slot.state = State.BUSY
        return slot.position

    def end_job(self, number: int) -> None:
        slot = self.board.slot(number)
        slot.position = pack_position(slot.started_ns, 1, 1, False)

    def outcomes(self) -> list[tuple[str, str]]:
        return [(params["outcome"], params["cause"]) for params, _ in self.recoveries]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_slot_is_reused_only_after_its_recovery(stage: Stage) -> None:
    process = stage.start(concurrency=2)
    process.recover(CRASHED)
    assert sorted(stage.board._taken) == list(process.slots)
    for _, finish in stage.recoveries:
        finish()
    assert sorted(stage.board._taken) == []


def test_the_slot_of_a_worker_that_never_registered_is_given_back_at_once(stage: Stage) -> None:
    process = stage.start()
    stage.board.slot(process.slots[0]).worker = ""
    process.recover(CRASHED)
    assert (stage.recoveries, sorted(stage.board._taken)) == ([], [])


def test_a_slot_under_recovery_does_not_look_like_a_live_worker(stage: Stage) -> None:
    process = stage.start()
    stage.begin_job(process.slots[0])
    process.recover(CRASHED)
    slot = stage.board.slot(process.slots[0])
    assert (slot.state, slot.pid) == (State.EMPTY, 0)


def test_the_only_running_job_of_a_crash_is_stalled_and_several_are_suspects(stage: Stage) -> None:
    alone = stage.start(concurrency=2)
    stage.begin_job(alone.slots[0])
    alone.recover(CRASHED)
    assert stage.outcomes()[0][0] == "stalled"
    stage.recoveries.clear()
    together = stage.start(concurrency=2)
    for number in together.slots:
        stage.begin_job(number)
    together.recover(CRASHED)
    assert [outcome for outcome, _ in stage.outcomes()] == ["suspect", "suspect"]


def test_jobs_are_recovered_in_the_order_of_their_starts(stage: Stage) -> None:
    process = stage.start(concurrency=2)
    first, second = process.slots
    for number in (second, first):
        stage.begin_job(number)
    stage.board.slot(first).started_ns, stage.board.slot(second).started_ns = 20, 10
    process.recover(CRASHED)
    assert [params["worker"] for params, _ in stage.recoveries] == [f"w{second}", f"w{first}"]


def test_a_condemned_job_that_ends_in_time_does_not_kill_its_process(stage: Stage) -> None:
    process = stage.start()
    position = stage.begin_job(process.slots[0])
    process.condemn(stage.board.slot(process.slots[0]), position, "timed_out", "timeout")
    stage.end_job(process.slots[0])
    stage.loop.run(0.01)
    assert stage.children.made[0].kills == 0
    assert not process.was_condemned


def begin_coroutine(stage: Stage, number: int) -> int:
    position = stage.begin_job(number)
    stage.board.slot(number).lenience_ms = 1000
    return position


def test_a_coroutine_that_a_user_kills_is_cancelled_and_condemned_only_a_second_later(stage: Stage) -> None:
    process = stage.start(concurrency=2)
    number = process.slots[0]
    slot, position = stage.board.slot(number), begin_coroutine(stage, number)
    process.kill_job(slot, position, "cancelled", "killed")
    child = stage.children.made[0]
    assert child.sent == [{"cancel": number, "position": position, "outcome": "cancelled", "cause": "killed"}]
    stage.loop.run(0.9)
    assert not process.was_condemned
    stage.loop.run(0.2)
    assert process.was_condemned
    stage.loop.run(0.01)
    process.recover(CRASHED)
    assert ("cancelled", "killed") in stage.outcomes()


@pytest.mark.parametrize("settling", [False, True])
def test_a_killed_coroutine_that_ends_in_time_leaves_its_process_alone(stage: Stage, settling: bool) -> None:
    process = stage.start()
    number = process.slots[0]
    slot, position = stage.board.slot(number), begin_coroutine(stage, number)
    process.kill_job(slot, position, "interrupted", "killed")
    if settling:
        slot.state = State.SETTLING
    else:
        stage.end_job(number)
    stage.loop.run(5)
    assert (stage.children.made[0].kills, process.was_condemned) == (0, False)
    process.recover(CRASHED)
    assert (stage.outcomes() == [("interrupted", "killed")]) == settling


def test_only_the_job_that_blocks_the_event_loop_is_counted(stage: Stage) -> None:
    process = stage.start(concurrency=4)
    overdue, blocker, other, _ = (stage.board.slot(number) for number in process.slots)
    positions = [begin_coroutine(stage, slot.number) for slot in (overdue, blocker, other)]
    blocker.step_ns = time.monotonic_ns() - BLOCKED_NS - 1
    process._overdue(overdue, positions[0])
    process.recover(CRASHED)
    assert [outcome for outcome, _ in stage.outcomes()[1:]] == ["interrupted", "timed_out", "interrupted"]


def test_a_loop_that_runs_another_job_for_a_moment_is_not_blocked(stage: Stage) -> None:
    process = stage.start(concurrency=2)
    overdue, other = (stage.board.slot(number) for number in process.slots)
    positions = [begin_coroutine(stage, slot.number) for slot in (overdue, other)]
    other.step_ns = time.monotonic_ns()
    process._overdue(overdue, positions[0])
    process.recover(CRASHED)
    assert [outcome for outcome, _ in stage.outcomes()] == ["timed_out", "suspect"]


def test_coroutines_are_cancelled_at_the_end_of_the_grace_period(stage: Stage) -> None:
    process = stage.start()
    child = stage.children.made[0]
    stage.begin_job(process.slots[0])
    child.options["on_grace_end"]()
    assert child.sent == []
    begin_coroutine(stage, process.slots[0])
    child.options["on_grace_end"]()
    assert child.sent == [{"cancel": None}]


def test_a_condemned_job_alone_in_its_process_kills_it(stage: Stage) -> None:
    process = stage.start()
    position = stage.begin_job(process.slots[0])
    process.condemn(stage.board.slot(process.slots[0]), position, "timed_out", "timeout")
    stage.loop.run(0.01)
    assert stage.children.made[0].kills == 1
    process.recover(CRASHED)
    assert stage.outcomes() == [("timed_out", "timeout")]


def test_a_process_with_other_jobs_is_replaced_and_killed_when_they_have_left(stage: Stage) -> None:
    process = stage.start(concurrency=2)
    condemned, other = process.slots
    position = stage.begin_job(condemned)
    stage.begin_job(other)
    process.condemn(stage.board.slot(condemned), position, "timed_out", "timeout")
    for number in process.slots:
        stage.board.slot(number).beat_ns = 2**62
    stage.loop.run(2 * BEAT_SECONDS)
    stage.owner.replace_process.assert_called_once_with(process, "timeout")
    assert stage.children.made[0].kills == 0
    stage.children.made[0].receive(left=other)
    assert stage.children.made[0].kills == 1


def test_a_process_whose_minder_does_not_beat_is_killed_with_its_other_jobs(stage: Stage) -> None:
    process = stage.start(concurrency=2)
    position = stage.begin_job(process.slots[0])
    stage.begin_job(process.slots[1])
    process.condemn(stage.board.slot(process.slots[0]), position, "timed_out", "timeout")
    stage.loop.run(2 * BEAT_SECONDS)
    assert stage.children.made[0].kills == 1


@pytest.mark.parametrize(
    ("first", "second", "recorded"),
    [
        (("timed_out", "timeout"), ("cancelled", "killed"), ("cancelled", "killed")),
        (("cancelled", "killed"), ("timed_out", "timeout"), ("cancelled", "killed")),
    ],
)
def test_a_kill_by_a_user_overrides_a_timeout_in_either_order(
    stage: Stage, first: tuple[str, str], second: tuple[str, str], recorded: tuple[str, str]
) -> None:
    process = stage.start()
    position = stage.begin_job(process.slots[0])
    for outcome, cause in (first, second):
        process.condemn(stage.board.slot(process.slots[0]), position, outcome, cause)
    process.recover(CRASHED)
    assert stage.outcomes() == [recorded]


def test_an_announced_exit_code_counts_only_while_no_job_runs(stage: Stage) -> None:
    process = stage.start()
    end = Exit(ExitCode.CONFIG, None)
    assert process.announced_code(end) is None, "not announced"
    stage.children.made[0].receive(exiting=ExitCode.CONFIG, reason="no module")
    assert process.announced_code(end) == ExitCode.CONFIG
    assert process.announced_code(Exit(1, None)) is None, "another code"
    stage.begin_job(process.slots[0])
    assert process.announced_code(end) is None


@pytest.mark.parametrize(
    "message",
    [{"want": 7, "units": 1, "priority": 0}, {"left": 7}, {"unknown": 1}, {"exiting": 300, "reason": ""}],
)
def test_unknown_messages_are_invalid(stage: Stage, message: dict[str, Any]) -> None:
    stage.start()
    with pytest.raises(InvalidData):
        stage.children.made[0].receive(**message)


def test_units_out_of_range_are_invalid_because_all_queues_share_them(stage: Stage) -> None:
    process = stage.start()
    with pytest.raises(InvalidData):
        stage.children.made[0].receive(want=process.slots[0], units=-1, priority=0)
    stage.deps.grants.handle.assert_not_called()


def test_a_fork_that_fails_gives_all_slots_back(stage: Stage) -> None:
    stage.children.refused.append(OSError("no more processes"))
    with pytest.raises(OSError, match="no more processes"):
        stage.start(concurrency=3)
    assert sorted(stage.board._taken) == []


def test_a_process_whose_workers_have_all_left_must_exit_in_time(stage: Stage) -> None:
    process = stage.start(concurrency=2)
    for number in process.slots:
        stage.children.made[0].receive(left=number)
    stage.loop.run(EXIT_SECONDS - 0.1)
    assert stage.children.made[0].kills == 0
    stage.loop.run(0.2)
    assert stage.children.made[0].kills == 1


def test_units_of_a_dead_process_are_free_before_its_owner_starts_another(stage: Stage) -> None:
    process = stage.start()
    calls: list[str] = []
    stage.deps.grants.remove.side_effect = lambda process: calls.append("grants")
    stage.deps.admission.finished.side_effect = lambda process: calls.append("admission")
    stage.owner.process_ended.side_effect = lambda process, end: calls.append("owner")
    stage.children.made[0].die()
    assert sorted(calls[:-1]) == ["admission", "grants"]
    assert calls[-1] == "owner"
    stage.deps.warden.remove.assert_called_once_with(process)
