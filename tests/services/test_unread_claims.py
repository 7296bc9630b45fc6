"""Whose jobs pulse gives back, and whose it leaves alone: with a clock and a recovery of the test's own."""

import heapq
import time
from collections.abc import Callable
from itertools import count

import pytest

from forq.broker.recovery import Position
from forq.errors import RedisUnavailable
from forq.procs.liveness import LATE_SECONDS
from forq.procs.scoreboard import TURN_SHIFT, Role, Scoreboard, Slot, State, pack_position
from forq.services.rescue import ANSWER_SECONDS, CLAIM_SECONDS, RECHECK_SECONDS, UnreadClaims

PROCESSOR = "p" * 16


class Stage:
    """A scoreboard with two workers of one process, and pulse's timers."""

    def __init__(self) -> None:
        self.board = Scoreboard.create(4)
        self.now = 100.0
        self.processor = PROCESSOR
        self.turns: dict[str, int] = {}
        self.rescued: list[tuple[str, Position]] = []
        self.looks = 0
        # Of workers that have something they do not begin, and of those that rest while jobs wait.
        self.challenged: list[list[int]] = []
        self.asked: list[list[int]] = []
        self.away = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.unread = UnreadClaims(
            self,  # type: ignore[arg-type]
            self.board,
            later=self._later,
            probe=lambda slots, unread: (self.challenged if unread else self.asked).append(slots),
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

    def rescue(self, queue: str, at: Position) -> int:
        if self.away:
            raise RedisUnavailable("away")
        self.rescued.append((queue, at))
        self.turns.pop(at.worker, None)
        return 1

    def registered(self, queue: str) -> dict[str, int]:
        self.looks += 1
        if self.away:
            raise RedisUnavailable("away")
        return dict(self.turns)

    def claimed(self, slot: Slot, turn: int) -> None:
        """The server has given it jobs, and tells of that."""
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
    def given_back(self) -> list[str]:
        return [at.worker.removesuffix(PROCESSOR) for _, at in self.rescued]


def read(slot: Slot, turn: int, *, index: int = 0, running: bool = False) -> None:
    slot.turn = turn
    slot.position = pack_position(0, turn, index, running)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_worker_that_begins_in_time_is_not_even_asked(stage: Stage) -> None:
    slot = stage.workers[0]
    stage.claimed(slot, 6)
    read(slot, 6, running=True)
    stage.run(10)
    assert (stage.challenged, stage.given_back) == ([], [])
    assert stage.looks == 1, "for what was not told of, once"


def test_a_worker_that_does_not_read_is_asked_and_what_it_was_given_goes_back(stage: Stage) -> None:
    slot = stage.workers[0]
    stage.claimed(slot, 6)
    stage.run(CLAIM_SECONDS)
    assert stage.challenged == [[slot.number]]
    stage.run(ANSWER_SECONDS - 0.15)
    assert (slot.taken, stage.given_back) == (0, [])
    stage.run(0.3)
    assert slot.taken == 6
    assert stage.rescued == [("q", Position(slot.worker, 6, 0, False))]


def test_a_process_that_answers_keeps_what_it_was_given(stage: Stage) -> None:
    slot = stage.workers[0]
    stage.claimed(slot, 6)
    stage.run(CLAIM_SECONDS + 0.2)
    for each in stage.workers:
        each.beat_ns = time.monotonic_ns()
    stage.run(1.5)
    assert (slot.taken, stage.given_back) == (0, [])


def test_a_worker_that_begins_after_the_mark_and_before_the_look_keeps_its_jobs(stage: Stage) -> None:
    slot = stage.workers[0]
    stage.claimed(slot, 6)
    while slot.taken == 0:
        stage.run(0.01)
    read(slot, 6, running=True)
    stage.run(10)
    assert stage.given_back == []


def test_what_a_pulse_has_marked_before_it_died_is_given_back_by_the_next_one(stage: Stage) -> None:
    """Its process may run another job for hours, so that nobody ends it meanwhile."""
    slot = stage.workers[0]
    slot.taken = 6
    stage.turns[slot.worker] = 6
    stage.unread.check("q")
    stage.run(2)
    assert stage.given_back == ["one"]


def test_a_worker_that_has_read_and_not_begun_lags_if_it_holds_something(stage: Stage) -> None:
    idle, stuck = stage.workers
    for slot in (idle, stuck):
        read(slot, 6)
        stage.turns[slot.worker] = 6
    stuck.held = 3
    stage.unread.check("q")
    stage.run(2)
    assert stage.given_back == ["two"]


def test_a_worker_that_runs_a_job_or_is_between_two_does_not_lag(stage: Stage) -> None:
    running, between = stage.workers
    read(running, 5, running=True)
    read(between, 6, index=2)
    between.held = 2
    stage.turns = {running.worker: 6, between.worker: 6}
    stage.unread.check("q")
    stage.run(2)
    assert (stage.challenged, stage.given_back) == ([], [])


def test_claims_that_were_not_told_of_are_found_by_a_later_look(stage: Stage) -> None:
    first, second = stage.workers
    stage.claimed(first, 6)
    read(first, 6, running=True)
    stage.turns[second.worker] = 6
    stage.run(RECHECK_SECONDS + 1)
    assert stage.given_back == ["two"]


def test_claims_that_follow_each_other_cost_one_look(stage: Stage) -> None:
    slot = stage.workers[0]
    for turn in range(6, 16):
        stage.claimed(slot, turn)
        read(slot, turn, running=True)
        stage.run(RECHECK_SECONDS - 0.2)
    stage.run(10)
    assert stage.looks == 1


def test_a_job_that_the_next_worker_of_the_same_process_gets_goes_back_without_another_wait(stage: Stage) -> None:
    first, second = stage.workers
    stage.claimed(first, 6)
    stage.run(CLAIM_SECONDS + ANSWER_SECONDS + 0.2)
    assert stage.given_back == ["one"]
    stage.turns[second.worker] = 6
    stage.unread.check("q")
    stage.run(0.25)
    assert stage.given_back == ["one", "two"]


def test_time_in_which_pulse_did_not_run_does_not_count(stage: Stage) -> None:
    slot = stage.workers[0]
    stage.claimed(slot, 6)
    stage.run(CLAIM_SECONDS)
    stage.now += 100 * LATE_SECONDS
    stage.run(0.15)
    assert slot.taken == 0
    stage.run(1)
    assert stage.given_back == ["one"]


def test_while_redis_is_away_it_is_tried_again(stage: Stage) -> None:
    slot = stage.workers[0]
    stage.claimed(slot, 6)
    stage.away = True
    stage.run(2)
    assert stage.given_back == []
    stage.away = False
    stage.run(1)
    assert stage.given_back == ["one"]


def test_workers_of_others_and_of_the_past_are_passed_over(stage: Stage) -> None:
    slot = stage.workers[0]
    stage.unread.on_claim("q", "one" + "x" * 16, 6)
    stage.unread.on_claim("q", "three" + PROCESSOR, 6)
    slot.state = State.EMPTY
    stage.unread.suspect("q", {slot.worker: 6})
    stage.run(1)
    assert (stage.challenged, stage.given_back) == ([], [])


def test_the_number_of_a_turn_is_compared_whole(stage: Stage) -> None:
    """Not by the 20 bits of it that the position has."""
    slot = stage.workers[0]
    read(slot, 5 + (1 << 20))
    assert slot.position >> TURN_SHIFT & 0xFFFFF == 5
    stage.claimed(slot, 6 + (1 << 20))
    stage.run(1)
    assert stage.given_back == ["one"]


def test_workers_that_rest_while_jobs_wait_are_asked_for_a_sign_of_life(stage: Stage) -> None:
    idle, busy = stage.workers
    busy.state = State.BUSY
    stage.unread.probe_resting({("q", Role.MAIN)})
    assert stage.asked == [[idle.number]]
    idle.state = State.PARKED
    stage.unread.probe_resting({("q", Role.RETRY), ("other", Role.MAIN)})
    assert stage.asked == [[idle.number]], "of that role and queue only"
    stage.unread.probe_resting({("q", Role.MAIN)})
    assert stage.asked == [[idle.number]] * 2
    assert (stage.challenged, stage.given_back) == ([], [])
