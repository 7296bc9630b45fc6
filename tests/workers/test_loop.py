"""The loop of a worker against a scripted broker: what it claims, publishes and returns, step by step."""

from dataclasses import replace
from itertools import chain, count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from forq import App
from forq.broker.claim import Limits, Turn
from forq.errors import OutcomeUnknown
from forq.job_options import AttemptOptions
from forq.procs.scoreboard import POSITION, TAKEN, TICK_NS_SHIFT, TIMEOUT, PositionParts, State
from forq.workers.loop import MAX_BATCH, MAX_BATCH_NS, SLOW_JOB_NS
from tests.workers.loop_rig import LIMITS, NOTHING, Rig, jobs

TICK_NS = 1 << TICK_NS_SHIFT


def test_a_batch_is_run_in_order_and_settled_with_the_next_turn() -> None:
    ran: list[str] = []
    rig = Rig(lambda data, job: ran.append(job.id), jobs("a", "b"), NOTHING)
    rig.step()
    assert ran == ["a", "b"]
    assert (rig.word.turn, rig.word.index, rig.word.running) == (1, 2, False)
    rig.step()
    settled = rig.consumer.calls[1]
    assert (settled.done[::3], settled.done[1::3], settled.keep) == ([b"a", b"b"], ["7", "7"], 0)
    assert (rig.slot.done, rig.word.turn, rig.word.index) == (2, 2, 0)


def test_the_position_contains_the_running_job_and_the_number_of_finished_ones() -> None:
    seen: list[tuple[int, int, bool]] = []

    def look(data: Any, job: Any) -> None:
        seen.append((rig.word.turn, rig.word.index, rig.word.running))

    rig = Rig(look, jobs("a", "b", "c"))
    rig.step()
    assert seen == [(1, 0, True), (1, 1, True), (1, 2, True)]


