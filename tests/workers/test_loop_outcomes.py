"""What the loop of a worker sends and logs about jobs that ran: results, failures, refused settles."""

import asyncio
import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest

from forq import App
from forq.broker.claim import Limits, Turn
from forq.broker.scripts import Fate
from forq.errors import Fenced, OutcomeUnknown
from forq.procs.scoreboard import State, unpack_position
from forq.workers import job_log
from forq.workers.event_loop import Cancelled
from forq.workers.loop import DROPPED_LOG_INTERVAL_NS, MAX_RESULTS_BYTES, REFUSED_LOG_INTERVAL_NS
from tests.support.drive.wait import wait_until
from tests.workers.loop_rig import LIMITS, NOTHING, Rig, jobs


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the logging thread may take long to start."""
    monkeypatch.setattr(job_log, "WRITE_WAIT_SECONDS", 30.0)


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
