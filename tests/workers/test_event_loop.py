"""The event loop that the coroutines of a process share: results, cancellation, forks, and finding the job that blocks
it."""

import asyncio
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import orjson
import pytest

from forq import Job
from forq.broker.record import pack_body
from forq.output.writer import CURRENT_JOB
from forq.procs.scoreboard import Scoreboard, Slot, State, pack_position
from forq.workers import event_loop as event_loop_module
from forq.workers.attempt import AttemptRunner, Failure
from forq.workers.event_loop import MAX_SELECT_FD, Cancelled, EventLoop, FineSelector
from forq.workers.handlers import Handlers
from tests.support.drive.wait import wait_until

RECORD = b"p5 1700000000123456\n" + pack_body(1, None, None)


class Workers:
    """Workers of one process, with a slot each."""

    def __init__(self, handler: Callable[[Any, Job], Any], number: int) -> None:
        self.event_loop = EventLoop()
        board = Scoreboard.create(number)
        self.slots = [board.slot(board.take()) for _ in range(number)]
        self.attempts = [
            AttemptRunner("q", Handlers({None: handler}), slot, None, None, self.event_loop) for slot in self.slots
        ]
        self.threads: list[threading.Thread] = []
        self._turns = count(1)

    def run(self, worker: int, job_id: str = "j") -> Failure | None:
        slot = self.slots[worker]
        slot.started_ns = time.monotonic_ns()
        slot.job = job_id.encode()
        slot.state = State.BUSY
        # Two jobs never have the same position.
        slot.position = pack_position(slot.started_ns, next(self._turns), worker, True)
        failure = self.attempts[worker].run(job_id, RECORD, 1)
        self.attempts[worker].raised = None
        return failure

    def start(self, worker: int, job_id: str) -> list[Failure | None]:
        """In a thread; the outcome is put into the list."""
        outcome: list[Failure | None] = []
        self.threads.append(threading.Thread(target=lambda: outcome.append(self.run(worker, job_id)), daemon=True))
        self.threads[-1].start()
        return outcome

    def join(self) -> None:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        self.threads.clear()


Made = Callable[..., Workers]


@pytest.fixture
def make() -> Iterator[Made]:
    made: list[Workers] = []

    def workers(handler: Callable[[Any, Job], Any], number: int = 1) -> Workers:
        made.append(Workers(handler, number))
        return made[-1]

    yield workers
    for each in made:
        each.join()
        each.event_loop.close()
        assert not each.event_loop.started


def error(failure: Failure | None) -> Any:
    assert failure is not None
    return orjson.loads(failure.error)


def test_jobs_of_all_workers_share_a_lock_and_a_pool(make: Made) -> None:
    lock, pool, both_used = asyncio.Lock(), asyncio.Queue[int](), asyncio.Event()
    for connection in range(2):
        pool.put_nowait(connection)
    total, inside, most = 0, 0, 0

    async def add(data: Any, job: Job) -> None:
        nonlocal total, inside, most
        connection = await pool.get()
        inside += 1
        most = max(most, inside)
        if inside == 2:
            both_used.set()
        await asyncio.wait_for(both_used.wait(), 30)
        async with lock:
            before = total
            await asyncio.sleep(0.001)
            total = before + 1
        inside -= 1
        pool.put_nowait(connection)

    workers = make(add, 4)
    for _ in range(3):
        outcomes = [workers.start(number, f"j{number}") for number in range(4)]
        workers.join()
        assert outcomes == [[None]] * 4
    assert (total, most) == (12, 2)


def test_a_coroutine_has_its_own_copy_of_the_context_with_its_job(make: Made) -> None:
    seen: list[str | None] = []

    async def handle(data: Any, job: Job) -> None:
        seen.append(CURRENT_JOB.get())
        await asyncio.gather(*(asyncio.to_thread(lambda: seen.append(CURRENT_JOB.get())) for _ in range(2)))

    workers = make(handle)
    workers.run(0, "first")
    workers.run(0, "second")
    assert (seen, CURRENT_JOB.get()) == (["first"] * 3 + ["second"] * 3, None)


