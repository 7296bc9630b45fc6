"""A worker and the results that jobs pass on: it sends those that other jobs use, and reads those that its job uses."""

import pickle
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

import forq
from forq import Job
from forq.broker.claim import Limits, Turn
from forq.broker.record import pack_body, stored_options
from forq.errors import NoResult, RedisUnavailable, UsageError
from forq.job import Inputs
from forq.job_options import PACKED
from forq.queue_spec import read_program
from forq.workers.attempt import AttemptRunner, read_job
from forq.workers.exec_handlers import ExecOnceHandler
from forq.workers.handlers import Handlers
from tests.support.drive.programs import python_program
from tests.workers.exec_attempts import Made
from tests.workers.loop_rig import NOTHING, Rig

LIMITS = Limits(timeout_ms=0, size=1, priority=0, max_result_bytes=100)


app = forq.App("q")


@app.task(keep_done=0)
def add(number: int) -> int:
    return number + 1


def record(options: str, data: Any = None, job_type: str | None = None) -> bytes:
    return f"o5 1700000000123456 0 0 0 0 0 {options}\n".encode() + pack_body(data, None, job_type)


def sent(options: str, value: Any = 7, queue_keeps: bool = False) -> tuple[bytes | None, int | None]:
    """What the worker sends of a job that returns this value: the result, and how long it is kept by its own option."""
    attempts = AttemptRunner("q", Handlers({None: lambda data, job: value}))
    attempts.limits = LIMITS
    attempts.max_result_bytes = LIMITS.max_result_bytes if queue_keeps else 0
    assert attempts.run("id1", record(options), 9) is None
    return attempts.result, attempts.keep_done_ms


def test_the_marks_of_a_claimed_job_are_read_and_are_no_options_of_a_stored_job() -> None:
    options = stored_options(record("t=5,w=1,i=20,I=3"))
    assert options is not None
    assert (options.timeout_ms, options.is_result_wanted, options.input_count, options.input_use) == (5, True, 20, 3)
    assert options.pack() == "t=5"
    assert [bool(re.search(PACKED, each)) for each in ("t=5", "w=1", "i=20", "t=5,I=3")] == [True, False, False, False]


@pytest.mark.parametrize(
    ("options", "queue_keeps", "expected"),
    [
        ("w=1", False, (b"7", None)),
        ("w=1", True, (b"7", None)),
        ("k=0,w=1", False, (b"7", 0)),
        ("k=0,w=1", True, (b"7", 0)),
        ("k=60000,w=1", False, (b"7", 60000)),
        ("t=5", False, (None, None)),
        ("k=0", True, (b"", 0)),
    ],
)
def test_a_wanted_result_is_sent_whatever_is_kept(
    options: str, queue_keeps: bool, expected: tuple[bytes | None, int | None]
) -> None:
    assert sent(options, 7, queue_keeps) == expected


def test_a_wanted_result_of_a_task_that_keeps_none_is_sent() -> None:
    attempts = AttemptRunner("q", Handlers({None: app}))
    attempts.limits = LIMITS
    assert attempts.run("id1", record("w=1", {"number": 1}, "add"), 9) is None
    assert (attempts.result, attempts.keep_done_ms) == (b"2", 0)


def test_the_reason_is_sent_in_place_of_a_wanted_result_that_cannot_be_used() -> None:
    assert sent("w=1", "x" * 99)[0] == b"!it is longer than max_data = 100 bytes"
    assert (sent("w=1", object())[0] or b"").startswith(b"!the handler's result is not JSON")


def runner(handler: Any, inputs: Callable[[str, int], Any]) -> AttemptRunner:
    attempts = AttemptRunner("q", Handlers({None: handler}))
    attempts.read_inputs = inputs
    return attempts


def results_of(*packed: bytes, handler: Any = None) -> Any:
    got: list[Any] = []
    attempts = runner(handler or (lambda data, job: got.append(job.results())), lambda job_id, count: list(packed))
    failure = attempts.run("id1", record(f"i={len(packed)},I=1"), 9)
    if failure is not None:
        raised, attempts.raised = attempts.raised, None
        assert raised is not None
        raise raised
    return got[0]


def test_a_handler_reads_the_results_in_the_order_of_the_dependencies() -> None:
    assert results_of(b'done {"a":[1]}', b"done null", b"released 3") == [{"a": [1]}, None, 3]


def test_a_dependency_that_has_not_succeeded_has_the_result_none() -> None:
    assert results_of(b"dead ", b"cancelled ", b"expired ", b"", b"done 1") == [None, None, None, None, 1]


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"done !its result was not kept", "its result was not kept"),
        (b"done ", "it was lost"),
        (b"done {", "is not JSON"),
    ],
)
def test_a_dependency_without_a_usable_result_is_named(packed: bytes, reason: str) -> None:
    with pytest.raises(NoResult, match=f"dependency 2 of job 'id1'.*{reason}"):
        results_of(b"done 1", packed)


def test_the_error_can_be_caught_and_the_handler_runs() -> None:
    def handle(data: Any, job: Job) -> None:
        with pytest.raises(NoResult):
            job.results()

    assert runner(handle, lambda job_id, count: [b"done !no"]).run("id1", record("i=1,I=1"), 9) is None


def test_a_job_without_results_says_how_to_get_them() -> None:
    _, job = read_job("q", "id1", record("t=5"), 9)
    with pytest.raises(UsageError, match=r"job 'id1' has no results of other jobs.*with_results=True"):
        job.results()


