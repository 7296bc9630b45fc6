"""The loop of a worker against a scripted broker: what it publishes, settles and drops, step by step."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import pytest

from forq import App
from forq.broker.claim import Limits, Turn
from forq.broker.scripts import Fate
from forq.errors import Fenced, OutcomeUnknown
from forq.job_options import AttemptOptions
from forq.procs.scoreboard import POSITION, TAKEN, TIMEOUT, PositionParts, Scoreboard, Slot, State, unpack_position
from forq.settings import defaults
from forq.workers import job_log
from forq.workers.attempt import AttemptRunner
from forq.workers.event_loop import Cancelled
from forq.workers.grant import Grant
from forq.workers.handlers import Handlers
from forq.workers.loop import (
    DROPPED_LOG_INTERVAL_NS,
    MAX_BATCH,
    MAX_BATCH_NS,
    MAX_RESULTS_BYTES,
    REFUSED_LOG_INTERVAL_NS,
    SLOW_JOB_NS,
    WorkerLoop,
)
from forq.workers.recycling import Recycling
from tests.support.drive.wait import wait_until


class Clock:
    def __init__(self) -> None:
        self.ns = 10**9

    def __call__(self) -> int:
        self.ns += 1000
        return self.ns


@dataclass
class Call:
    number: int
    done: list[Any]
    failed: list[Any]
    keep: int
    want: int
    results: list[Any] = field(default_factory=list)


@dataclass
class ScriptedConsumer:
    """Answers turns from a list; exceptions in the list are raised."""

    answers: Iterator[Turn | Exception]
    calls: list[Call] = field(default_factory=list)
    waits: int = 0
    queue: str = "q"
    on_turn: Callable[[], None] = lambda: None

    def turn(self, number: int, done: list[Any], failed: list[Any], keep: int, want: int, results: list[Any]) -> Turn:
        self.calls.append(Call(number, list(done), list(failed), keep, want, list(results)))
        self.on_turn()
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait_for_turn(self, number: int, want: int) -> Turn | None:
        return self.turn(number, [], [], 0, want, [])

    def wait_for_job(self) -> bool:
        self.waits += 1
        return True

    @property
    def link(self) -> "ScriptedConsumer":
        return self

    def fetch_client_id(self) -> None:
        pass


LIMITS = Limits(timeout_ms=0, size=10, priority=0)


def jobs(*ids: str, fence: str = "7", limits: Limits = LIMITS) -> Turn:
    flat = [part for job_id in ids for part in (job_id.encode(), b"p5 1000000\n[null,null,1]")]
    return Turn(paused=False, held=True, refused=[], fence=fence, limits=limits, jobs=flat)


NOTHING = jobs(fence="")


class Rig:
    """A loop, its slot and its clock."""

    def __init__(self, handler: Callable[[Any, Any], Any], *answers: Turn | Exception, **options: int) -> None:
        self.clock = Clock()
        self.board = Scoreboard.create(4)
        self.slot: Slot = self.board.slot(self.board.take())
        self.consumer = ScriptedConsumer(iter(answers))
        self.batches: list[int] = []
        self.messages: list[dict[str, object]] = []
        self.unguarded = 0
        self.replaced: list[str] = []
        self.grant = Grant(self._receive, self.slot.number)
        # The supervisor's answer to a request for units.
        self.answer = "go"
        self.loop = WorkerLoop(
            self.consumer,  # type: ignore[arg-type]
            AttemptRunner("q", Handlers({None: handler}), self.slot),
            self.slot,
            expiry_ms=1000,
            limits=LIMITS,
            grant=self.grant,
            recycling=Recycling({**defaults(), **options}, [self.slot], self.replaced.append),
            on_batch=self.batches.append,
            on_unguarded=self._count_unguarded,
            clock_ns=self.clock,
        )

    def _receive(self, message: dict[str, object]) -> None:
        self.messages.append(message)
        if "want" in message:
            # The grant sends while it holds its lock, before it has recorded the request.
            threading.Thread(target=self.grant.receive, args=(self.answer,)).start()

    def _count_unguarded(self) -> None:
        self.unguarded += 1

    def step(self) -> None:
        """One pass of run(), without blocking."""
        batch = self.loop._claim()
        if batch:
            self.loop._run_batch(batch)

    @property
    def word(self) -> PositionParts:
        return unpack_position(self.slot.position)


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


def test_refused_settles_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    refused = replace(jobs("a"), refused=[b"x", b"y"])
    rig = Rig(lambda data, job: None, *[refused] * 12)
    caplog.set_level(logging.INFO, "forq")
    for _ in range(10):
        rig.step()
    rig.clock.ns += REFUSED_LOG_INTERVAL_NS
    rig.step()
    assert [record.getMessage() for record in caplog.records] == [
        "settle refused: already settled or returned queue=q jobs=2",
        "settle refused: already settled or returned queue=q jobs=20",
    ]


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


KEEPS = Limits(timeout_ms=0, size=10, priority=0, max_result_bytes=MAX_RESULTS_BYTES, keeps_results=True)


def with_options(*jobs_with_options: tuple[str, str], limits: Limits) -> Turn:
    """Jobs with packed options; '' for none."""
    flat = []
    for job_id, options in jobs_with_options:
        head = f"o5 1000000 0 0 0 0 0 {options}" if options else "p5 1000000"
        flat += [job_id.encode(), f"{head}\n[null,null,1]".encode()]
    return Turn(paused=False, held=True, refused=[], fence="7", limits=limits, jobs=flat)


KEEPS_OWN = replace(LIMITS, max_result_bytes=100)


def test_a_job_with_its_own_keep_done_sends_its_result() -> None:
    batch = with_options(("a", ""), ("b", "k=5000"), ("c", "t=1000"), ("d", "k=0"), limits=KEEPS_OWN)
    rig = Rig(lambda data, job: job.id, batch, NOTHING)
    rig.step()
    assert rig.slot.has_results
    rig.step()
    call = rig.consumer.calls[1]
    assert (call.done[::3], call.results) == ([b"a", b"b", b"c", b"d"], ["2 5000", b'"b"'])
    assert not rig.slot.has_results


def test_a_job_that_keeps_nothing_says_so_in_a_queue_that_keeps_results() -> None:
    batch = with_options(("a", ""), ("b", "k=0"), limits=KEEPS)
    rig = Rig(lambda data, job: job.id, batch, NOTHING)
    rig.step()
    rig.step()
    assert rig.consumer.calls[1].results == [1, b'"a"', "2 0", b""]


APP = App("a")


@APP.task(max_retries=5, backoff=[1, 2])
def fails() -> None:
    raise ValueError("no")


@APP.task
def answers() -> int:
    return 7


def test_the_options_of_a_task_are_sent_with_failures_and_results() -> None:
    flat = []
    for job_id, name in (("a", "answers"), ("b", "fails")):
        flat += [job_id.encode(), f'p5 1000000\n[null,"{name}",{{}}]'.encode()]
    batch = Turn(paused=False, held=True, refused=[], fence="7", limits=KEEPS_OWN, jobs=flat)
    rig = Rig(APP, batch, NOTHING)
    rig.step()
    rig.step()
    call = rig.consumer.calls[1]
    assert call.results == ["1 3600000", b"7"]
    chance, options = str(call.failed[7]).split(" ")
    assert 0 <= float(chance) <= 1
    assert options == "r=5,b=1000:2000"


def test_results_are_sent_with_the_turn_by_job_number() -> None:
    def fail_on_b(data: Any, job: Any) -> str:
        if job.id == "b":
            raise ValueError("no")
        return f"of {job.id}"

    rig = Rig(fail_on_b, jobs("a", "b", "c", "d", limits=KEEPS), jobs(limits=KEEPS, fence=""), NOTHING)
    rig.step()
    rig.step()
    first, second = rig.consumer.calls[1:]
    assert (first.done[::3], first.results) == ([b"a"], [1, b'"of a"'])
    assert (second.done[::3], second.results) == ([b"c", b"d"], [1, b'"of c"', 2, b'"of d"'])


def test_results_are_not_encoded_if_the_queue_keeps_none() -> None:
    rig = Rig(lambda data, job: object(), jobs("a"), jobs("b", limits=KEEPS), NOTHING)
    rig.step()
    rig.step()
    assert rig.consumer.calls[1].results == []
    rig.step()
    assert rig.consumer.calls[2].results[1].startswith(b"!the handler's result is not JSON")


def test_results_are_sent_again_after_a_lost_reply() -> None:
    rig = Rig(lambda data, job: 5, jobs("a", limits=KEEPS), OutcomeUnknown("lost"), NOTHING, NOTHING)
    rig.step()
    rig.step()
    assert [call.results for call in rig.consumer.calls[1:3]] == [[1, b"5"], [1, b"5"]]
    rig.step()
    assert rig.consumer.calls[3].results == []


def test_large_results_cause_a_turn_before_the_next_job() -> None:
    large = "x" * (MAX_RESULTS_BYTES // 2)
    rig = Rig(lambda data, job: large, jobs("a", "b", "c", limits=KEEPS), jobs(limits=KEEPS, fence=""), NOTHING)
    rig.step()
    turn = rig.consumer.calls[1]
    assert (turn.done[::3], turn.keep, turn.want) == ([b"a", b"b"], 1, 0)
    rig.step()
    assert rig.consumer.calls[2].done[::3] == [b"c"]


def test_a_worker_that_stops_sends_its_results() -> None:
    rig = Rig(lambda data, job: 5, jobs("a", limits=KEEPS), NOTHING)
    rig.step()
    rig.consumer.leave = rig.consumer.close = lambda *_: None  # type: ignore[attr-defined]
    rig.loop.leave()
    assert rig.consumer.calls[1].results == [1, b"5"]


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


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the logging thread may take long to start."""
    monkeypatch.setattr(job_log, "WRITE_WAIT_SECONDS", 30.0)