@pytest.mark.parametrize("exc", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
@pytest.mark.parametrize("in_task", [False, True])
def test_an_exception_ends_its_job_and_not_the_loop(make: Made, exc: BaseException, in_task: bool) -> None:
    release = threading.Event()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise exc

    async def handle(data: Any, job: Job) -> None:
        if job.id == "other":
            while not release.is_set():
                await asyncio.sleep(0.001)
        elif in_task:
            await asyncio.create_task(fail())
        else:
            await fail()

    workers = make(handle, 2)
    other = workers.start(0, "other")
    name = error(workers.run(1))["name"]
    # asyncio makes an own CancelledError of a task that raised one.
    assert name == type(exc).__name__
    release.set()
    workers.join()
    assert other == [None]


def test_a_handler_that_stops_the_loop_stops_no_other_job(make: Made) -> None:
    async def handle(data: Any, job: Job) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)

    workers = make(handle)
    assert [workers.run(0) for _ in range(3)] == [None] * 3


def test_a_task_that_user_code_cancels_before_its_first_step_fails(make: Made) -> None:
    async def handle(data: Any, job: Job) -> None:
        loop = asyncio.get_running_loop()
        create_task = loop.create_task

        def cancelled_task(coroutine: Any) -> Any:
            task = create_task(coroutine)
            task.cancel()
            return task

        loop.create_task = cancelled_task  # type: ignore[assignment]

    workers = make(handle)
    assert workers.run(0) is None
    assert error(workers.run(0))["name"] == "CancelledError"
    del workers.event_loop._loop.create_task  # type: ignore[union-attr]


def test_a_task_factory_that_raises_fails_the_job(make: Made) -> None:
    def refuse(loop: Any, coroutine: Any) -> Any:
        coroutine.close()
        raise ValueError("no tasks")

    async def handle(data: Any, job: Job) -> None:
        asyncio.get_running_loop().set_task_factory(refuse)

    workers = make(handle)
    assert workers.run(0) is None
    assert error(workers.run(0))["message"] == "no tasks"
    workers.event_loop._loop.set_task_factory(None)  # type: ignore[union-attr]


def test_a_coroutine_is_cancelled_at_its_deadline_unless_it_returns(make: Made) -> None:
    async def handle(data: Any, job: Job) -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if job.id == "raises":
                raise ValueError("instead") from None
            if job.id == "late":
                raise
        return 5

    workers = make(handle)
    workers.attempts[0].timeout_seconds = 0.05
    assert workers.run(0, "returns") is None
    late = workers.run(0, "late")
    assert (error(late)["kind"], error(late)["name"]) == ("timeout", "TimeoutError")
    assert error(late)["message"] == "cancelled at its deadline, after 0.05 s"
    assert "await asyncio.sleep(60)" in error(late)["traceback"]
    assert "/event_loop.py" not in error(late)["traceback"]
    assert error(workers.run(0, "raises"))["message"] == "instead"


@pytest.mark.parametrize("outcome", [Cancelled.REMOVED, Cancelled.RETURNED])
@pytest.mark.parametrize("position", ["its own", "any"])
def test_a_killed_coroutine_is_interrupted_whatever_it_raises(make: Made, outcome: Cancelled, position: str) -> None:
    began = threading.Event()

    async def handle(data: Any, job: Job) -> None:
        try:
            began.set()
            await asyncio.sleep(60)
        finally:
            if job.id == "raises":
                raise ValueError("instead")

    workers = make(handle)
    (attempts,), (slot,) = workers.attempts, workers.slots
    for job_id in ("cancelled", "raises"):
        began.clear()
        outcomes = workers.start(0, job_id)
        assert began.wait(30)
        assert slot.lenience_ms == 1000
        attempts.cancel(slot.position + 2, outcome, "killed")
        attempts.cancel(slot.position if position == "its own" else None, outcome, "killed")
        workers.join()
        (failure,) = outcomes
        assert failure is not None
        assert (failure.kind, failure.brief, failure.text()) == (outcome.value, b"killed", "killed by a user")
        assert "await asyncio.sleep(60)" in orjson.loads(failure.error)
        assert (attempts.raised, slot.lenience_ms) == (None, 0)


