"""Handlers that damage their own process: their job is ended with a cause, and their neighbors are unaffected."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.drive.processes import tree_of
from tests.support.drive.supervisor import HANDLERS, Forq, Trace, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        forq.create("neighbor", "record")
        forq.wait_for_child("neighbor")
        yield forq


@pytest.fixture
def forq(supervisor: Forq) -> Iterator[Forq]:
    """A supervisor with a neighbor queue, which must run in the same process after the test as before."""
    pid = supervisor.child("neighbor")["pid"]
    yield supervisor
    job_id = supervisor.client().queue("neighbor").enqueue(1)
    wait_until(lambda: [t for t in supervisor.traces("end") if t.job == job_id], 10.0, "the neighbor works")
    assert supervisor.child("neighbor")["pid"] == pid


def create(forq: Forq, name: str, function: str, **options: object) -> None:
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", name, "--handler", f"hostile:{function}", "--path", str(HANDLERS), *settings)


def traces(forq: Forq, queue: str, event: str = "end") -> list[Trace]:
    return [trace for trace in forq.traces(event) if trace.queue == queue]


def attempts(forq: Forq, queue: str, job_id: str) -> list[tuple[str, str]]:
    job = forq.client().queue(queue).job(job_id)
    return [(attempt["outcome"], str(attempt["cause"])) for attempt in job["attempts"]]


def processed(forq: Forq, queue: str, count: int) -> Any:
    seen = forq.client().queue(queue)
    return wait_until(lambda: seen.status()["done"] == count, 30.0, f"{count} of {queue} are done")


@pytest.mark.fault("handler closes all descriptors")
@pytest.mark.parametrize("seconds", [0, 5])
def test_a_handler_that_closes_all_descriptors_costs_its_process_and_the_job_runs_again(
    forq: Forq, seconds: int
) -> None:
    name = f"closing{seconds}"
    create(forq, name, "close_descriptors")
    queue = forq.client().queue(name)
    queue.enqueue(seconds, id="j")
    queue.enqueue_many([0] * 5)
    processed(forq, name, 6)
    assert {trace.job for trace in traces(forq, name, "start")} >= {"j"}
    assert forq.queue_status(name)["in_flight"] == 0


@pytest.mark.fault("handler ignores TERM")
def test_a_handler_that_ignores_term_is_killed_after_the_grace_and_its_job_is_not_counted(forq: Forq) -> None:
    create(forq, "deaf", "ignore_term", stop_grace="200ms")
    forq.client().queue("deaf").enqueue(60, id="j")
    wait_until(lambda: traces(forq, "deaf", "start"), what="it runs")
    Path(f"{forq.trace_file}.j").touch()
    forq.ctl("restart", "deaf")
    processed(forq, "deaf", 1)
    assert [trace.stalls for trace in traces(forq, "deaf", "start")] == [0, 0]


@pytest.mark.fault("handler blocks all signals")
def test_a_handler_that_blocks_all_signals_is_killed_at_its_deadline_with_the_cause_timeout(forq: Forq) -> None:
    create(forq, "blocking", "block_signals", timeout="500ms", max_timeouts=0)
    forq.client().queue("blocking").enqueue(60, id="j")
    wait_until(lambda: forq.client().queue("blocking").status()["dead"] == 1, what="it is dead")
    assert attempts(forq, "blocking", "j") == [("timed_out", "timeout")]


@pytest.mark.fault("handler calls os._exit")
def test_a_handler_that_exits_at_once_is_counted_with_its_exit_status(forq: Forq) -> None:
    create(forq, "leaving", "leave_at_once", keep_done="60s")
    forq.client().queue("leaving").enqueue(7, id="j")
    processed(forq, "leaving", 1)
    assert attempts(forq, "leaving", "j") == [("stalled", "exit_7")]
    assert [trace.stalls for trace in traces(forq, "leaving", "start")] == [0, 1]


@pytest.mark.fault("handler crashes in C")
def test_a_handler_that_crashes_in_c_is_counted_with_its_signal(forq: Forq) -> None:
    create(forq, "crashing", "read_nowhere", keep_done="60s")
    forq.client().queue("crashing").enqueue(1, id="j")
    processed(forq, "crashing", 1)
    assert attempts(forq, "crashing", "j") == [("stalled", f"signal_{int(signal.SIGSEGV)}_(SIGSEGV)")]


@pytest.mark.fault("handler changes its surroundings")
def test_a_handler_that_changes_directory_umask_signals_and_environment_affects_no_later_job(
    forq: Forq, tmp_path: Path
) -> None:
    create(forq, "changing", "change_surroundings", stop_grace="200ms")
    queue = forq.client().queue("changing")
    queue.enqueue_many([str(tmp_path / "gone")] * 5)
    processed(forq, "changing", 5)
    pid = forq.child("changing")["pid"]
    assert {trace.pid for trace in traces(forq, "changing")} == {pid}, "the process works on"
    forq.ctl("restart", "changing")
    assert forq.wait_for_child("changing", not_pid=pid)["pid"] != pid
    job_id = queue.enqueue(str(tmp_path / "again"))
    wait_until(lambda: [t for t in traces(forq, "changing") if t.job == job_id], what="and so does its successor")


@pytest.mark.fault("handler starts threads")
def test_threads_that_never_end_do_not_delay_the_end_of_their_process(forq: Forq) -> None:
    create(forq, "threads", "start_threads", max_jobs=1)
    forq.client().queue("threads").enqueue_many([10] * 3)
    processed(forq, "threads", 3)
    wait_until(lambda: len(forq.queue_status("threads")["children"]) == 2, what="the old processes are gone")
    assert len({trace.pid for trace in traces(forq, "threads")}) == 3
    assert {trace.stalls for trace in traces(forq, "threads")} == {0}


@pytest.mark.fault("handler raises what ends programs")
@pytest.mark.parametrize("what", ["exit", "interrupt", "generator"])
def test_exceptions_that_end_programs_are_ordinary_failures(forq: Forq, what: str) -> None:
    name = f"raising-{what}"
    create(forq, name, "raise_what_ends_programs", max_retries=0)
    pid = forq.wait_for_child(name)["pid"]
    forq.client().queue(name).enqueue(what, id="j")
    wait_until(lambda: forq.client().queue(name).status()["dead"] == 1, what="it is dead")
    [(outcome, cause)] = attempts(forq, name, "j")
    assert outcome == "failed", cause
    assert forq.child(name)["pid"] == pid


@pytest.mark.fault("handler raises what ends programs")
def test_endless_recursion_is_an_ordinary_failure(forq: Forq) -> None:
    create(forq, "recursing", "recurse", max_retries=0)
    forq.client().queue("recursing").enqueue(1, id="j")
    wait_until(lambda: forq.client().queue("recursing").status()["dead"] == 1, what="it is dead")
    assert "RecursionError" in forq.ctl("why", "recursing", "j")


@pytest.mark.fault("handler daemonises")
def test_processes_that_a_handler_left_behind_end_with_its_queue(forq: Forq) -> None:
    usual = tree_of(forq.state_dir)
    forq.create("daemons", "chain")
    forq.client().queue("daemons").enqueue(1)
    wait_until(lambda: traces(forq, "daemons", "start"), what="its daemons run")
    assert len(tree_of(forq.state_dir)) >= len(usual) + 3
    forq.ctl("delete", "daemons", "--force")
    left = [psutil.Process(pid).cmdline()[0].rstrip() for pid in tree_of(forq.state_dir) - usual]
    # The supervisor starts it at its first use, unless another test did.
    assert set(left) <= {"forq: warden"}
