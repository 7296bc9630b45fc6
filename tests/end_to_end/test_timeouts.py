"""Jobs that run past their timeout, in every way in which a handler can refuse to end."""

import statistics
import time
from collections.abc import Iterator

import pytest

from forq.api_types import JobInfo
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def job(forq: Forq, queue: str, job_id: str) -> JobInfo:
    return forq.client().queue(queue).job(job_id)


def starts(forq: Forq, queue: str, job_id: str, event: str = "start") -> list[float]:
    return [trace.time for trace in forq.traces(event) if (trace.queue, trace.job) == (queue, job_id)]


def overruns(forq: Forq, queue: str, times: int) -> list[float]:
    """How many seconds after its deadline each of `times` hung jobs was killed."""
    forq.create(queue, "act", timeout="1s", max_timeouts=0)
    ids = forq.client().queue(queue).enqueue_many([{"do": "spin"}] * times)
    wait_until(lambda: forq.queue_status(queue)["dead"] == times, seconds=times * 3 + 20, what="all are dead")
    late = []
    for dead in (job(forq, queue, job_id) for job_id in ids):
        assert (dead["timeout_count"], dead["stall_count"], dead["retry_count"]) == (1, 0, 0)
        (attempt,) = dead["attempts"]
        assert (attempt["outcome"], attempt["cause"]) == ("timed_out", "timeout")
        assert "traced.py" in attempt["stack"]
        assert "in do" in attempt["stack"]
        late.append(attempt["ended_at"] - attempt["started_at"] - 1.0)
    runs = [trace for trace in forq.traces("start") if trace.queue == queue]
    assert len(runs) == len({run.pid for run in runs}) == times
    return late


def test_a_killed_job_keeps_its_stack_beside_idle_workers(forq: Forq) -> None:
    """They leave at once; the process must not die before the stack is read."""
    forq.create("beside", "act", concurrency=4, timeout="200ms", max_timeouts=0)
    queue = forq.client().queue("beside")
    for number in range(8):
        job_id = queue.enqueue({"do": "hang"})
        wait_until(lambda: queue.status()["dead"] > number, what="the job is dead")  # noqa: B023
        assert "in do" in queue.job(job_id)["attempts"][-1].get("stack", "")


@pytest.mark.fault("handler keeps the interpreter")
@pytest.mark.spec("Q14", "Q15", "Q17")
def test_a_c_loop_that_holds_the_gil_is_killed_at_its_deadline_and_its_stack_is_kept(forq: Forq) -> None:
    late = overruns(forq, "spin", 3)
    assert all(seconds >= 0 for seconds in late)
    # The quickest of three: on a busy machine each may have to wait for a CPU.
    assert min(late) < 0.5, late
    after = forq.client().queue("spin").enqueue({"do": "sleep"}, id="after")
    wait_until(lambda: starts(forq, "spin", after, "end"), what="the next job ran")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_median_overrun_of_twenty_hung_jobs_is_below_100_ms(forq: Forq) -> None:
    late = overruns(forq, "twenty", 20)
    ms = sorted(round(seconds * 1000) for seconds in late)
    print(f"\nkilled after the deadline: median {statistics.median(ms):.0f} ms, max {ms[-1]} ms of {len(ms)}")
    assert statistics.median(late) < 0.1


@pytest.mark.fault("handler blocks all signals")
@pytest.mark.spec("Q17", "Q20", "Q39")
def test_a_job_that_ignores_every_signal_is_killed_and_after_max_timeouts_dead(forq: Forq) -> None:
    forq.create("deaf", "act", timeout="200ms", max_timeouts=1)
    jobs = forq.client().queue("deaf")
    jobs.enqueue({"do": "hang"}, id="deaf")
    wait_until(lambda: forq.queue_status("deaf")["dead"] == 1, what="it is dead")
    assert len(starts(forq, "deaf", "deaf")) == 2, "its handler is not called again"
    dead = job(forq, "deaf", "deaf")
    assert (dead["state"], dead["timeout_count"], dead["retry_count"]) == ("dead", 2, 0)
    assert (dead["error"]["name"], dead["error"]["kind"]) == ("TimeoutError", "stall")
    assert [attempt["outcome"] for attempt in dead["attempts"]] == ["timed_out", "timed_out"]


