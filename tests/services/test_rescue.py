"""Which jobs pulse rescues and which it leaves alone, with a fake clock and a fake Redis."""

import heapq
import time
from collections.abc import Callable
from itertools import count

import pytest

from forq.broker.recovery import Position
from forq.errors import RedisUnavailable
from forq.procs.liveness import LATE_SECONDS
from forq.procs.scoreboard import TURN_SHIFT, Role, Scoreboard, Slot, State, pack_position
from forq.services.rescue import (
    ANSWER_SECONDS,
    BATCH_CHECK_SECONDS,
    CLAIM_SECONDS,
    QUIET_CHECKS,
    RECHECK_SECONDS,
    BatchRescue,
    UnreadClaims,
)

PROCESSOR = "p" * 16


class UnreadRig:
    """A scoreboard with two workers of one process, and pulse's timers."""

    def __init__(self) -> None:
        self.board = Scoreboard.create(4)
        self.now = 100.0
        self.processor = PROCESSOR
        self.turns: dict[str, int] = {}
        self.rescued: list[tuple[str, Position]] = []
        self.checks = 0
        # Slots probed because of unread claims, and slots of idle workers probed because jobs wait.
        self.probed_unread: list[list[int]] = []
        self.probed_idle: list[list[int]] = []
        self.down = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.unread = UnreadClaims(
            self,  # type: ignore[arg-type]
            self.board,
            later=self._later,
            probe=lambda slots, unread: (self.probed_unread if unread else self.probed_idle).append(slots),
            now=lambda: self.now,
        )
        self.workers = [self._worker(name) for name in ("one", "two")]

    def _worker(self, name: str) -> Slot:
        slot = self.board.slot(self.board.take())
        slot.worker, slot.queue, slot.pid = name + PROCESSOR, "q", 77
        slot.role, slot.state = Role.MAIN, State.IDLE
        read(slot, 5)
        return slot

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._order), call))

    def rescue(self, queue: str, at: Position, *, has_results: bool = False) -> int:
        if self.down:
            raise RedisUnavailable("down")
        self.rescued.append((queue, at))
        self.turns.pop(at.worker, None)
        return 1

    def registered(self, queue: str) -> dict[str, int]:
        self.checks += 1
        if self.down:
            raise RedisUnavailable("down")
        return dict(self.turns)

    def claimed(self, slot: Slot, turn: int) -> None:
        """The server gives the worker jobs and publishes the claim."""
        self.turns[slot.worker] = turn
        self.unread.on_claim("q", slot.worker, turn)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._timers and self._timers[0][0] <= until:
            due, _, call = heapq.heappop(self._timers)
            self.now = max(self.now, due)
            call()
        self.now = max(self.now, until)

    @property
    def rescued_workers(self) -> list[str]:
        return [at.worker.removesuffix(PROCESSOR) for _, at in self.rescued]


def read(slot: Slot, turn: int, *, index: int = 0, running: bool = False) -> None:
    slot.turn = turn
    slot.position = pack_position(0, turn, index, running)


@pytest.fixture
def rig() -> UnreadRig:
    return UnreadRig()