def failing(turn: Turn, *fates: Fate) -> Turn:
    return replace(turn, fates=fates)


def test_a_failure_is_logged_once_its_next_step_is_known(caplog: pytest.LogCaptureFixture) -> None:
    def fail(data: Any, job: Any) -> None:
        raise ValueError("no good")

    rig = Rig(fail, jobs("a"), failing(NOTHING, Fate("retried", 4000, 2, 4)), NOTHING)
    rig.step()
    assert caplog.messages == [], "the job is not settled yet"
    rig.step()
    line = "job failed: attempt 2 of 4, retry in 4 s queue=q job=a error=ValueError: no good"
    assert caplog.messages == [line]
    rig.step()
    assert caplog.messages == [line]


def test_a_failure_during_a_redis_outage_is_logged_at_once_and_its_fate_later(caplog: pytest.LogCaptureFixture) -> None:
    def fail(data: Any, job: Any) -> None:
        raise ValueError("no good")

    gone = [OutcomeUnknown("gone"), OutcomeUnknown("gone")]
    rig = Rig(fail, jobs("a"), *gone, failing(NOTHING, Fate("dead", 0, 4, 4)))
    rig.step()
    rig.step()
    logged = [(record.levelname, record.exc_info is not None) for record in caplog.records if "job=a" in record.message]
    assert logged == [("WARNING", True), ("ERROR", False)]


