"""Deadlines read from the scoreboard, with a fake clock."""

import pytest

from forq.procs.loop import Loop
from forq.procs.scoreboard import Scoreboard, Slot, State, pack_position
from forq.supervisor.deadlines import Deadlines

MS = 1_000_000


class Rig:
    def __init__(self, workers: int = 1) -> None:
        self.now_ns = 10**15
        self.loop = Loop(now=lambda: self.now_ns / 1e9)
        self.board = Scoreboard.create(workers)
        self.slots = [self.board.slot(self.board.take()) for _ in range(workers)]
        self.overdue: list[tuple[int, int]] = []
        self.deadlines = Deadlines(
            self.loop, self.slots, lambda slot, word: self.overdue.append((slot.number, word)), lambda: self.now_ns
        )

    def begin(self, slot: Slot, turn: int = 1, timeout_ms: int = 100) -> int:
        """Starts a job as a worker does; returns its position."""
        slot.state = State.BUSY
        slot.timeout_ms = timeout_ms
        word = pack_position(self.now_ns, turn, 0, True)
        slot.position = word
        slot.started_ns = self.now_ns
        if not slot.guarded:
            self.deadlines.guard(slot.number)
        return word

    def end(self, slot: Slot, state: State = State.BUSY) -> None:
        slot.position &= ~1
        slot.state = state

    def pass_ms(self, ms: float) -> None:
        """Advances the clock in small steps, each with a tick of the loop."""
        end = self.now_ns + int(ms * MS)
        while self.now_ns < end:
            self.now_ns = min(end, self.now_ns + MS)
            self.loop.tick(0)

    def timers(self) -> int:
        return sum(not timer.cancelled for _, _, timer in self.loop._timers)


@pytest.mark.spec("Q14")
def test_a_job_past_its_deadline_is_reported_once_and_on_time() -> None:
    rig = Rig()
    word = rig.begin(rig.slots[0])
    rig.pass_ms(99)
    assert rig.overdue == []
    rig.pass_ms(2)
    assert rig.overdue == [(0, word)]
    rig.pass_ms(1000)
    assert rig.overdue == [(0, word)]


@pytest.mark.spec("Q14")
def test_a_job_that_ends_in_time_clears_its_deadline_and_the_next_one_has_its_own() -> None:
    rig = Rig()
    rig.begin(rig.slots[0], turn=1)
    rig.pass_ms(90)
    rig.end(rig.slots[0])
    word = rig.begin(rig.slots[0], turn=2)
    rig.pass_ms(99)
    assert rig.overdue == []
    rig.pass_ms(2)
    assert rig.overdue == [(0, word)]


def test_an_idle_process_has_no_timer_and_its_worker_is_unguarded() -> None:
    rig = Rig()
    rig.begin(rig.slots[0])
    rig.end(rig.slots[0], State.IDLE)
    rig.pass_ms(101)
    assert (rig.timers(), rig.slots[0].guarded) == (0, 0)
    word = rig.begin(rig.slots[0], turn=2)
    rig.pass_ms(101)
    assert rig.overdue == [(0, word)]


def test_a_worker_between_two_jobs_stays_guarded() -> None:
    rig = Rig()
    rig.begin(rig.slots[0])
    rig.end(rig.slots[0])
    rig.pass_ms(250)
    assert (rig.timers(), rig.slots[0].guarded) == (1, rig.now_ns + 50 * MS)


def test_a_job_without_a_start_time_yet_is_not_confused_with_the_previous_one() -> None:
    """The position is written first: for a moment the slot still has the start time of the previous job."""
    rig = Rig()
    slot = rig.slots[0]
    rig.begin(slot)
    rig.pass_ms(99)
    slot.position = pack_position(rig.now_ns, 2, 0, True)
    rig.pass_ms(20)
    assert rig.overdue == []
    slot.started_ns = rig.now_ns - 20 * MS
    rig.pass_ms(79)
    assert rig.overdue == []
    rig.pass_ms(3)
    assert len(rig.overdue) == 1


