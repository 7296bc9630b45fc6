"""Batches of jobs with async handlers: the event loop starts one job after the other, the worker's thread the rest."""

import asyncio
import gc
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forq.broker.claim import Limits, Turn
from forq.job import TaskResult
from forq.procs.scoreboard import LENIENCE, STEP
from forq.workers.event_loop import Cancelled, Chain, Run
from forq.workers.handlers import Handlers
from forq.workers.loop import MAX_BATCH_NS, MAX_RESULTS_BYTES, SLOW_JOB_NS, BatchProgress
from tests.support.drive.wait import wait_until
from tests.workers.loop_rig import LIMITS, NOTHING, Rig, jobs

Handler = Callable[[Any, Any], Any]
KEEPS = Limits(timeout_ms=0, size=10, priority=0, keeps_results=True, max_result_bytes=MAX_RESULTS_BYTES)


class AsyncRig(Rig):
    """Counts how often the worker's thread hands over to the event loop."""

    def __init__(self, handler: Handler, *answers: Turn | Exception, types: dict[str | None, Handler] | None = None):
        super().__init__(handler, *answers)
        self.attempts = self.loop._attempts
        if types is not None:
            self.attempts._handlers = Handlers(types)
        self.chains = 0
        self._begin = self.attempts._event_loop.begin
        self.attempts._event_loop.begin = self._count_chain  # type: ignore[method-assign]

    def _count_chain(self, run: Run, advance: Callable[[Run], Run | None] | None = None) -> Chain:
        self.chains += 1
        return self._begin(run, advance)

    def done(self) -> list[bytes]:
        """Ids of all jobs that were settled as done."""
        return [job_id for call in self.consumer.calls for job_id in call.done[::3]]


@pytest.fixture
def rig() -> Iterator[Callable[..., AsyncRig]]:
    made: list[AsyncRig] = []

    def make(handler: Handler, *answers: Turn | Exception, **options: Any) -> AsyncRig:
        made.append(AsyncRig(handler, *answers, **options))
        return made[-1]

    yield make
    for each in made:
        each.attempts.close()


Make = Callable[..., AsyncRig]


def test_the_event_loop_runs_a_whole_batch_without_the_thread_of_the_worker(rig: Make) -> None:
    seen: list[tuple[str, int, bool, int]] = []
    tasks: set[int] = set()

    async def handle(data: Any, job: Any) -> None:
        seen.append((job.id, batch.word.index, batch.word.running, batch.slot.words[LENIENCE]))
        tasks.add(id(asyncio.current_task()))
        await asyncio.sleep(0)

    batch = rig(handle, jobs("a", "b", "c"), NOTHING)
    batch.step()
    assert seen == [("a", 0, True, 1000), ("b", 1, True, 1000), ("c", 2, True, 1000)]
    assert (batch.chains, batch.word.index, batch.word.running) == (1, 3, False)
    assert batch.slot.words[LENIENCE] == 0
    batch.step()
    assert batch.done() == [b"a", b"b", b"c"]


def test_each_job_has_a_context_of_its_own(rig: Make) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[str] = []

    async def handle(data: Any, job: Any) -> None:
        seen.append(variable.get())
        variable.set(job.id)

    rig(handle, jobs("a", "b", "c")).step()
    assert seen == ["unset"] * 3


def test_handlers_that_are_not_async_run_in_the_thread_of_the_worker(rig: Make) -> None:
    threads: list[tuple[str, bool]] = []

    async def async_handler(data: Any, job: Any) -> None:
        threads.append((job.id, threading.current_thread() is threading.main_thread()))

    def plain(data: Any, job: Any) -> None:
        threads.append((job.id, threading.current_thread() is threading.main_thread()))

    record = {"a": "async", "p": "plain"}
    flat = [
        part for job_id in ("a1", "a2", "p1", "p2", "a3")
        for part in (job_id.encode(), b'p5 1000000\n[null,"%s",1]' % record[job_id[0]].encode())
    ]  # fmt: skip
    turn = Turn(paused=False, held=True, refused=[], fence="7", limits=LIMITS, jobs=flat)
    batch = rig(async_handler, turn, NOTHING, types={"async": async_handler, "plain": plain})
    batch.step()
    assert threads == [("a1", False), ("a2", False), ("p1", True), ("p2", True), ("a3", False)]
    assert batch.chains == 2
    batch.step()
    assert batch.done() == [b"a1", b"a2", b"p1", b"p2", b"a3"]


