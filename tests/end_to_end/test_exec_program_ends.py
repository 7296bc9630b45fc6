"""How the programs of exec handlers end: at deadlines, on stop, delete and kill; none is ever left."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.drive.processes import alive, tree_of
from tests.support.drive.programs import actor, create, instances, pids_in_log, python_program, shell, wait_for_counts
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

# Ignores TERM, and so does its daemon.
STUBBORN = {"do": "sleep", "seconds": 600, "deaf": True, "daemon": True}


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


@pytest.mark.parametrize("how", ["deaf", "daemon"])
@pytest.mark.parametrize("kind", ["exec", "exec-once"])
def test_at_the_deadline_the_program_is_killed_with_its_descendants(
    forq: Forq, tmp_path: Path, how: str, kind: str
) -> None:
    handler = actor(tmp_path)
    if kind == "exec-once":
        first = "trap '' TERM" if how == "deaf" else "setsid sleep 600 & echo daemon pid $!"
        handler = shell(tmp_path, f"echo pid $$; {first}; sleep 600")
    name = f"late-{how}-{kind}"
    create(forq, name, handler, timeout="1s", max_timeouts=0)
    forq.client().queue(name).enqueue({"do": "sleep", "seconds": 600, how: True}, id=name)
    wait_for_counts(forq, name, 0, 1)
    pids = pids_in_log(forq, name)
    assert len(pids) == (2 if how == "daemon" else 1)
    wait_until(lambda: not alive(set(pids)), 5.0, "none of them lives")
    assert not instances(forq, name)
    dead = forq.client().queue(name).job(name)
    assert (dead["timeout_count"], dead["error"]["name"]) == (1, "TimeoutError")


def test_deleting_the_queue_kills_its_programs_busy_or_idle(forq: Forq, tmp_path: Path) -> None:
    create(forq, "gone", actor(tmp_path), concurrency=2, stop_grace="500ms")
    jobs = forq.client().queue("gone")
    jobs.enqueue(STUBBORN, id="d")
    jobs.enqueue(1, id="quick")
    wait_for_counts(forq, "gone", 1)
    pids = wait_until(lambda: p if len(p := instances(forq, "gone")) >= 3 else None, what="two programs and a daemon")
    forq.ctl("delete", "gone", "--force")
    wait_until(lambda: not alive(pids), 10.0, "nothing of it lives")


def test_after_max_jobs_the_process_and_its_instance_are_replaced(forq: Forq, tmp_path: Path) -> None:
    create(forq, "old", actor(tmp_path), max_jobs=5)
    ids = forq.client().queue("old").enqueue_many(range(15))
    wait_for_counts(forq, "old", 15)
    pids = {json.loads((tmp_path / job_id).read_text())[0] for job_id in ids}
    assert len(pids) == 3
    wait_until(lambda: len(alive(pids)) <= 1, 5.0, "the old ones are gone")


@pytest.mark.fault("handler leaks memory")
def test_a_program_that_exceeds_max_memory_is_replaced(forq: Forq, tmp_path: Path) -> None:
    grow = python_program(tmp_path, "global kept; kept = bytearray(os.urandom(1 << 20) * 80); time.sleep(2)")
    create(forq, "grows", grow, max_memory="60mb")
    pid = forq.wait_for_child("grows")["pid"]
    forq.client().queue("grows").enqueue(1)
    wait_for_counts(forq, "grows", 1)
    forq.wait_for_child("grows", not_pid=pid)
    assert "max_memory = 62914560" in forq.log


def test_a_stop_lets_the_job_finish_and_ends_the_programs(tmp_path: Path) -> None:
    with running() as forq:
        create(forq, "stop", actor(tmp_path), concurrency=2)
        jobs = forq.client().queue("stop")
        jobs.enqueue(1, id="one")
        wait_for_counts(forq, "stop", 1)
        jobs.enqueue({"do": "sleep", "seconds": 1.5}, id="slow")
        wait_until(lambda: pids_in_log(forq, "slow"), what="it runs")
        everything = {process.pid for process in forq.processes()}
        began = time.monotonic()
        assert forq.stop() == 0
        assert time.monotonic() - began < 8
        assert not alive(everything)
        forq.start()
        status = forq.queue_status("stop")
        assert (status["done"], status["waiting"], status["active"]) == (2, 0, 0)


def test_after_the_grace_period_a_program_gets_a_term_before_it_is_killed(tmp_path: Path) -> None:
    act = f"""\
def term(*_): open({str(tmp_path / "term")!r}, "w").close(); os._exit(0)
signal.signal(signal.SIGTERM, term)
note(f"pid {{os.getpid()}}"); time.sleep(600)
"""
    with running() as forq:
        create(forq, "grace", python_program(tmp_path, act), stop_grace="300ms")
        forq.client().queue("grace").enqueue(1, id="g")
        wait_until(lambda: pids_in_log(forq, "g"), what="it runs")
        assert forq.stop() == 0
        assert (tmp_path / "term").exists()


@pytest.mark.parametrize("victims", ["child", "supervisor", "both"])
def test_no_program_outlives_a_kill_of_the_processes_above_it(tmp_path: Path, victims: str) -> None:
    with running() as forq:
        create(forq, "kill", actor(tmp_path), stop_grace="0s")
        forq.client().queue("kill").enqueue(STUBBORN, id="k")
        pids = set(wait_until(lambda: p if len(p := pids_in_log(forq, "k")) == 2 else None, what="both are there"))
        assert pids <= tree_of(forq.state_dir)
        child = forq.child("kill")["pid"]
        doomed = {"child": [child], "supervisor": [forq.pid], "both": [child, forq.pid]}[victims]
        # Frozen first, so that neither can react to the other's death.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                os.kill(pid, signum)
        if victims != "child":
            assert forq.process is not None
            forq.process.wait(10)
            forq.start()
        wait_until(lambda: not alive(pids), 15.0, "none of them lives")
        wait_until(lambda: len(pids_in_log(forq, "k")) >= 3, what="the job runs again")