def test_the_position_and_the_start_of_each_job_belong_together() -> None:
    """A reader uses the start only if it falls into the tick of the position. Positions of a tick share most bits."""
    seen: list[tuple[int, int] | None] = []
    took: list[int] = []
    pauses = [*[TICK_NS // 5] * 20, SLOW_JOB_NS + 1, *[TICK_NS // 5] * 9]

    def look(data: Any, job: Any) -> None:
        seen.append(rig.slot.running_since_ns())
        assert rig.word.index == len(seen) - 1 - rig.slot.done
        took.append(pauses[len(took)])
        rig.clock.ns += took[-1]

    rig = Rig(look, jobs(*(f"j{n}" for n in range(30))), NOTHING, NOTHING)
    rig.step()
    starts = [each[1] for each in seen if each is not None]
    assert len(starts) == 30
    # Between two jobs the clock is read a few times, which takes 1 µs each.
    apart = [later - earlier for earlier, later in pairwise(starts)]
    assert all(pause <= real < pause + 20_000 for pause, real in zip(took, apart, strict=False))


def test_the_run_times_of_a_batch_are_those_of_its_jobs() -> None:
    def handle(data: Any, job: Any) -> None:
        rig.clock.ns += times[job.id]

    times = {"a": 5_000, "b": 0, "c": 250_000, "d": 99_000, "e": 8_000_000, "f": 1000}
    rig = Rig(handle, jobs(*times), NOTHING)
    rig.step()
    rig.loop.settle()
    settled = [int(each) for each in rig.consumer.calls[1].done[2::3]]
    assert all(0 <= real - ns // 1000 <= 3 for real, ns in zip(settled, times.values(), strict=True))


def test_turn_numbers_never_wrap_and_the_slot_stores_them_in_full() -> None:
    seen: list[int] = []
    rig = Rig(lambda data, job: seen.append(rig.slot.read_position().turn), jobs("a"), jobs("b"))
    rig.loop._numbers._last = 2**20 - 2
    rig.step()
    rig.step()
    assert seen == [call.number for call in rig.consumer.calls] == [2**20 - 1, 2**20]
    assert rig.word.turn == 0, "the position has only the low bits"


def test_a_failed_job_is_settled_before_the_next_one_starts() -> None:
    ran: list[str] = []

    def fail_on_b(data: Any, job: Any) -> None:
        ran.append(job.id)
        if job.id == "b":
            raise ValueError("no")

    rig = Rig(fail_on_b, jobs("a", "b", "c"), NOTHING, NOTHING)
    positions: list[tuple[int, bool]] = []
    rig.consumer.on_turn = lambda: positions.append((rig.word.index, rig.word.running))
    rig.step()
    assert ran == ["a", "b", "c"]
    turn = rig.consumer.calls[1]
    assert (turn.done[::3], turn.failed[0], turn.keep, turn.want) == ([b"a"], b"b", 1, 0)
    assert positions[1] == (1, True)


def test_after_a_slow_job_a_turn_confirms_the_rest_of_the_batch() -> None:
    def slow_on_a(data: Any, job: Any) -> None:
        ran.append(job.id)
        if job.id == "a":
            rig.clock.ns += SLOW_JOB_NS + 1

    ran: list[str] = []
    rig = Rig(slow_on_a, jobs("a", "b", "c"), NOTHING)
    rig.step()
    assert ran == ["a", "b", "c"]
    assert (rig.consumer.calls[1].keep, rig.consumer.calls[1].want) == (2, 0)
    assert (rig.word.turn, rig.word.index) == (2, 2)


def test_rescued_jobs_are_not_started() -> None:
    def slow(data: Any, job: Any) -> None:
        ran.append(job.id)
        rig.clock.ns += SLOW_JOB_NS + 1

    ran: list[str] = []
    given_away = Turn(paused=False, held=False, refused=[], fence="", limits=LIMITS, jobs=[])
    rig = Rig(slow, jobs("a", "b", "c"), given_away)
    rig.step()
    assert ran == ["a"]


@pytest.mark.fault("reply lost")
@pytest.mark.parametrize("losses", [1, 2, 3])
def test_after_a_lost_reply_the_same_jobs_are_settled_again_and_none_is_kept(losses: int) -> None:
    """The first repeated call that arrived returned the rest of the batch; a later answer must not hide that."""

    def slow(data: Any, job: Any) -> None:
        ran.append(job.id)
        rig.clock.ns += SLOW_JOB_NS + 1

    ran: list[str] = []
    lost = [OutcomeUnknown("cut")] * losses
    rig = Rig(slow, jobs("a", "b", "c"), *lost, NOTHING, NOTHING)
    rig.step()
    assert ran == ["a"]
    repeated = rig.consumer.calls[1:]
    assert [call.keep for call in repeated] == [2] + [0] * losses
    assert {tuple(call.done[::3]) for call in repeated} == {(b"a",)}
    assert len({call.number for call in repeated}) == losses + 1


def test_quick_jobs_are_claimed_in_batches_and_slow_jobs_one_by_one() -> None:
    wants: list[int] = []

    def handle(data: Any, job: Any) -> None:
        rig.clock.ns += pause_ns

    pause_ns = 1000
    rig = Rig(handle, *[jobs(f"j{n}") for n in range(12)])
    for _ in range(6):
        rig.step()
        wants.append(rig.loop._want)
    assert wants[:4] == [4, 16, 64, MAX_BATCH]
    pause_ns = 5_000_000
    rig.step()
    assert (rig.loop._want, rig.loop._want_when_idle) == (3, 1)
    pause_ns = 9_000_000
    rig.step()
    assert rig.loop._want == 1


def test_slow_jobs_shrink_the_batches_and_quick_jobs_grow_them_again() -> None:
    """The jobs of a batch behind a slow one are returned, so claiming them was wasted."""

    def handle(data: Any, job: Any) -> None:
        rig.clock.ns += SLOW_JOB_NS + 1 if job.id.startswith("slow") else 1000

    given_away = Turn(paused=False, held=False, refused=[], fence="", limits=LIMITS, jobs=[])
    quick = [jobs(f"a{n}") for n in range(4)]
    mixed = [turn for n in range(6) for turn in (jobs(f"slow{n}", f"b{n}"), given_away, jobs(f"c{n}"))]
    rig = Rig(handle, *quick, *mixed, *[jobs(f"d{n}") for n in range(30)])
    for _ in quick:
        rig.step()
    assert rig.loop._want == MAX_BATCH
    for _ in range(12):
        rig.step()
    assert rig.loop._want <= 8
    for _ in range(30):
        rig.step()
    assert rig.loop._want == MAX_BATCH


def test_a_batch_over_its_time_budget_returns_its_remaining_jobs() -> None:
    """No single job is slow enough for a rescue, so other workers would be idle meanwhile."""

    def handle(data: Any, job: Any) -> None:
        ran.append(job.id)
        rig.clock.ns += SLOW_JOB_NS - 2_000_000

    ran: list[str] = []
    rig = Rig(handle, jobs(*(f"j{n}" for n in range(100))), NOTHING)
    rig.loop._want = MAX_BATCH
    rig.step()
    assert len(ran) == MAX_BATCH_NS // (SLOW_JOB_NS - 2_000_000)
    assert (rig.word.index, rig.word.running) == (len(ran), False)
    rig.step()
    claim = rig.consumer.calls[1]
    assert [job_id.decode() for job_id in claim.done[::3]] == ran
    assert (claim.keep, claim.want) == (0, 1)


def test_a_long_pause_before_the_first_job_of_a_batch_does_not_return_it() -> None:
    """Otherwise a worker on a constantly overloaded machine would return every batch."""
    ran: list[str] = []
    rig = Rig(lambda data, job: ran.append(job.id), jobs("a", "b"), NOTHING)
    readings = chain([1], count(2 * MAX_BATCH_NS, 1000))
    rig.loop._now = lambda: next(readings)
    rig.step()
    assert ran == ["a"]


def test_a_stop_ends_the_batch_after_the_running_job() -> None:
    ran: list[str] = []

    def stop_on_a(data: Any, job: Any) -> None:
        ran.append(job.id)
        rig.loop.stop()

    rig = Rig(stop_on_a, jobs("a", "b"))
    rig.step()
    assert ran == ["a"]
    assert (rig.word.index, rig.word.running) == (1, False)


def test_the_watcher_is_notified_of_every_batch() -> None:
    rig = Rig(lambda data, job: None, jobs("a"), jobs("b", "c"))
    rig.step()
    rig.step()
    assert rig.batches == [1, 2]


def test_settle_reports_finished_jobs_and_claims_nothing() -> None:
    """The retry process settles before it claims from its other queue: the position would be lost otherwise."""
    rig = Rig(lambda data, job: None, jobs("a"), NOTHING)
    rig.step()
    rig.loop.settle()
    assert (rig.consumer.calls[1].done[::3], rig.consumer.calls[1].want) == ([b"a"], 0)
    rig.loop.settle()
    assert len(rig.consumer.calls) == 2


def timed(timeout_ms: int, *ids: str) -> Turn:
    return jobs(*ids, limits=Limits(timeout_ms, 10, 0))


def test_the_timeout_of_a_turn_applies_to_its_jobs_and_is_reported_once() -> None:
    rig = Rig(lambda data, job: None, timed(500, "a"), timed(500, "b"), timed(700, "c"), timed(0, "d"))
    rig.step()
    assert (rig.slot.timeout_ms, rig.unguarded) == (500, 1)
    rig.slot.guarded = 1
    rig.step()
    assert (rig.slot.timeout_ms, rig.unguarded) == (500, 1)
    rig.step()
    assert (rig.slot.timeout_ms, rig.unguarded) == (700, 2), "a timer for another timeout may come too late"
    rig.slot.guarded = 0
    rig.step()
    assert (rig.slot.timeout_ms, rig.unguarded) == (0, 2)


def with_records(turn: Turn, *heads: bytes) -> Turn:
    """The same jobs, with these heads of their records."""
    records = [head + b"\n[null,null,1]" for head in heads]
    return replace(turn, jobs=[part for pair in zip(turn.jobs[::2], records, strict=True) for part in pair])


PLAIN, HOUR, SECOND = b"p5 1000000", b"o5 1000000 0 0 0 0 0 t=3600000", b"O5 1000000 0 0 0 0 0 t=1000,r=3"


def test_each_job_of_a_batch_has_its_own_timeout() -> None:
    seen: list[tuple[int, float, int]] = []
    rig = Rig(
        lambda data, job: seen.append((rig.slot.timeout_ms, rig.loop._attempts.timeout_seconds, rig.unguarded)),
        with_records(timed(60_000, "a", "b", "c", "d", "e"), PLAIN, HOUR, SECOND, PLAIN, PLAIN),
    )
    rig.slot.guarded = 1
    rig.slot.timeout_ms = 60_000
    # The supervisor checks in half a minute.
    rig.slot.guarded = rig.clock.ns + 30 * 10**9
    rig.step()
    assert seen == [(60_000, 60, 0), (3_600_000, 3600, 0), (1000, 1, 1), (60_000, 60, 1), (60_000, 60, 1)]


class TimeoutOrder:
    """Words of a slot that record the stores to POSITION and TIMEOUT."""

    def __init__(self, words: Any, stores: list[tuple[str, int]]) -> None:
        self._words = words
        self._stores = stores

    def __getitem__(self, index: int) -> int:
        return self._words[index]  # type: ignore[no-any-return]

    def __setitem__(self, index: int, value: int) -> None:
        if index in (POSITION, TIMEOUT):
            self._stores.append(("running", value & 1) if index == POSITION else ("timeout", value))
        self._words[index] = value


def test_no_job_runs_while_the_timeout_changes() -> None:
    stores: list[tuple[str, int]] = []
    rig = Rig(lambda data, job: None, with_records(timed(60_000, "a", "b", "c"), PLAIN, SECOND, PLAIN))
    rig.slot.words = TimeoutOrder(rig.slot.words, stores)  # type: ignore[assignment]
    rig.step()
    assert stores[2:] == [
        ("running", 1),
        *[("running", 0), ("timeout", 1000), ("running", 1)],
        *[("running", 0), ("timeout", 60_000), ("running", 1)],
        ("running", 0),
    ]


def test_the_timeout_of_a_task_applies_to_its_jobs() -> None:
    app = App("a")
    seen: list[tuple[str | None, int, Any]] = []

    def note(data: Any, job: Any) -> None:
        seen.append((job.type, rig.slot.timeout_ms, rig.loop._attempts.task_options))

    tasks = {"slow": AttemptOptions(timeout_ms=5000, max_retries=2), "plain": AttemptOptions()}
    for name, options in tasks.items():
        task: Any = SimpleNamespace(name=name, options=options, run_job=note)
        app.tasks[name] = app._by_type[name] = task
    turn = timed(60_000, "a", "b", "c")
    for number, name in enumerate(("slow", "plain", "slow")):
        turn.jobs[2 * number + 1] = f'p5 1000000\n[null,"{name}",{{}}]'.encode()
    rig = Rig(app, turn)
    rig.step()
    assert seen == [
        ("slow", 5000, tasks["slow"]),
        ("plain", 60_000, tasks["plain"]),
        ("slow", 5000, tasks["slow"]),
    ]


def test_a_broken_record_has_the_timeout_of_its_queue() -> None:
    rig = Rig(lambda data, job: None, with_records(timed(60_000, "a"), b"o5 1000000 0 0 0 0 0 t=soon"), NOTHING)
    rig.step()
    assert rig.slot.timeout_ms == 60_000
    rig.loop.settle()
    (_, _, _, error, *_) = rig.consumer.calls[-1].failed
    assert b"broken options of a job: 't=soon'" in error


def test_without_capacity_a_worker_returns_its_jobs_and_claims_after_a_grant() -> None:
    ran: list[str] = []
    rig = Rig(lambda data, job: ran.append(job.id), NOTHING, jobs("a"))
    rig.answer = "wait"
    rig.consumer.on_turn = lambda: wants.append(rig.consumer.calls[-1].want) or rig.grant.receive("go")  # type: ignore[func-returns-value]
    wants: list[int] = []
    assert rig.loop.serve_batch()
    assert wants == [0, 1], "the first turn only returns jobs"
    assert ran == ["a"]
    assert rig.messages == [{"want": rig.slot.number, "units": 10, "priority": 0}]


def test_a_worker_that_must_yield_settles_and_returns_its_jobs_before_the_next_claim() -> None:
    rig = Rig(lambda data, job: rig.grant.receive("yield"), jobs("a"), NOTHING)
    assert rig.loop.serve_batch()
    assert rig.consumer.calls[1].done[::3] == [b"a"]
    assert rig.consumer.calls[1].want == 0
    assert rig.messages[-1] == {"done": rig.slot.number}


def test_a_job_claimed_by_a_blocking_wait_runs_without_another_turn() -> None:
    ran: list[str] = []
    rig = Rig(lambda data, job: ran.append(job.id), NOTHING, NOTHING, jobs("a"), NOTHING)
    assert not rig.loop.serve_batch()
    # The first wait times out.
    rig.loop.wait_for_work()
    assert (len(rig.consumer.calls), rig.slot.state) == (3, State.IDLE)
    assert rig.loop.serve_batch()
    assert (ran, len(rig.consumer.calls)) == (["a"], 3)
    assert not rig.loop.serve_batch()
    assert rig.consumer.calls[3].done[::3] == [b"a"]


def test_a_job_claimed_by_a_blocking_wait_is_returned_without_capacity() -> None:
    ran: list[str] = []
    rig = Rig(lambda data, job: ran.append(job.id), NOTHING, jobs("a"), NOTHING, jobs("a", fence="8"))
    assert not rig.loop.serve_batch()
    rig.loop.wait_for_work()
    rig.grant.receive("yield")
    rig.answer = "wait"
    wants: list[int] = []
    rig.consumer.on_turn = lambda: wants.append(rig.consumer.calls[-1].want) or rig.grant.receive("go")  # type: ignore[func-returns-value]
    assert rig.loop.serve_batch()
    assert wants == [0, 1], "it returns jobs, and claims when it may"
    assert ran == ["a"]


def test_a_worker_without_capacity_waits_without_a_claim() -> None:
    rig = Rig(lambda data, job: None, NOTHING)
    assert not rig.loop.serve_batch()
    rig.grant.receive("yield")
    rig.loop.wait_for_work()
    assert (len(rig.consumer.calls), rig.consumer.waits) == (1, 1)


def test_a_wait_without_a_turn_is_followed_by_one() -> None:
    rig = Rig(lambda data, job: None, NOTHING, jobs("a"))
    rig.consumer.wait_for_turn = lambda number, want: None  # type: ignore[method-assign]
    assert not rig.loop.serve_batch()
    rig.loop.wait_for_work()
    assert rig.loop.serve_batch()
    assert len(rig.consumer.calls) == 2


@pytest.mark.parametrize(
    ("turn", "state"), [(replace(NOTHING, paused=True), State.PARKED), (replace(NOTHING, limited=True), State.LIMITED)]
)
def test_a_worker_that_may_not_claim_after_a_wait_runs_nothing(turn: Turn, state: State) -> None:
    rig = Rig(lambda data, job: None, NOTHING, turn)
    assert not rig.loop.serve_batch()
    rig.loop.wait_for_work()
    assert not rig.loop.serve_batch()
    assert rig.loop._parked is state


def test_after_max_jobs_a_worker_stops_claiming_and_reports_it_once() -> None:
    rig = Rig(lambda data, job: None, jobs("a", "b"), jobs("c"), NOTHING, NOTHING, max_jobs=3)
    rig.loop._want = MAX_BATCH
    rig.step()
    rig.step()
    rig.step()
    rig.step()
    assert [call.want for call in rig.consumer.calls] == [3, 1, 0, 0]
    assert rig.replaced == ["max_jobs = 3"]


@pytest.mark.parametrize("held", [True, False])
def test_a_batch_marked_for_rescue_starts_only_after_a_turn_confirms_it(held: bool) -> None:
    """The mark is written after the reply is read and before the first position is published."""
    ran: list[str] = []
    rig = Rig(lambda data, job: ran.append(job.id), jobs("a", "b"), replace(NOTHING, held=held), NOTHING)
    seen: list[PositionParts] = []
    rig.loop._on_batch = lambda count: setattr(rig.slot, "taken", rig.slot.turn)
    rig.consumer.on_turn = lambda: seen.append(rig.word)
    rig.step()
    assert (rig.consumer.calls[1].keep, rig.consumer.calls[1].want, rig.consumer.calls[1].done) == (2, 0, [])
    assert not seen[1].running, "nothing runs before the reply"
    assert ran == (["a", "b"] if held else [])


def test_a_rescue_mark_of_an_earlier_turn_is_ignored() -> None:
    ran: list[str] = []
    rig = Rig(lambda data, job: ran.append(job.id), jobs("a"), jobs("b"), NOTHING)
    rig.step()
    rig.slot.taken = rig.slot.turn
    rig.step()
    assert (ran, len(rig.consumer.calls)) == (["a", "b"], 2)


def test_the_rescue_mark_is_read_after_the_position_is_published() -> None:
    """Otherwise the worker and the rescue could each miss what the other does."""
    order: list[str] = []
    rig = Rig(lambda data, job: None, jobs("a"), NOTHING)
    words = rig.slot.words

    class Watched:
        def __getitem__(self, at: int) -> int:
            order.extend(["mark"] if at == TAKEN else [])
            return words[at]

        def __setitem__(self, at: int, value: int) -> None:
            order.extend(["position"] if at == POSITION and value & 1 else [])
            words[at] = value

    rig.slot.words = Watched()  # type: ignore[assignment]
    rig.step()
    assert order == ["position", "mark"]
