"""One attempt: the arguments of the handler, and every possible outcome."""

import asyncio
import copy
import ctypes
import os
import pickle
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from forq import App, Job, Permanent, RetryAt, Snooze
from forq.broker.claim import Limits
from forq.broker.record import pack_body
from forq.errors import UsageError
from forq.procs.scoreboard import Scoreboard, Slot, pack_position
from forq.workers.attempt import AttemptRunner, read_job
from forq.workers.handlers import Handlers
from tests.support.drive.wait import wait_until

PLAIN = b"p3 1700000000123456\n" + pack_body({"a": [1, None]}, "mine", "mail")
COUNTED = b"c3 1700000000123456 1 2 3\n" + pack_body({"a": [1, None]}, None, None)


def attempt(handler: Any, record: bytes = PLAIN, types: tuple[str | None, ...] = (None, "mail")) -> Any:
    attempts = AttemptRunner("q", Handlers(dict.fromkeys(types, handler)))
    failure = attempts.run("id1", record, 9)
    attempts.raised = None
    return None if failure is None else orjson.loads(failure.error)


@pytest.mark.spec("Q2", "Q33", "M2")
def test_the_handler_gets_the_data_and_a_job_without_it() -> None:
    got: list[tuple[Any, Job]] = []
    assert attempt(lambda data, job: got.append((data, job))) is None
    data, job = got[0]
    assert data == {"a": [1, None]}
    assert (job.queue, job.id, job.identifier, job.type, job.priority) == ("q", "id1", "mine", "mail", 3)
    assert (job.enqueued_at, job.fence) == (1700000000.123456, 9)
    assert (job.retry_count, job.stall_count, job.timeout_count) == (0, 0, 0)
    assert not hasattr(job, "data")


def test_what_a_handler_did_not_read_can_be_read_later() -> None:
    """The job of a plain record decodes its time and its priority when they are read."""
    kept: list[Job] = []
    assert attempt(lambda data, job: kept.append(job)) is None
    for each in (pickle.loads(pickle.dumps(kept[0])), copy.copy(kept[0]), kept[0]):
        assert type(each) is Job
        assert (each.priority, each.enqueued_at, each.run_id) == (3, 1700000000.123456, "id1@1700000000123456")
        assert (each.attempt, each.snoozes, each.trace, each.batch, each.tick) == (1, 0, None, None, None)
        assert (each.membership, each.is_last, each.should_stop) == (None, False, False)


def test_a_job_of_a_plain_record_has_every_attribute_of_a_job() -> None:
    _, plain = read_job("q", "id1", PLAIN, 9)
    made = Job("q", "id1", "mine", "mail", 3, 1700000000.123456, 9)
    names = [name for name in dir(made) if name != "results" and not callable(getattr(made, name))]
    assert len(names) > 20
    plain._read_head()
    assert {name: getattr(plain, name) for name in names} == {name: getattr(made, name) for name in names}


def test_every_attribute_can_be_set() -> None:
    """Users' tests make a job, and then let it be older, or of another priority."""
    _, job = read_job("q", "id1", PLAIN, 9)
    job.priority, job.retry_count = 7, 2
    assert (job.priority, job.enqueued_at, job.attempt) == (7, 1700000000.123456, 3)
    job.enqueued_at = 5.5
    assert (job.priority, job.enqueued_at) == (7, 5.5)


def test_a_record_may_have_a_trace_context() -> None:
    _, job = read_job("q", "id1", b'p5 1\n[null,null,5,{"traceparent":"00-1"}]', 9)
    assert job.trace == {"traceparent": "00-1"}


def test_counts_are_read_and_the_identifier_defaults_to_the_id() -> None:
    _, job = read_job("q", "id1", COUNTED, 9)
    assert (job.retry_count, job.stall_count, job.timeout_count, job.identifier) == (1, 2, 3, "id1")


@pytest.mark.spec("Q34")
@pytest.mark.parametrize("value", [None, 0, False, "x", Exception("returned, not raised")])
def test_a_handler_that_returns_has_succeeded(value: Any) -> None:
    assert attempt(lambda data, job: value) is None


@pytest.mark.spec("Q34")
@pytest.mark.parametrize("exc", [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), Permanent("never")])
def test_any_exception_is_a_failure_with_name_message_and_traceback(exc: BaseException) -> None:
    def handle(data: Any, job: Job) -> None:
        raise exc

    error = attempt(handle)
    assert (error["name"], error["message"]) == (type(exc).__name__, str(exc))
    assert error["kind"] == ("permanent" if isinstance(exc, Permanent) else "retriable")
    assert "in handle" in error["traceback"]