def test_a_kill_before_the_coroutine_starts_is_not_lost(make: Made) -> None:
    workers = make(lambda data, job: sleep(), 1)
    (attempts,), (slot,) = workers.attempts, workers.slots

    async def sleep() -> None:
        await asyncio.sleep(60)

    def kill_first(data: Any, job: Job) -> Any:
        attempts.cancel(slot.position, Cancelled.RETURNED, "killed")
        return sleep()

    attempts._handlers = Handlers({None: kill_first})
    failure = workers.run(0)
    assert failure is not None
    assert failure.kind == "interrupted"


def test_a_job_that_ends_normally_is_not_interrupted_by_a_late_kill(make: Made) -> None:
    async def handle(data: Any, job: Job) -> None:
        pass

    workers = make(handle)
    workers.run(0)
    workers.attempts[0].cancel(None, Cancelled.REMOVED, "killed")
    assert workers.run(0, "next") is None


def test_a_kill_that_comes_when_its_job_has_just_ended_does_not_cancel_the_next(make: Made) -> None:
    running, released = threading.Event(), threading.Event()

    async def handle(data: Any, job: Job) -> None:
        running.set()
        while not released.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)

    workers = make(handle)
    slot, attempts = workers.slots[0], workers.attempts[0]
    killed = pack_position(time.monotonic_ns(), 1, 7, True)
    outcome = workers.start(0, "next")
    assert running.wait(30)

    class Changing:
        """The slot at the moment when the worker starts the next job."""

        reads = 0

        @property
        def position(self) -> int:
            self.reads += 1
            return killed if self.reads == 1 else slot.position

    attempts._slot = cast(Slot, Changing())
    attempts.cancel(killed, Cancelled.REMOVED, "killed")
    attempts._slot = slot
    released.set()
    workers.join()
    assert outcome == [None]


@pytest.mark.parametrize("awaits", [False, True])
def test_a_forked_process_runs_no_other_job(make: Made, awaits: bool) -> None:
    released = threading.Event()
    read, write = os.pipe()
    pids: list[int] = []

    async def handle(data: Any, job: Job) -> None:
        if job.id == "other":
            while not released.is_set():
                await asyncio.sleep(0.001)
            os.write(write, b"x")
            return
        pid = os.fork()
        if pid == 0:
            released.set()
            if awaits:
                # As a forgotten child would: back to the loop of the parent.
                await asyncio.gather(asyncio.sleep(0), return_exceptions=True)
            return
        pids.append(pid)

    workers = make(handle, 2)
    other = workers.start(0, "other")
    wait_until(lambda: workers.slots[0].lenience_ms, what="the other job runs")
    assert workers.run(1, "forks") is None
    assert os.waitpid(pids[0], 0)[1] == 0
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    released.set()
    workers.join()
    assert other == [None]
    assert os.read(read, 10) == b"x"


def test_a_process_forked_by_a_task_of_a_job_runs_no_step_of_another(make: Made) -> None:
    read, write = os.pipe()
    pids: list[int] = []
    both = asyncio.Event()
    ready: list[str] = []

    async def forks() -> None:
        await both.wait()
        pid = os.fork()
        if pid:
            pids.append(pid)

    async def handle(data: Any, job: Job) -> None:
        task = asyncio.create_task(forks()) if job.id == "forks" else None
        await asyncio.sleep(0)
        ready.append(job.id)
        if task is not None:
            await task
            return
        # In the same pass of the loop as the fork, and after it.
        await both.wait()
        os.write(write, b"x")

    workers = make(handle, 2)
    outcomes = [workers.start(0, "forks")]
    wait_until(lambda: ready == ["forks"], what="it waits")
    outcomes.append(workers.start(1, "other"))
    wait_until(lambda: ready == ["forks", "other"], what="both wait")
    workers.event_loop.call(both.set)
    workers.join()
    assert outcomes == [[None], [None]]
    os.waitpid(pids[0], 0)
    assert os.read(read, 10) == b"x"