def test_a_worker_gets_extra_time_to_cancel_its_coroutine() -> None:
    rig = Rig()
    rig.begin(rig.slots[0])
    rig.slots[0].lenience_ms = 50
    rig.pass_ms(149)
    assert rig.overdue == []
    rig.pass_ms(2)
    assert len(rig.overdue) == 1


def test_each_of_several_workers_has_its_own_deadline() -> None:
    rig = Rig(workers=2)
    first = rig.begin(rig.slots[0], timeout_ms=300)
    second = rig.begin(rig.slots[1], timeout_ms=100)
    rig.pass_ms(101)
    assert rig.overdue == [(1, second)]
    rig.pass_ms(200)
    assert rig.overdue == [(1, second), (0, first)]


def test_without_a_timeout_nothing_is_overdue() -> None:
    rig = Rig()
    rig.begin(rig.slots[0])
    rig.slots[0].timeout_ms = 0
    rig.pass_ms(500)
    assert (rig.overdue, rig.timers(), rig.slots[0].guarded) == ([], 0, 0)


def test_a_process_that_ended_is_no_longer_checked() -> None:
    rig = Rig()
    rig.begin(rig.slots[0])
    rig.deadlines.stop()
    rig.pass_ms(500)
    assert rig.overdue == []


@pytest.mark.spec("Q14")
def test_a_job_that_ends_just_after_its_deadline_leaves_the_next_one_its_own() -> None:
    rig = Rig()
    first = rig.begin(rig.slots[0], turn=1)
    rig.pass_ms(105)
    assert rig.overdue == [(0, first)]
    rig.end(rig.slots[0])
    second = rig.begin(rig.slots[0], turn=2)
    rig.pass_ms(99)
    assert rig.overdue == [(0, first)]
    rig.pass_ms(102)
    assert rig.overdue == [(0, first), (0, second)]


def test_a_job_with_a_shorter_timeout_is_on_time_if_its_worker_finds_the_next_check_too_late() -> None:
    rig = Rig()
    slot = rig.slots[0]
    rig.begin(slot, timeout_ms=3_600_000)
    rig.pass_ms(10)
    assert slot.guarded == slot.started_ns + 3_600_000 * MS
    rig.end(slot)
    word = rig.begin(slot, turn=2, timeout_ms=100)
    assert rig.now_ns + 100 * MS < slot.guarded
    rig.deadlines.guard(slot.number)
    assert slot.guarded == rig.now_ns + 100 * MS
    rig.pass_ms(101)
    assert rig.overdue == [(0, word)]


class SwitchingSlot(Slot):
    """Its worker starts the next job, with another timeout, while the timeout is read."""

    switches = 0

    @property
    def timeout_ms(self) -> int:  # type: ignore[override]
        if self.switches:
            self.switches -= 1
            self.position = pack_position(NOW - MS, 5 + self.switches, 0, True)
            self.started_ns = NOW - MS
        return 10 if self.switches else 1000


NOW = 10**15


@pytest.mark.parametrize("switches", [1, 3, 100])
def test_the_start_of_one_job_is_never_combined_with_the_timeout_of_another(switches: int) -> None:
    board = Scoreboard.create(1)
    plain = board.slot(board.take())
    slot = SwitchingSlot(0, plain.bytes)
    slot.switches = 0
    overdue: list[int] = []
    loop = Loop(now=lambda: NOW / 1e9)
    deadlines = Deadlines(loop, [slot], lambda slot, word: overdue.append(word), lambda: NOW)
    slot.state = State.BUSY
    # Running for 100 ms of its 1000; the next job may take only 10.
    slot.position, slot.started_ns = pack_position(NOW - 100 * MS, 1, 0, True), NOW - 100 * MS
    slot.switches = switches
    deadlines.guard(0)
    loop.tick(0)
    assert overdue == []
    loop.close()