class Shy(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise KeyboardInterrupt


class Text(str):
    __slots__ = ()

    def encode(self, *arguments: Any, **names: Any) -> bytes:
        raise GeneratorExit


def _raise(*arguments: Any) -> Any:
    raise SystemExit(78)


# Misbehaving exception classes, and the message stored for each. Created in the test, because pytest inspects
# parameters.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"__str__": _raise, "__repr__": _raise}, "(unprintable: SystemExit)"),
    "wishes": ({"kind": property(_raise), "retry_at": property(_raise)}, "m"),
    "class": ({"__class__": property(_raise)}, "m"),
    "text of its own": ({"__str__": lambda self: Text("m")}, "m"),
    "pickling": ({"__reduce__": _raise, "__reduce_ex__": _raise, "__eq__": _raise}, "m"),
    "attributes": ({"__getattribute__": _raise}, "m"),
    "end": ({"__del__": _raise}, "m"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("metaclass", [type, Shy])
@pytest.mark.parametrize("what", ODD)
def test_an_exception_whose_methods_raise_is_still_a_failure(what: str, metaclass: type) -> None:
    methods, message = ODD[what]

    def handle(data: Any, job: Job) -> None:
        raise metaclass("Odd", (BaseException,), methods)("m")

    error = attempt(handle)
    assert (error["name"], error["message"], error["kind"]) == ("Odd", message, "retriable")


def test_a_result_whose_methods_raise_is_still_a_success() -> None:
    odd = type("Odd", (), {"__class__": property(_raise), "__getattribute__": _raise, "__bool__": _raise})
    assert attempt(lambda data, job: odd()) is None


def test_a_coroutine_is_awaited_and_its_exception_is_a_failure() -> None:
    ran: list[int] = []

    async def fine(data: Any, job: Job) -> None:
        await asyncio.sleep(0)
        ran.append(1)

    async def fails(data: Any, job: Job) -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    assert attempt(fine) is None
    assert ran == [1]
    assert attempt(fails)["message"] == "later"


def test_all_coroutines_of_a_worker_share_one_event_loop_which_runs_between_jobs() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    steps: list[str] = []

    async def leave_a_task(data: Any, job: Job) -> None:
        loops.append(asyncio.get_running_loop())
        loops[-1].create_task(note_later())

    async def note_later() -> None:
        await asyncio.sleep(0)
        steps.append("went on")

    async def wait(data: Any, job: Job) -> None:
        loops.append(asyncio.get_running_loop())
        while not steps:
            await asyncio.sleep(0)

    workers = [AttemptRunner("q", Handlers({None: leave_a_task, "mail": wait})) for _ in range(2)]
    try:
        assert workers[0].run("a", COUNTED, 1) is None
        wait_until(lambda: steps, what="a task that the job did not await continues after its end")
        assert workers[0].run("b", PLAIN, 1) is None
        assert workers[1].run("c", PLAIN, 1) is None
    finally:
        for worker in workers:
            worker.close()
    assert loops[0] is loops[1] is not loops[2]


def test_an_unknown_type_fails_permanently_and_lists_the_known_types() -> None:
    error = attempt(lambda data, job: None, types=("other",))
    assert (error["kind"], "'mail'" in error["message"], "other" in error["message"]) == ("permanent", True, True)


@pytest.mark.parametrize("record", [b"", b"rubbish", b"p5 1\n{not json", b"p5 x\n[null,null,1]", b"c5 1 2\n[1,2,3]"])
def test_a_broken_record_fails_its_job_but_not_the_worker(record: bytes) -> None:
    assert attempt(lambda data, job: None, record)["name"] == "InvalidData"


@pytest.mark.parametrize("raises", [False, True])
def test_a_process_that_c_code_of_a_handler_forked_ends_when_it_returns(raises: bool) -> None:
    pids: list[int] = []

    def handle(data: Any, job: Job) -> None:
        pids.append(ctypes.CDLL(None).fork())
        if raises:
            raise ValueError("in both")

    assert (attempt(handle) is not None) is raises
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0


@pytest.mark.spec("Q37")
@pytest.mark.parametrize(
    ("retry_at", "expected"),
    [(1700000000.5, 1700000000500), (None, None), ("soon", None), (1e30, None), (-1, None), (float("nan"), None)],
)
def test_only_a_valid_retry_time_of_an_exception_is_used(retry_at: Any, expected: int | None) -> None:
    def handle(data: Any, job: Job) -> None:
        raise RetryAt(retry_at)

    failure = AttemptRunner("q", Handlers({"mail": handle})).run("id1", PLAIN, 9)
    assert failure is not None
    assert failure.retry_at_ms == expected


def slot_with_job(started_ns: int, timeout_ms: int) -> Slot:
    board = Scoreboard.create(1)
    slot = board.slot(board.take())
    slot.started_ns, slot.timeout_ms = started_ns, timeout_ms
    slot.position = pack_position(started_ns, 1, 0, True)
    return slot


class TooSleepy(Snooze):
    def __init__(self) -> None:
        """Sets no seconds."""


@pytest.mark.parametrize(
    ("snooze", "seconds"),
    [(Snooze(30), 30), (Snooze(0.5), 0.5), (Snooze(timedelta(minutes=5), "busy"), 300), (TooSleepy(), 60)],
)
def test_a_snooze_is_relative_to_the_time_of_the_server(snooze: Snooze, seconds: float) -> None:
    def handle(data: Any, job: Job) -> None:
        raise snooze

    slot = slot_with_job(time.monotonic_ns() - 2 * 10**9, 0)
    claimed_ms = 1_600_000_000_000
    failure = AttemptRunner("q", Handlers({"mail": handle}), slot).run("id1", PLAIN, claimed_ms * 1000)
    assert failure is not None
    assert (failure.kind, orjson.loads(failure.error)["traceback"]) == ("snooze", "")
    assert failure.retry_at_ms is not None
    assert 0 <= failure.retry_at_ms - claimed_ms - 2000 - seconds * 1000 < 1000


@pytest.mark.parametrize("seconds", [-1, float("nan"), 1e9, "soon", None, True])
def test_an_invalid_snooze_says_what_is_allowed(seconds: Any) -> None:
    with pytest.raises(UsageError, match="seconds from 0 to 31536000"):
        Snooze(seconds)


def test_attributes_of_a_job_that_runs() -> None:
    jobs: list[Job] = []
    attempts = AttemptRunner("q", Handlers({None: lambda data, job: jobs.append(job)}), slot_with_job(1, 0))
    attempts.limits = Limits(0, 1, 0)
    attempts.run("id1", COUNTED, 9)
    (job,) = jobs
    assert (job.attempt, job.run_id, job.tick, job.snoozes) == (7, "id1@1700000000123456", None, 0)
    copy = pickle.loads(pickle.dumps(Job("q", "a", "a", None, 5, 1.5, 9, snoozes=2, tick_ms=1_700_000_000_000)))
    assert (copy.snoozes, copy.tick, copy.attempt) == (2, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC), 1)
    assert (copy.should_stop, copy.is_last) == (False, False)


def test_should_stop_follows_the_process_the_deadline_and_the_end_of_the_job() -> None:
    second = 10**9
    slot = slot_with_job(time.monotonic_ns() - 50 * second, timeout_ms=0)
    attempts = AttemptRunner("q", Handlers({}), slot)

    def should_stop() -> bool:
        return attempts.should_stop(position)

    position = slot.position
    assert not should_stop()
    slot.timeout_ms = 60_000
    assert not should_stop()
    slot.timeout_ms = 54_000
    assert should_stop(), "5 s of 54 are left"
    slot.timeout_ms = 0
    attempts.stopping = lambda: True
    assert should_stop()
    attempts.stopping = lambda: False
    attempts.killed = position
    assert should_stop()
    attempts.killed = 1
    assert not should_stop()
    slot.position = position & ~1
    assert should_stop(), "the job has ended"


def test_exception_names_are_truncated_to_200_characters() -> None:
    def handle(data: Any, job: Job) -> None:
        raise type("E" * 10_000_000, (Exception,), {})("why")

    error = attempt(handle)
    assert (error["name"], error["message"]) == ("E" * 200, "why")
    assert len(orjson.dumps(error)) < 10_000


APP = App("q")


@APP.task(timeout="30s", max_retries=9)
def send() -> None: ...


def tasks_of_an_app() -> AttemptRunner:
    return AttemptRunner("q", Handlers({None: APP}))


def test_a_broken_record_has_no_options_of_the_task_that_ran_before() -> None:
    attempts = tasks_of_an_app()
    assert attempts.run("a", b"p5 1700000000123456\n" + pack_body({}, None, "send"), 1) is None
    assert attempts.task_options is not None
    assert attempts.run("b", b"p5 1700000000123456\nbroken", 1) is not None
    assert attempts.task_options is None


def test_a_record_whose_type_is_not_text_fails_and_does_not_end_the_worker() -> None:
    attempts, record = tasks_of_an_app(), b'p5 1700000000123456\n[null,["send"],{}]'
    assert attempts.own_timeout_ms(b"a", record, 1) is None
    assert attempts.run("a", record, 1) is not None