@pytest.mark.spec("Q15", "Q16", "Q17")
def test_with_several_workers_the_others_finish_and_a_new_process_takes_over_at_once(forq: Forq) -> None:
    forq.create("crew", "act", timeout="1s", concurrency=3)
    jobs = forq.client().queue("crew")
    jobs.enqueue({"do": "hang", "times": 1}, id="hung")
    hung = wait_until(lambda: starts(forq, "crew", "hung"), what="hung job started")[0]
    wait_until(lambda: time.monotonic() - hung > 0.6, what="time for the neighbor to outlive the deadline")
    jobs.enqueue({"do": "sleep", "seconds": 0.9}, id="neighbor")
    wait_until(lambda: starts(forq, "crew", "neighbor"), what="neighbor started")
    wait_until(lambda: time.monotonic() - hung > 1.1, what="the deadline has passed")
    jobs.enqueue({"do": "sleep"}, id="new")
    wait_until(lambda: starts(forq, "crew", "new", "end"), what="a new job ran")
    pids = {trace.job: trace.pid for trace in forq.traces() if trace.queue == "crew" and trace.event == "start"}
    assert pids["new"] != pids["neighbor"], "the unhealthy process takes no new jobs"
    assert not starts(forq, "crew", "neighbor", "end"), "and it was replaced while it still ran one"
    wait_until(lambda: forq.queue_status("crew")["done"] == 3, what="all are done")
    traces = [trace for trace in forq.traces() if (trace.queue, trace.job) == ("crew", "neighbor")]
    assert [trace.event for trace in traces] == ["start", "end"], "the neighbor ran once, undisturbed"
    runs = starts(forq, "crew", "hung")
    assert len(runs) == 2
    assert runs[1] >= starts(forq, "crew", "neighbor", "end")[0], "it was killed only when nothing else was left"
    states = [child["state"] for child in forq.queue_status("crew")["children"]]
    assert len(states) == 2, "the unhealthy process is gone"


@pytest.mark.spec("Q16")
def test_a_process_with_a_stuck_gil_is_killed_at_once_and_its_other_jobs_are_not_counted(forq: Forq) -> None:
    forq.create("stuck", "act", timeout="1s", concurrency=2)
    jobs = forq.client().queue("stuck")
    jobs.enqueue({"do": "sleep", "seconds": 0.7}, id="innocent")
    wait_until(lambda: starts(forq, "stuck", "innocent"), what="innocent started")
    jobs.enqueue({"do": "spin", "times": 1}, id="spinner")
    wait_until(lambda: forq.queue_status("stuck")["done"] == 2, seconds=30, what="both are done")
    assert len(starts(forq, "stuck", "innocent")) == 2
    stalls = [trace.stalls for trace in forq.traces("start") if trace.job == "innocent"]
    assert stalls == [0, 0]


@pytest.mark.spec("Q14")
def test_a_coroutine_is_cancelled_at_its_deadline_and_its_process_survives(forq: Forq) -> None:
    forq.create("async", "sleep_async", timeout="200ms", max_timeouts=0)
    pid = forq.wait_for_child("async")["pid"]
    jobs = forq.client().queue("async")
    jobs.enqueue(30, id="long")
    wait_until(lambda: forq.queue_status("async")["dead"] == 1, what="it is dead")
    assert forq.child("async")["pid"] == pid
    dead = job(forq, "async", "long")
    assert (dead["timeout_count"], dead["retry_count"], dead["error"]["name"]) == (1, 0, "TimeoutError")
    assert [(attempt["outcome"], attempt["cause"]) for attempt in dead["attempts"]] == [("timed_out", "timeout")]
    jobs.enqueue(0, id="short")
    wait_until(lambda: starts(forq, "async", "short", "end"), what="the next one ran")


@pytest.mark.spec("Q17")
def test_a_coroutine_that_refuses_to_be_cancelled_is_killed_with_its_process(forq: Forq) -> None:
    forq.create("refuse", "refuse_to_end", timeout="200ms", max_timeouts=0)
    pid = forq.wait_for_child("refuse")["pid"]
    forq.client().queue("refuse").enqueue(1, id="stubborn")
    wait_until(lambda: forq.queue_status("refuse")["dead"] == 1, what="it is dead")
    assert starts(forq, "refuse", "stubborn", "cancelled"), "it was cancelled first"
    assert forq.child("refuse")["pid"] != pid


@pytest.mark.spec("Q9")
def test_a_changed_timeout_applies_to_the_next_claims(forq: Forq) -> None:
    forq.create("changed", "act", timeout="1h")
    jobs = forq.client().queue("changed")
    jobs.enqueue({"do": "sleep"}, id="first")
    wait_until(lambda: starts(forq, "changed", "first", "end"), what="one ran under the long timeout")
    forq.ctl("set", "changed", "timeout=200ms")
    jobs.enqueue({"do": "hang", "times": 1}, id="second")
    wait_until(lambda: starts(forq, "changed", "second", "end"), what="it was killed and ran again")
    assert len(starts(forq, "changed", "second")) == 2


@pytest.mark.spec("Q32")
def test_a_fail_handler_has_its_own_timeout(forq: Forq) -> None:
    settings = ("--set=max_retries=0", "--set=fail_timeout=200ms", "--set=fail_max_retries=1")
    path = ("--path", str(HANDLERS))
    forq.ctl("create", "failing", "--handler", "traced:fail", "--fail-handler", "traced:hang_in_fail", *path, *settings)
    forq.client().queue("failing").enqueue(1, id="f")
    wait_until(lambda: len([t for t in forq.traces("fail_start") if t.queue == "failing"]) >= 2, what="it was killed")
    wait_until(lambda: forq.queue_status("failing")["fail_jobs"] == 0, what="it was given up after fail_max_retries")