def test_the_inputs_of_exactly_this_job_are_read() -> None:
    asked: list[tuple[str, int]] = []

    def read(job_id: str, count: int) -> list[bytes]:
        asked.append((job_id, count))
        return [b"done 1"] * count

    attempts = runner(lambda data, job: None, read)
    attempts.run("id1", record("i=3,I=1"), 9)
    attempts.run("id2", record("t=5"), 9)
    attempts.run("id3", b"p5 1700000000123456\n" + pack_body(1, None, None), 9)
    assert asked == [("id1", 3)]


def unreachable(job_id: str, count: int) -> list[bytes]:
    raise RedisUnavailable("no answer")


@pytest.mark.parametrize(
    ("read", "reason"), [(unreachable, "cannot be read: no answer"), (lambda job_id, count: None, "are gone")]
)
def test_a_job_whose_inputs_cannot_be_read_is_snoozed(read: Any, reason: str) -> None:
    ran: list[Any] = []
    attempts = runner(lambda data, job: ran.append(data), read)
    failure = attempts.run("id1", record("i=1,I=1"), 9)
    assert failure is not None
    assert failure.kind == "snooze"
    assert reason in orjson.loads(failure.error)["message"]
    assert failure.retry_at_ms is not None
    assert 0 < failure.retry_at_ms - time.time() * 1000 < 1500
    assert not ran
    attempts.raised = None


def test_a_pickled_job_has_its_results() -> None:
    job = Job("q", "id1", "id1", None, 5, 0.0, 9, inputs=Inputs(2, 1, (b"done 1", b"dead ")))
    assert pickle.loads(pickle.dumps(job)).results() == [1, None]


def test_each_call_returns_results_of_its_own() -> None:
    job = Job("q", "id1", "id1", None, 5, 0.0, 9, inputs=Inputs(1, 1, (b"done []",)))
    job.results()[0].append(1)
    assert job.results() == [[]]


def test_the_deadline_of_a_coroutine_counts_the_time_to_read_its_results() -> None:
    began: list[float] = []
    due: list[float | None] = []

    async def handle(data: Any, job: Job) -> None:
        assert job.results() == [1]
        assert attempts._run is not None
        due.append(attempts._run[1].due)

    def read(job_id: str, count: int) -> list[bytes]:
        began.append(time.monotonic())
        time.sleep(0.5)
        return [b"done 1"]

    attempts = runner(handle, read)
    attempts._slot, attempts.timeout_seconds = Rig(handle).slot, 30.0
    assert attempts.run("id1", record("i=1,I=1"), 9) is None
    attempts.close()
    assert due[0] is not None
    assert 29.9 < due[0] - began[0] < 30.5


class Batch(Rig):
    """A batch of three jobs of an async handler, of which the second uses results."""

    def __init__(self, read: Callable[[str, int], Any]) -> None:
        self.ran: list[tuple[str, Any]] = []

        async def handle(data: Any, job: Job) -> None:
            self.ran.append((job.id, job.results() if job.id == "b" else None))

        packed = {b"a": record("t=0"), b"b": record("i=1,I=1"), b"c": record("t=0")}
        flat = [part for pair in packed.items() for part in pair]
        super().__init__(handle, Turn(False, True, [], "7", LIMITS, flat), NOTHING, NOTHING, NOTHING)
        self.loop._attempts.read_inputs = read


def test_a_job_in_a_batch_of_coroutines_reads_its_inputs_in_the_thread_of_the_worker() -> None:
    threads: list[int] = []

    def read(job_id: str, count: int) -> list[bytes]:
        threads.append(threading.get_ident())
        assert batch.word.running
        assert batch.word.index == 1
        return [b"done 1"]

    batch = Batch(read)
    batch.step()
    batch.step()
    assert batch.ran == [("a", None), ("b", [1]), ("c", None)]
    assert threads == [threading.get_ident()]
    assert [job_id for call in batch.consumer.calls for job_id in call.done[::3]] == [b"a", b"b", b"c"]
    batch.loop.close()


def test_the_loop_reads_inputs_with_the_connection_of_its_worker() -> None:
    rig = Rig(lambda data, job: None)
    assert rig.loop._attempts.read_inputs == rig.consumer.read_inputs


def with_inputs(*packed: bytes) -> Job:
    return Job("q", "j1", "j1", "any", 5, 0.0, 9, inputs=Inputs(len(packed), 1, packed))


def test_a_program_gets_the_results_with_its_job(tmp_path: Path, made: Made) -> None:
    handler = made(
        python_program(
            tmp_path, 'say("job_finished", uuid=payload["uuid"], result=payload.get("results"))\nreturn False'
        )
    )
    assert handler(None, with_inputs(b'done {"a":1}', b"dead ")) == [{"a": 1}, None]
    assert handler(None, Job("q", "j2", "j2", None, 5, 0.0, 9)) is None


def test_a_program_does_not_start_a_job_without_a_usable_result(tmp_path: Path, made: Made) -> None:
    handler = made(python_program(tmp_path, ""))
    with pytest.raises(NoResult):
        handler(None, with_inputs(b"done !no"))


def test_a_program_that_is_started_for_each_job_gets_results_as_a_second_line(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    handler = ExecOnceHandler(read_program(f"exec-once:/bin/sh -c 'cat > {seen}'"))
    handler({"n": 1}, with_inputs(b"done 5", b"dead "))
    assert seen.read_bytes() == b'{"n":1}\n[5,null]\n'
    handler({"n": 2}, Job("q", "j2", "j2", None, 5, 0.0, 9))
    assert seen.read_bytes() == b'{"n":2}\n'