def test_a_function_that_returns_a_coroutine_runs_on_the_event_loop_too(rig: Make) -> None:
    """It may run code of the user before it returns, so it is called in the worker's thread."""
    threads: list[bool] = []

    async def handle() -> None:
        threads.append(threading.current_thread() is threading.main_thread())

    def call(data: Any, job: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return handle()

    batch = rig(call, jobs("a", "b"))
    batch.step()
    assert threads == [True, False, True, False]
    assert batch.chains == 2


def test_the_thread_of_the_worker_settles_a_failure_before_the_next_job(rig: Make) -> None:
    async def handle(data: Any, job: Any) -> None:
        if job.id == "b":
            raise ValueError("no")

    batch = rig(handle, jobs("a", "b", "c"), NOTHING, NOTHING)
    batch.step()
    settled = batch.consumer.calls[1]
    assert (settled.done[::3], settled.failed[0], settled.keep) == ([b"a"], b"b", 1)
    assert batch.chains == 2
    batch.step()
    assert batch.done() == [b"a", b"c"]


@pytest.mark.parametrize(("spent_ns", "confirmed"), [(SLOW_JOB_NS + 1, 2), (SLOW_JOB_NS // 2, 0)])
def test_after_a_slow_job_a_turn_confirms_the_rest(rig: Make, spent_ns: int, confirmed: int) -> None:
    async def handle(data: Any, job: Any) -> None:
        if job.id == "a":
            batch.clock.ns += spent_ns

    batch = rig(handle, jobs("a", "b", "c"), jobs(fence="7"), NOTHING)
    largest = batch.loop._max_want
    batch.step()
    assert [call.keep for call in batch.consumer.calls[1:]] == [confirmed] * bool(confirmed)
    # Halved once, although two threads have seen it, then grown by the batch.
    assert batch.loop._max_want == (largest // 2 + largest // 8 + 1 if confirmed else largest)
    batch.step()
    assert batch.done() == [b"a", b"b", b"c"]


def test_a_batch_over_its_time_budget_returns_its_remaining_jobs(rig: Make) -> None:
    ran: list[str] = []

    async def handle(data: Any, job: Any) -> None:
        ran.append(job.id)
        batch.clock.ns += MAX_BATCH_NS // 5

    batch = rig(handle, jobs(*"abcdefghij"), NOTHING)
    batch.step()
    assert 1 < len(ran) < 10
    assert (batch.word.index, batch.word.running) == (len(ran), False)
    batch.step()
    assert batch.consumer.calls[1].keep == 0


def test_large_results_cause_a_turn_before_the_next_job(rig: Make) -> None:
    async def handle(data: Any, job: Any) -> str:
        return "x" * (MAX_RESULTS_BYTES - 2)

    batch = rig(handle, jobs("a", "b", "c", limits=KEEPS), jobs(fence="7", limits=KEEPS), NOTHING)
    batch.step()
    assert [len(call.results) for call in batch.consumer.calls] == [0, 4]
    batch.step()
    assert batch.done() == [b"a", b"b", b"c"]


def test_a_stop_ends_the_batch_after_the_running_job(rig: Make) -> None:
    async def handle(data: Any, job: Any) -> None:
        batch.loop._stop.set()

    batch = rig(handle, jobs("a", "b"), NOTHING)
    batch.step()
    batch.loop.settle()
    assert batch.done() == [b"a"]


def test_every_job_has_its_own_deadline(rig: Make) -> None:
    """The deadline is not that of the batch, nor of the first job."""
    limits = Limits(timeout_ms=300, size=10, priority=0)

    async def handle(data: Any, job: Any) -> None:
        await asyncio.sleep(60 if job.id == "d" else 0.15)

    batch = rig(handle, jobs("a", "b", "c", "d", "e", limits=limits), jobs(fence="7"), NOTHING)
    began = time.monotonic()
    batch.step()
    settled = batch.consumer.calls[1]
    assert (settled.done[::3], settled.failed[0], settled.failed[5]) == ([b"a", b"b", b"c"], b"d", "timeout")
    assert time.monotonic() - began > 0.7, "the first three were within their time"
    batch.step()
    assert batch.done() == [b"a", b"b", b"c", b"e"]


def test_a_coroutine_that_ignores_its_deadline_is_followed_by_a_new_chain(rig: Make) -> None:
    """The thread of the worker has stopped looking at the deadlines of this chain."""
    limits = Limits(timeout_ms=20, size=10, priority=0)

    async def handle(data: Any, job: Any) -> None:
        if job.id == "a":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return

    batch = rig(handle, jobs("a", "b", limits=limits), jobs(fence="7", limits=limits), NOTHING)
    batch.step()
    assert batch.chains == 2
    batch.step()
    assert batch.done() == [b"a", b"b"]


@pytest.mark.parametrize("outcome", [Cancelled.RETURNED, Cancelled.REMOVED])
def test_a_kill_ends_only_the_job_at_its_position(rig: Make, outcome: Cancelled) -> None:
    positions: list[int] = []

    async def handle(data: Any, job: Any) -> None:
        positions.append(batch.slot.position)
        if job.id == "b":
            # Of the job before it: too late.
            batch.loop.cancel(positions[0], outcome, "killed")
            await asyncio.sleep(0.01)
        if job.id == "c":
            batch.loop.cancel(positions[2], outcome, "killed")
            await asyncio.sleep(60)

    batch = rig(handle, jobs("a", "b", "c", "d"), jobs(fence="7"), NOTHING, NOTHING)
    batch.step()
    settled = [call.failed[0] for call in batch.consumer.calls if call.failed]
    assert settled == [b"c"]
    batch.step()
    assert batch.done() == [b"a", b"b", b"d"]


def test_a_result_that_blocks_the_loop_while_it_is_encoded_is_shown_as_a_step_of_its_job(rig: Make) -> None:
    encoding, go_on = threading.Event(), threading.Event()

    def pack(value: Any) -> Any:
        encoding.set()
        assert go_on.wait(30)
        return value

    async def handle(data: Any, job: Any) -> TaskResult:
        return TaskResult(1, pack)

    batch = rig(handle, jobs("a", limits=KEEPS), NOTHING)
    worker = threading.Thread(target=batch.step)
    worker.start()
    assert encoding.wait(30)
    assert batch.slot.words[STEP]
    assert batch.slot.words[LENIENCE]
    go_on.set()
    worker.join(30)
    assert (batch.slot.words[STEP], batch.slot.words[LENIENCE]) == (0, 0)


def test_an_error_of_forq_on_the_event_loop_is_raised_in_the_worker(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(data: Any, job: Any) -> None:
        pass

    batch = rig(handle, jobs("a", "b"))

    def broken(progress: BatchProgress, run: Run) -> None:
        raise OSError("the supervisor is gone")

    monkeypatch.setattr(batch.loop, "_continue_batch", broken)
    with pytest.raises(OSError, match="the supervisor is gone"):
        batch.step()


class RaisingLock:
    """Raises when the worker's thread waits, as a signal handler or another thread may do."""

    def __init__(self, lock: Any, exc: BaseException, before: Callable[[], object]) -> None:
        self._lock = lock
        self._exc: BaseException | None = exc
        self._before = before
        self.release = lock.release

    def acquire(self, timeout: float = -1) -> bool:
        if self._exc is not None:
            self._before()
            raised, self._exc = self._exc, None
            raise raised
        return bool(self._lock.acquire(timeout=timeout))


def raise_while_waiting(
    batch: AsyncRig, monkeypatch: pytest.MonkeyPatch, before: Callable[[Chain], Callable[[], object]]
) -> None:
    begin = batch.attempts._event_loop.begin

    def begin_with_lock(run: Run, advance: Any = None) -> Chain:
        chain = begin(run, advance)
        chain.ended = RaisingLock(chain.ended, KeyboardInterrupt("stop"), before(chain))  # type: ignore[assignment]
        return chain

    monkeypatch.setattr(batch.attempts._event_loop, "begin", begin_with_lock)


def test_an_exception_in_the_waiting_thread_fails_the_job_that_runs(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    began, cleaned_up = threading.Event(), threading.Event()

    async def handle(data: Any, job: Any) -> None:
        if job.id == "a":
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                cleaned_up.set()

    batch = rig(handle, jobs("a", "b"), jobs(fence="7"), NOTHING)
    raise_while_waiting(batch, monkeypatch, lambda chain: lambda: began.wait(30))
    batch.loop._stop.set()
    monkeypatch.setattr(batch.loop._stop, "is_set", lambda: bool(batch.loop._failed))
    batch.step()
    batch.loop.settle()
    (settled,) = [call for call in batch.consumer.calls if call.failed]
    assert (settled.failed[0], settled.failed[5]) == (b"a", "retriable")
    assert b"KeyboardInterrupt" in settled.failed[3]
    assert cleaned_up.is_set()


def test_an_exception_that_comes_when_the_batch_has_ended_is_ignored(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(data: Any, job: Any) -> None:
        pass

    batch = rig(handle, jobs("a", "b"), NOTHING)

    def over(chain: Chain) -> Callable[[], object]:
        lock = chain.ended
        # Acquired, but the thread does not learn it.
        return lambda: lock.acquire(timeout=30)

    raise_while_waiting(batch, monkeypatch, over)
    batch.step()
    batch.step()
    assert batch.done() == [b"a", b"b"]


def test_a_job_with_a_shorter_timeout_than_those_before_it_ends_in_time(rig: Make) -> None:
    """The worker's thread waits for the deadline of the first job."""

    async def handle(data: Any, job: Any) -> None:
        await asyncio.sleep(60 if job.id == "b" else 0)

    flat = [b"a", b"p5 1000000\n[null,null,1]", b"b", b"o5 1000000 0 0 0 0 0 t=50\n[null,null,1]", *jobs("c").jobs]
    turn = Turn(paused=False, held=True, refused=[], fence="7", limits=LIMITS, jobs=flat)
    batch = rig(handle, turn, jobs(fence="7"), NOTHING)
    batch.step()
    settled = batch.consumer.calls[1]
    assert (settled.done[::3], settled.failed[0], settled.failed[5]) == ([b"a"], b"b", "timeout")
    batch.step()
    assert batch.done() == [b"a", b"c"]
    assert batch.unguarded == 1, "the thread of the worker has sent it"


def test_a_job_that_has_ended_never_looks_like_one_that_runs_without_a_coroutine(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the chain ends, code that holds the interpreter may come next on the loop, before the worker's thread."""
    seen: list[tuple[int, bool, int]] = []

    async def handle(data: Any, job: Any) -> None:
        if job.id == "b":
            batch.loop._stop.set()

    class Lock:
        def __init__(self, lock: Any) -> None:
            self.acquire = lock.acquire
            self._lock = lock

        def release(self) -> None:
            seen.append((batch.word.index, batch.word.running, batch.slot.words[LENIENCE]))
            self._lock.release()

    batch = rig(handle, jobs("a", "b", "c"), NOTHING)
    begin = batch.attempts._event_loop.begin

    def begin_with_lock(run: Run, advance: Any = None) -> Chain:
        held = threading.Event()

        def advance_when_replaced(run: Run) -> Run | None:
            assert held.wait(30)
            following: Run | None = advance(run)
            return following

        chain = begin(run, advance_when_replaced)
        chain.ended = Lock(chain.ended)  # type: ignore[assignment]
        held.set()
        return chain

    monkeypatch.setattr(batch.attempts._event_loop, "begin", begin_with_lock)
    batch.step()
    assert seen == [(2, False, 0)]


def test_a_loop_with_a_task_factory_of_the_user_runs_batches(rig: Make) -> None:
    async def handle(data: Any, job: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coroutine, **more: asyncio.Task(coroutine, loop=loop, **more))
        await asyncio.sleep(0)

    batch = rig(handle, jobs("a", "b", "c"), NOTHING)
    batch.step()
    assert batch.chains == 1
    batch.step()
    assert batch.done() == [b"a", b"b", b"c"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks_do_not_run_inside_one_another(rig: Make) -> None:
    depths: list[int] = []

    async def handle(data: Any, job: Any) -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        depths.append(len(inspect.stack(0)))

    rig(handle, jobs(*(f"j{number}" for number in range(20)))).step()
    assert len(set(depths[1:])) == 1


def test_a_job_fails_if_its_event_loop_cannot_start(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(data: Any, job: Any) -> None:
        pass

    batch = rig(handle, jobs("a"), NOTHING)

    def no_more() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", no_more)
    batch.step()
    batch.loop.settle()
    failed = batch.consumer.calls[1].failed
    assert failed[0] == b"a"
    assert b"Too many open files" in failed[3]


def test_an_interrupted_job_is_in_no_statistics(rig: Make) -> None:
    async def handle(data: Any, job: Any) -> None:
        if job.id == "a":
            batch.loop.cancel(batch.slot.position, Cancelled.RETURNED, "killed")
            await asyncio.sleep(60)

    counted: list[list[bytes]] = []
    batch = rig(handle, jobs("a", "b", "c"), jobs(fence="7"), NOTHING)
    stats = SimpleNamespace(count=lambda fence, jobs, micros, *rest: counted.append([job for job, _ in jobs]))
    batch.loop._stats = cast(Any, stats)
    claimed = batch.loop._claim()
    batch.loop._run_batch(claimed)
    batch.loop._count_batch(cast(Any, stats), claimed)
    assert counted == [[b"b", b"c"]]


def test_runs_are_freed_without_the_garbage_collector(rig: Make) -> None:
    """Thousands per second would keep it busy."""

    async def handle(data: Any, job: Any) -> None:
        await asyncio.sleep(0)

    def runs() -> int:
        return sum(type(each) is Run for each in gc.get_objects())

    gc.collect()
    before = runs()
    gc.disable()
    try:
        rig(handle, jobs("a", "b", "c")).step()
        wait_until(lambda: runs() == before, what="all runs are freed")
    finally:
        gc.enable()
