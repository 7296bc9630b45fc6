"""Unresponsive processes of queues: their jobs run elsewhere, and they are replaced when that is safe."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forq.errors import ForqError
from tests.support.drive.metrics import Scraper
from tests.support.drive.supervisor import HANDLERS, Forq, Trace, running
from tests.support.drive.wait import wait_until

SETTINGS = '[metrics]\nlisten = "./m.sock"\n'
ELSEWHERE_SECONDS = 5.0


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings=SETTINGS) as forq:
        yield forq


def create(forq: Forq, name: str, function: str, **options: object) -> int:
    """Creates a queue; returns the pid of its main process."""
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", name, "--handler", f"gil_holding:{function}", "--path", str(HANDLERS), *settings)
    pid: int = forq.wait_for_child(name)["pid"]
    return pid


def runs(forq: Forq, job: str, event: str = "end") -> list[Trace]:
    return [trace for trace in forq.traces(event) if trace.job == job]


def ran_elsewhere(forq: Forq, job: str, pid: int, began: float) -> float:
    """Returns how long after `began` the job ended in another process. Fails unless it ran once and was not counted."""
    (run,) = wait_until(lambda: runs(forq, job), ELSEWHERE_SECONDS + 5, f"{job} ran")
    assert run.pid != pid
    assert run.stalls == 0
    assert len(runs(forq, job, "start")) == 1
    return float(run.time - began)


def stop(forq: Forq, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def freeze(forq: Forq, pid: int) -> None:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    group = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        path = Path(mount) / group / "cgroup.freeze"
        if "forq-" in group and path.exists() and os.access(path, os.W_OK):
            path.write_text("1")
            return
    pytest.skip("processes of queues have no control group of their own here")


@pytest.mark.fault("child frozen")
@pytest.mark.parametrize("how", [stop, freeze])
def test_jobs_given_to_a_frozen_idle_process_run_elsewhere(
    forq: Forq, how: Callable[[Forq, int], None], request: pytest.FixtureRequest
) -> None:
    name = f"{how.__name__}-idle"
    pid = create(forq, name, "hold", timeout="2s")
    how(forq, pid)
    began = time.monotonic()
    job = forq.client().queue(name).enqueue(0)
    wait_until(lambda: forq.child_states(name).get(pid) == "unresponsive", ELSEWHERE_SECONDS, "it is reported")
    took = ran_elsewhere(forq, job, pid, began)
    print(f"{how.__name__}: ran elsewhere after {took:.2f} s")
    assert took < ELSEWHERE_SECONDS
    wait_until(lambda: pid not in forq.child_states(name), what="it is replaced")
    assert forq.run_ctl("status", "--check").returncode == 0


@pytest.mark.fault("interpreter kept")
def test_jobs_given_to_an_idle_process_with_a_busy_thread_run_elsewhere(forq: Forq, tmp_path: Path) -> None:
    pid = create(forq, "left", "leave_thread", timeout="2s")
    queue = forq.client().queue("left")
    queue.enqueue({"gate": str(tmp_path / "gate"), "seconds": 60}, id="leaves")
    wait_until(lambda: queue.status()["done"] == 1, what="the job that leaves a thread is settled")
    (tmp_path / "gate").touch()
    wait_until(lambda: runs(forq, "leaves", "holds"), what="the thread holds the GIL")
    began = time.monotonic()
    job = queue.enqueue(0)
    wait_until(lambda: forq.child_states("left").get(pid) == "unresponsive", ELSEWHERE_SECONDS, "it is reported")
    took = ran_elsewhere(forq, job, pid, began)
    print(f"ran elsewhere after {took:.2f} s")
    assert took < ELSEWHERE_SECONDS
    wait_until(lambda: pid not in forq.child_states("left"), what="it is replaced")
    assert "returned jobs that an unresponsive process had not started queue=left jobs=1" in forq.log


@pytest.mark.fault("interpreter kept")
def test_jobs_beside_one_that_holds_the_gil_run_elsewhere_and_it_keeps_running(forq: Forq) -> None:
    """It holds the GIL longer than they may wait, but within its timeout."""
    pid = create(forq, "beside", "hold", concurrency=4, timeout="60s")
    queue = forq.client().queue("beside")
    queue.enqueue(9, id="keeps")
    wait_until(lambda: runs(forq, "keeps", "start"), what="it runs")
    began = time.monotonic()
    others = [queue.enqueue(0) for _ in range(6)]
    times = [ran_elsewhere(forq, job, pid, began) for job in others]
    print(f"beside a job that keeps the interpreter for 9 s: {max(times):.2f} s")
    assert max(times) < ELSEWHERE_SECONDS
    (end,) = wait_until(lambda: runs(forq, "keeps"), 20.0, "it ends normally")
    assert (end.pid, len(runs(forq, "keeps", "start"))) == (pid, 1)
    wait_until(lambda: queue.status()["done"] == 7, what="each is done once")
    wait_until(lambda: pid not in forq.child_states("beside"), what="its process has ended after it")


def test_a_job_that_holds_the_gil_is_still_killed_at_its_timeout(forq: Forq) -> None:
    pid = create(forq, "overdue", "hold", concurrency=2, timeout="2s", max_timeouts=0)
    queue = forq.client().queue("overdue")
    queue.enqueue(60, id="overdue")
    wait_until(lambda: runs(forq, "overdue", "start"), what="it runs")
    job = queue.enqueue(0)
    wait_until(lambda: runs(forq, job), ELSEWHERE_SECONDS + 5, "the other one ran")
    wait_until(lambda: queue.status()["dead"] == 1, what="it is dead")
    assert not runs(forq, "overdue")
    wait_until(lambda: pid not in forq.child_states("overdue"), what="its process is replaced")
    assert "TimeoutError" in forq.ctl("dead", "list", "overdue")


def test_why_reports_an_unresponsive_process(forq: Forq) -> None:
    """A stopped process is killed after a second. A busy machine may miss that window, so the test tries again."""
    create(forq, "named", "hold", timeout=0, stop_grace=0)
    queue = forq.client().queue("named")
    assert forq.run_ctl("status", "--check").returncode == 0

    def is_reported(job_id: str) -> bool:
        pid = forq.wait_for_child("named")["pid"]
        os.kill(pid, signal.SIGSTOP)
        queue.enqueue(0, id=job_id)
        seen = False
        while not seen and not runs(forq, job_id):
            with suppress(ForqError):  # it has ended just now
                seen = f"its process {pid} is unresponsive" in forq.call("why", name="named", id=job_id)["why"]
        wait_until(lambda: runs(forq, job_id), what="it ran elsewhere")
        return seen

    assert any(is_reported(f"given{number}") for number in range(10))


def kill_idle_process_of_another_queue(forq: Forq) -> None:
    """Returns after the supervisor has replaced an idle process that was stopped just now. A process stopped before
    has been unresponsive for longer."""
    pid = create(forq, "other", "hold", timeout=0, stop_grace=0)
    stop(forq, pid)
    forq.client().queue("other").enqueue(0)
    wait_until(lambda: pid not in forq.child_states("other"), what="the other process is replaced")


def test_check_and_health_are_red_until_a_stopped_process_continues(forq: Forq) -> None:
    """The process runs a job, so it is not killed."""
    pid = create(forq, "red", "hold", concurrency=2, timeout=0, stop_grace=0)
    queue = forq.client().queue("red")
    scraper = Scraper(forq.directory / "m.sock")
    queue.enqueue(3, id="runs")
    wait_until(lambda: runs(forq, "runs", "start"), what="it runs")
    os.kill(pid, signal.SIGSTOP)
    checked = wait_until(lambda: (done := forq.run_ctl("status", "--check")).returncode == 3 and done, what="--check")
    assert f"process {pid} of queue red is unresponsive" in checked.stderr
    fault = {"check": "process", "queue": "red", "reason": f"process {pid} is unresponsive"}
    wait_until(lambda: scraper.health() == (503, [fault]), what="/healthz")
    kill_idle_process_of_another_queue(forq)
    assert forq.child_states("red")[pid] == "unresponsive", "it is not killed while it runs a job"
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: forq.run_ctl("status", "--check").returncode == 0, what="--check is 0 again")
    wait_until(lambda: scraper.health() == (200, []), what="/healthz again")
    wait_until(lambda: runs(forq, "runs"), what="its job has ended")
    assert forq.child_states("red")[pid] in ("idle", "busy"), "it is the same process"


def test_a_process_that_misses_the_resume_of_its_queue_is_replaced(tmp_path: Path) -> None:
    """A parked process has sent nothing to Redis: no claim shows that it is stuck, and its heartbeats look idle."""
    with running(settings='heartbeat = "500ms"\nexpiry = "5s"\n') as forq:
        pid = create(forq, "paused", "leave_thread")
        queue = forq.client().queue("paused")
        queue.enqueue({"gate": str(tmp_path / "gate"), "seconds": 60}, id="leaves")
        wait_until(lambda: runs(forq, "leaves"), what="it has left a thread behind")
        forq.ctl("pause", "paused")
        job = queue.enqueue(0)
        wait_until(lambda: forq.child_states("paused").get(pid) == "parked", what="the process is parked")
        (tmp_path / "gate").touch()
        wait_until(lambda: runs(forq, "leaves", "holds"), what="the thread holds the GIL")
        began = time.monotonic()
        forq.ctl("resume", "paused")
        assert ran_elsewhere(forq, job, pid, began) < ELSEWHERE_SECONDS