def test_a_failure_of_a_fenced_worker_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(data: Any, job: Any) -> None:
        raise ValueError("no good")

    rig = Rig(fail, jobs("a"), Fenced("evicted"))
    rig.step()
    with pytest.raises(Fenced):
        rig.step()
    assert caplog.messages == ["job failed: outcome unknown: evicted queue=q job=a error=ValueError: no good"]


def test_the_variables_of_a_failed_handler_are_freed_after_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which may run late: a handler may hold much memory."""

    class Large:
        pass

    gone: list[weakref.ref[Large]] = []

    def fail(data: Any, job: Any) -> None:
        large = Large()
        gone.append(weakref.ref(large))
        raise ValueError("no good")

    # pytest keeps every record.
    monkeypatch.setattr(logging.getLogger("forq"), "propagate", False)
    gc.disable()
    try:
        rig = Rig(fail, jobs("a"), failing(NOTHING, Fate("retried", 4000, 2, 4)))
        rig.step()
        assert gone[0]() is not None
        rig.step()
        wait_until(lambda: gone[0]() is None)
    finally:
        gc.enable()


def test_results_that_cannot_be_kept_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    keeping = replace(LIMITS, max_result_bytes=100, keeps_results=True)
    batches = [jobs("a", limits=keeping), jobs("b", "c", limits=keeping), jobs("d", limits=keeping)]
    rig = Rig(lambda data, job: {"order": {job.id}}, NOTHING, *batches, NOTHING)
    rig.loop._limits = keeping
    for _ in range(2):
        rig.step()
    assert caplog.messages == [], "the job is not settled yet"
    rig.step()
    first = "job is done, but its result is not kept queue=q job=a reason=the handler's result is not JSON: "
    assert [message.partition("result['order']")[0] for message in caplog.messages] == [first]
    rig.step()
    assert len(caplog.messages) == 1
    rig.clock.ns += DROPPED_LOG_INTERVAL_NS
    rig.step()
    assert caplog.messages[1].startswith(
        "job is done, but its result is not kept (and 2 more since the last message) queue=q job=d "
    )
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("outcome", [Cancelled.RETURNED, Cancelled.REMOVED])
def test_a_cancelled_coroutine_is_settled_before_the_rest_of_the_batch_runs(outcome: Cancelled) -> None:
    positions: list[tuple[int, bool, int]] = []

    async def handle(data: Any, job: Any) -> None:
        if job.id == "b":
            rig.loop.cancel(rig.slot.position, outcome, "killed")
            await asyncio.sleep(60)

    def on_turn() -> None:
        if rig.consumer.calls[-1].failed:
            position = unpack_position(rig.slot.position)
            positions.append((position.index, position.running, rig.slot.state))

    rig = Rig(handle, jobs("a", "b", "c"), failing(NOTHING, Fate("interrupted", 0, 1, 1)), NOTHING)
    rig.consumer.on_turn = on_turn
    rig.step()
    rig.loop.settle()
    rig.loop.close()
    settled = rig.consumer.calls[1]
    assert (settled.done[::3], settled.keep) == ([b"a"], 1)
    assert (settled.failed[0], settled.failed[4], settled.failed[5]) == (b"b", b"killed", outcome.value)
    assert positions == [(1, True, State.SETTLING)], "it keeps its position until it is settled"
    assert rig.consumer.calls[2].done[::3] == [b"c"]
    assert rig.slot.done == 2, "it does not count as done"