def test_a_worker_that_starts_in_time_is_not_probed(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.claimed(slot, 6)
    read(slot, 6, running=True)
    rig.run(10)
    assert (rig.probed_unread, rig.rescued_workers) == ([], [])
    assert rig.checks == 1, "one check for unpublished claims"


def test_a_worker_that_does_not_read_its_claim_is_probed_and_its_jobs_go_back(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.claimed(slot, 6)
    rig.run(CLAIM_SECONDS)
    assert rig.probed_unread == [[slot.number]]
    rig.run(ANSWER_SECONDS - 0.15)
    assert (slot.taken, rig.rescued_workers) == (0, [])
    rig.run(0.3)
    assert slot.taken == 6
    assert rig.rescued == [("q", Position(slot.worker, 6, 0, False))]


def test_a_process_that_answers_the_probe_keeps_its_jobs(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.claimed(slot, 6)
    rig.run(CLAIM_SECONDS + 0.2)
    for each in rig.workers:
        each.beat_ns = time.monotonic_ns()
    rig.run(1.5)
    assert (slot.taken, rig.rescued_workers) == (0, [])


def test_a_worker_that_starts_between_mark_and_check_keeps_its_jobs(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.claimed(slot, 6)
    while slot.taken == 0:
        rig.run(0.01)
    read(slot, 6, running=True)
    rig.run(10)
    assert rig.rescued_workers == []


def test_a_claim_marked_by_a_dead_pulse_is_rescued_by_the_next_pulse(rig: UnreadRig) -> None:
    """The process may run another job for hours, so nothing else would end it."""
    slot = rig.workers[0]
    slot.taken = 6
    rig.turns[slot.worker] = 6
    rig.unread.check("q")
    rig.run(2)
    assert rig.rescued_workers == ["one"]


def test_a_worker_that_has_read_its_claim_but_not_started_is_probed_if_it_holds_jobs(rig: UnreadRig) -> None:
    idle, stuck = rig.workers
    for slot in (idle, stuck):
        read(slot, 6)
        rig.turns[slot.worker] = 6
    stuck.held = 3
    rig.unread.check("q")
    rig.run(2)
    assert rig.rescued_workers == ["two"]


def test_a_worker_that_runs_a_job_or_is_between_two_is_not_probed(rig: UnreadRig) -> None:
    running, between = rig.workers
    read(running, 5, running=True)
    read(between, 6, index=2)
    between.held = 2
    rig.turns = {running.worker: 6, between.worker: 6}
    rig.unread.check("q")
    rig.run(2)
    assert (rig.probed_unread, rig.rescued_workers) == ([], [])


def test_unpublished_claims_are_found_by_a_later_check(rig: UnreadRig) -> None:
    first, second = rig.workers
    rig.claimed(first, 6)
    read(first, 6, running=True)
    rig.turns[second.worker] = 6
    rig.run(RECHECK_SECONDS + 1)
    assert rig.rescued_workers == ["two"]


def test_consecutive_claims_cost_one_check(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    for turn in range(6, 16):
        rig.claimed(slot, turn)
        read(slot, turn, running=True)
        rig.run(RECHECK_SECONDS - 0.2)
    rig.run(10)
    assert rig.checks == 1


def test_a_job_claimed_by_another_worker_of_a_stuck_process_is_rescued_without_another_wait(rig: UnreadRig) -> None:
    first, second = rig.workers
    rig.claimed(first, 6)
    rig.run(CLAIM_SECONDS + ANSWER_SECONDS + 0.2)
    assert rig.rescued_workers == ["one"]
    rig.turns[second.worker] = 6
    rig.unread.check("q")
    rig.run(0.25)
    assert rig.rescued_workers == ["one", "two"]


def test_time_during_which_pulse_did_not_run_does_not_count(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.claimed(slot, 6)
    rig.run(CLAIM_SECONDS)
    rig.now += 100 * LATE_SECONDS
    rig.run(0.15)
    assert slot.taken == 0
    rig.run(1)
    assert rig.rescued_workers == ["one"]


def test_a_pulse_that_hardly_runs_rescues_nothing(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.claimed(slot, 6)
    rig.run(CLAIM_SECONDS)
    for _ in range(20):
        rig.now += 2 * LATE_SECONDS
        rig.run(0)
    assert (slot.taken, rig.rescued_workers) == (0, [])


def test_rescued_jobs_that_go_to_the_same_process_again_are_found_at_once(rig: UnreadRig) -> None:
    first, second = rig.workers
    original = rig.rescue

    def give_to_the_second(queue: str, at: Position, *, has_results: bool = False) -> int:
        if at.worker == first.worker:
            rig.turns[second.worker] = 6
        return original(queue, at, has_results=has_results)

    rig.rescue = give_to_the_second  # type: ignore[method-assign]
    rig.claimed(first, 6)
    rig.run(RECHECK_SECONDS - 0.1)
    assert rig.rescued_workers == ["one", "two"]


def test_a_claim_of_another_supervisor_causes_no_check(rig: UnreadRig) -> None:
    rig.unread.on_claim("q", "one" + "x" * 16, 6)
    rig.run(10)
    assert rig.checks == 0


def test_a_check_is_retried_while_redis_is_down(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.claimed(slot, 6)
    rig.down = True
    rig.run(2)
    assert rig.rescued_workers == []
    rig.down = False
    rig.run(1)
    assert rig.rescued_workers == ["one"]


def test_workers_of_other_supervisors_and_of_dead_processes_are_skipped(rig: UnreadRig) -> None:
    slot = rig.workers[0]
    rig.unread.on_claim("q", "one" + "x" * 16, 6)
    rig.unread.on_claim("q", "three" + PROCESSOR, 6)
    slot.state = State.EMPTY
    rig.unread.suspect("q", {slot.worker: 6})
    rig.run(1)
    assert (rig.probed_unread, rig.rescued_workers) == ([], [])


def test_turn_numbers_are_compared_in_full(rig: UnreadRig) -> None:
    """The position holds only 20 bits of the number."""
    slot = rig.workers[0]
    read(slot, 5 + (1 << 20))
    assert slot.position >> TURN_SHIFT & 0xFFFFF == 5
    rig.claimed(slot, 6 + (1 << 20))
    rig.run(1)
    assert rig.rescued_workers == ["one"]


def test_idle_workers_are_probed_while_jobs_wait(rig: UnreadRig) -> None:
    idle, busy = rig.workers
    busy.state = State.BUSY
    rig.unread.probe_resting({("q", Role.MAIN)})
    assert rig.probed_idle == [[idle.number]]
    idle.state = State.PARKED
    rig.unread.probe_resting({("q", Role.RETRY), ("other", Role.MAIN)})
    assert rig.probed_idle == [[idle.number]], "only workers of that role and queue"
    rig.unread.probe_resting({("q", Role.MAIN)})
    assert rig.probed_idle == [[idle.number]] * 2
    assert (rig.probed_unread, rig.rescued_workers) == ([], [])


class Batches:
    """A BatchRescue, a worker that holds three jobs, and pulse's timers."""

    def __init__(self) -> None:
        self.board = Scoreboard.create(4)
        self.now = 100.0
        self.down = False
        self.with_results: list[bool] = []
        self.rescued: list[tuple[str, Position]] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.batches = BatchRescue(
            self,  # type: ignore[arg-type]
            self.board,
            later=lambda seconds, call: self._due.append((self.now + seconds, call)),
            now_ns=lambda: int(self.now * 1e9),
        )
        self.slot = self.board.slot(self.board.take())
        self.slot.worker, self.slot.queue, self.slot.held = "w", "q", 3
        self.begin(7, 0)

    def begin(self, turn: int, index: int, *, running: bool = True) -> None:
        """Marks a job of the worker as started now."""
        self.slot.turn = turn
        self.slot.position = pack_position(int(self.now * 1e9), turn, index, running)

    def rescue(self, queue: str, at: Position, *, has_results: bool = False) -> int:
        if self.down:
            raise RedisUnavailable("down")
        self.rescued.append((queue, at))
        self.with_results.append(has_results)
        return at.index + 1

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self._due if timer[0] <= until]:
            timer = min(due, key=lambda timer: timer[0])
            self._due.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()
        self.now = until

    @property
    def polling(self) -> bool:
        return any(at <= self.now + BATCH_CHECK_SECONDS for at, _ in self._due)


@pytest.fixture
def batches() -> Batches:
    found = Batches()
    found.batches.start()
    return found


def test_jobs_behind_a_slow_job_are_rescued_once_per_slow_job(batches: Batches) -> None:
    batches.run(0.5)
    assert batches.rescued == [("q", Position("w", 7, 0, True))]
    batches.begin(7, 1)
    batches.run(0.5)
    assert batches.rescued[1:] == [("q", Position("w", 7, 1, True))]


def test_a_rescue_says_whether_the_worker_has_results(batches: Batches) -> None:
    batches.run(0.5)
    batches.begin(7, 1)
    batches.slot.has_results = True
    batches.run(0.5)
    assert batches.with_results == [False, True]


def test_fast_jobs_are_left_alone(batches: Batches) -> None:
    for index in range(50):
        batches.begin(7, index)
        batches.run(0.019)
    assert batches.rescued == []


@pytest.mark.parametrize("held", [0, 1])
def test_a_worker_without_further_jobs_has_nothing_to_rescue(batches: Batches, held: int) -> None:
    batches.slot.held = held
    batches.run(0.5)
    assert batches.rescued == []


def test_a_worker_between_two_jobs_is_left_alone(batches: Batches) -> None:
    batches.begin(7, 1, running=False)
    batches.run(0.5)
    assert batches.rescued == []


def test_a_failed_rescue_is_retried_and_logged_once(batches: Batches, caplog: pytest.LogCaptureFixture) -> None:
    batches.down = True
    batches.run(0.5)
    assert caplog.messages == ["rescue failed; retrying queue=q error=down"]
    batches.down = False
    batches.run(BATCH_CHECK_SECONDS)
    assert batches.rescued == [("q", Position("w", 7, 0, True))]
    batches.down = True
    batches.begin(7, 1)
    batches.run(0.5)
    assert caplog.messages[-1] == "rescue failed; retrying queue=q error=down"


def test_the_scoreboard_is_polled_only_while_there_are_batches(batches: Batches) -> None:
    batches.slot.held = 1
    batches.run((QUIET_CHECKS - 2) * BATCH_CHECK_SECONDS)
    assert (batches.board.watching, batches.polling) == (1, True)
    batches.run(4 * BATCH_CHECK_SECONDS)
    assert (batches.board.watching, batches.polling) == (0, False)
    batches.slot.held = 3
    batches.begin(8, 0)
    batches.batches.wake()
    assert batches.board.watching == 1
    batches.run(0.1)
    assert batches.rescued == [("q", Position("w", 8, 0, True))]


def test_polling_continues_while_there_are_batches(batches: Batches) -> None:
    for index in range(2 * QUIET_CHECKS):
        batches.begin(7, index)
        batches.run(BATCH_CHECK_SECONDS)
    assert (batches.board.watching, batches.polling) == (1, True)


def test_a_worker_that_wakes_a_polling_pulse_starts_no_second_poll(batches: Batches) -> None:
    batches.batches.wake()
    assert len(batches._due) == 1


def test_a_batch_started_right_before_the_flag_is_cleared_is_not_missed(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker saw the flag set, so it did not wake pulse."""
    batches.slot.held = 1
    original = type(batches.board).watching.fset  # type: ignore[attr-defined]

    def lower(board: Scoreboard, value: int) -> None:
        if not value:
            batches.slot.held = 3
        original(board, value)

    monkeypatch.setattr(Scoreboard, "watching", property(Scoreboard.watching.fget, lower))  # type: ignore[attr-defined]
    batches.run(QUIET_CHECKS * BATCH_CHECK_SECONDS + 0.1)
    assert (batches.board.watching, batches.polling) == (1, True)
    assert batches.rescued == [("q", Position("w", 7, 0, True))]


def test_a_flag_left_set_by_a_dead_pulse_does_not_stop_polling() -> None:
    batches = Batches()
    batches.board.watching = 1
    batches.batches.start()
    batches.run(0.1)
    assert batches.rescued == [("q", Position("w", 7, 0, True))]