def steps(slots: list[Slot]) -> list[bool]:
    return [slot.step_ns > 0 for slot in slots]


@pytest.mark.parametrize("where", ["coroutine", "task", "callback"])
def test_the_slot_of_the_job_that_blocks_the_loop_shows_it(
    make: Made, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop_module, "BLOCKED_SECONDS", 0.05)
    blocked, unblock = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        assert unblock.wait(30)

    async def block_in_task() -> None:
        block()

    async def handle(data: Any, job: Job) -> None:
        if job.id == "waits":
            await asyncio.sleep(60)
        elif where == "coroutine":
            block()
        elif where == "task":
            await asyncio.gather(block_in_task(), asyncio.sleep(0.01))
        else:
            asyncio.get_running_loop().call_soon(block)
            await asyncio.sleep(0.01)

    workers = make(handle, 3)
    workers.attempts[0].timeout_seconds = 0.1
    waits = workers.start(0, "waits")
    wait_until(lambda: workers.slots[0].lenience_ms, what="it waits")
    blocks = workers.start(1, "blocks")
    assert blocked.wait(30)
    wait_until(lambda: steps(workers.slots) == [False, True, False], what="the blocker is shown")
    assert workers.slots[1].step_ns <= time.monotonic_ns()
    unblock.set()
    workers.join()
    assert (steps(workers.slots), blocks) == ([False] * 3, [None])
    assert error(waits[0])["kind"] == "timeout"


def test_tasks_that_jobs_leave_behind_are_cancelled_at_the_end(make: Made) -> None:
    ended: list[str] = []

    async def stay() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    kept: list[asyncio.Task[None]] = []

    async def handle(data: Any, job: Job) -> None:
        kept.append(asyncio.create_task(stay()))
        await asyncio.sleep(0)

    workers = make(handle)
    workers.run(0)
    workers.event_loop.close()
    assert ended == ["cancelled"]


def test_a_stubborn_task_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop_module, "CLOSE_SECONDS", 0.05)
    release = threading.Event()

    async def stay() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def handle(data: Any, job: Job) -> None:
        kept.append(asyncio.create_task(stay()))
        await asyncio.sleep(0)

    kept: list[asyncio.Task[None]] = []
    workers = Workers(handle, 1)
    workers.run(0)
    workers.event_loop.close()
    release.set()


def test_short_timers_are_exact_to_less_than_a_millisecond(make: Made) -> None:
    """epoll would round each of them up to the next millisecond."""
    late: list[float] = []

    async def handle(data: Any, job: Job) -> None:
        for _ in range(200):
            began = time.monotonic()
            await asyncio.sleep(0.0003)
            late.append(time.monotonic() - began - 0.0003)

    workers = make(handle)
    assert workers.run(0) is None
    assert min(late) < 0.0006


@pytest.mark.parametrize("largest_fd", [MAX_SELECT_FD, 0])
def test_a_selector_returns_ready_descriptors_before_a_short_timeout(
    monkeypatch: pytest.MonkeyPatch, largest_fd: int
) -> None:
    monkeypatch.setattr("forq.workers.event_loop.MAX_SELECT_FD", largest_fd)
    reader, writer = os.pipe()
    with FineSelector() as selector:
        key = selector.register(reader, selectors.EVENT_READ)
        began = time.monotonic()
        assert selector.select(0.002) == []
        assert time.monotonic() - began >= 0.002
        os.write(writer, b"x")
        assert selector.select(0.04) == [(key, selectors.EVENT_READ)]
    os.close(reader)
    os.close(writer)


def test_a_loop_of_the_users_policy_is_used(make: Made) -> None:
    class Loop(asyncio.SelectorEventLoop):
        pass

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return Loop()

    seen: list[type] = []

    async def handle(data: Any, job: Job) -> None:
        seen.append(type(asyncio.get_running_loop()))

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Policy())
    try:
        assert make(handle).run(0) is None
    finally:
        asyncio.set_event_loop_policy(before)
    assert seen == [Loop]
