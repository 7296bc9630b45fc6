"""A queue with several main processes: their start, death, change of number, restart and titles."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forq.procs.cgroups import usable_cpus
from tests.support.drive.handler_module import Module
from tests.support.drive.processes import alive
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def mains(forq: Forq, name: str, state: str | None = None) -> dict[int, int]:
    """Pids of the main processes by number."""
    children = forq.queue_status(name)["children"]
    return {
        child["number"]: child["pid"]
        for child in children
        if child["role"] == "main" and child["state"] in ((state,) if state else ("idle", "busy"))
    }


def wait_for_mains(forq: Forq, name: str, count: int, state: str | None = None) -> dict[int, int]:
    def found() -> dict[int, int] | None:
        pids = mains(forq, name, state)
        return pids if sorted(pids) == list(range(1, count + 1)) else None

    return wait_until(found, what=f"{count} main processes of {name}")  # type: ignore[no-any-return]


def title(pid: int) -> str:
    return psutil.Process(pid).cmdline()[0]


def test_jobs_run_in_all_processes_at_once(forq: Forq, tmp_path: Path) -> None:
    forq.create("wide", "wait_for", processes=3)
    wait_for_mains(forq, "wide", 3)
    gate = tmp_path / "gate"
    forq.client().queue("wide").enqueue_many([str(gate)] * 4)
    pids = wait_for_mains(forq, "wide", 3, "busy")
    started = [trace for trace in forq.traces("start") if trace.queue == "wide"]
    assert sorted(trace.pid for trace in started) == sorted(pids.values())
    for number, pid in pids.items():
        wait_until(lambda: title(pid).startswith(f"forq: wide main {number}/3 busy "), what="the title")  # noqa: B023
    shown = forq.ctl("status", "wide")
    assert [role for role in ("main 1/3", "main 2/3", "main 3/3") if role in shown] == [
        "main 1/3",
        "main 2/3",
        "main 3/3",
    ]
    gate.touch()
    wait_until(lambda: forq.queue_status("wide")["done"] == 4, what="all are done")
    assert len({child["pid"] for child in forq.queue_status("wide")["children"]}) == 4, "and one retry process"


def test_the_death_of_one_process_does_not_affect_the_others(forq: Forq, tmp_path: Path) -> None:
    forq.create("hurt", "wait_for", processes=2)
    before = wait_for_mains(forq, "hurt", 2)
    gate = tmp_path / "gate"
    forq.client().queue("hurt").enqueue_many([str(gate)] * 2)
    wait_for_mains(forq, "hurt", 2, "busy")
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: mains(forq, "hurt", "busy").get(1, before[1]) != before[1], what="its job runs in a new one")
    assert mains(forq, "hurt", "busy")[2] == before[2]
    gate.touch()
    wait_until(lambda: forq.queue_status("hurt")["done"] == 2, what="both are done")
    hurt = [trace for trace in forq.traces("end") if trace.queue == "hurt"]
    assert sorted(trace.stalls for trace in hurt) == [0, 1]


def test_set_changes_the_number_of_processes_without_interrupting_jobs(forq: Forq, tmp_path: Path) -> None:
    forq.create("flexible", "wait_for")
    (first,) = wait_for_mains(forq, "flexible", 1).values()
    forq.ctl("set", "flexible", "processes=3")
    pids = wait_for_mains(forq, "flexible", 3)
    assert pids[1] == first
    gate = tmp_path / "gate"
    forq.client().queue("flexible").enqueue_many([str(gate)] * 3)
    wait_for_mains(forq, "flexible", 3, "busy")
    forq.ctl("set", "flexible", "processes=1")
    assert alive(set(pids.values())) == set(pids.values()), "they still run their jobs"
    wait_until(lambda: title(first).startswith("forq: flexible main busy"), what="the title has no number any more")
    gate.touch()
    wait_until(lambda: not alive({pids[2], pids[3]}), what="they end after their jobs")
    wait_until(lambda: forq.queue_status("flexible")["done"] == 3, what="all are done")
    assert not [trace for trace in forq.traces() if trace.queue == "flexible" and trace.stalls]
    assert wait_for_mains(forq, "flexible", 1) == {1: first}


def test_jobs_stuck_behind_a_slow_one_run_in_another_process(forq: Forq) -> None:
    forq.create("mixed", "sleep", processes=2)
    wait_for_mains(forq, "mixed", 2)
    queue = forq.client().queue("mixed")
    forq.ctl("pause", "mixed")
    queue.enqueue_many([0.0001] * 600)
    slow = queue.enqueue(60)
    behind = set(queue.enqueue_many([0.0001] * 300))
    forq.ctl("resume", "mixed")
    wait_until(lambda: behind <= {t.job for t in forq.traces("end")}, what="the others do not wait for it")
    started = [t for t in forq.traces("start") if t.queue == "mixed"]
    (busy,) = [t.pid for t in started if t.job == slow]
    assert not [t for t in forq.traces("end") if t.job == slow]
    assert {t.pid for t in started if t.job in behind} - {busy}, "the other process ran some of them"
    assert len(started) == len({t.job for t in started}), "none ran twice"


def test_a_timeout_kills_only_the_process_of_its_job(forq: Forq) -> None:
    forq.create("timed", "sleep", processes=2, timeout="1s", max_timeouts=0)
    before = wait_for_mains(forq, "timed", 2)
    job = forq.client().queue("timed").enqueue(60)
    (killed,) = wait_until(lambda: [t.pid for t in forq.traces("start") if t.job == job], what="it runs")
    wait_until(lambda: forq.queue_status("timed")["dead"] == 1, what="it is dead")
    after = wait_for_mains(forq, "timed", 2)
    assert set(before.values()) - set(after.values()) == {killed}


def test_stack_and_kill_find_a_job_in_each_process(forq: Forq) -> None:
    forq.create("seen", "sleep", processes=2)
    wait_for_mains(forq, "seen", 2)
    ids = forq.client().queue("seen").enqueue_many([60] * 2)
    pids = wait_for_mains(forq, "seen", 2, "busy")
    stacks = forq.call("stack", name="seen")["stacks"]
    assert {(stack["job"], stack["pid"]) for stack in stacks} == {
        (t.job, t.pid) for t in forq.traces("start") if t.job in ids
    }
    for job in ids:
        forq.ctl("kill", "seen", job)
    after = wait_for_mains(forq, "seen", 2, "idle")
    assert not set(pids.values()) & set(after.values())


def test_cpus_means_one_process_per_usable_cpu(forq: Forq) -> None:
    forq.create("native", "noop", processes="cpus")
    wait_for_mains(forq, "native", usable_cpus())


def test_a_restart_replaces_each_process_and_a_broken_one_none(forq: Forq, tmp_path: Path) -> None:
    module = Module(tmp_path, f"rolled_{os.urandom(4).hex()}")
    module.write("from traced import record as handle\n")
    forq.ctl("create", "rolled", *module.arguments(), "processes=2")
    old = wait_for_mains(forq, "rolled", 2)
    module.write("import nowhere\n")
    done = forq.run_ctl("restart", "rolled")
    assert (done.returncode, "No module named 'nowhere'" in done.stderr) == (1, True), done.stderr
    assert wait_for_mains(forq, "rolled", 2) == old
    module.write("from traced import record as handle\n")
    forq.ctl("restart", "rolled")
    new = wait_for_mains(forq, "rolled", 2)
    assert not set(old.values()) & set(new.values())
    wait_until(lambda: not alive(set(old.values())), what="the old processes have ended")


def test_a_process_that_cannot_import_changed_code_leaves_the_others_serving(forq: Forq, tmp_path: Path) -> None:
    module = Module(tmp_path, f"changed_{os.urandom(4).hex()}")
    module.write("from traced import record as handle\n")
    forq.ctl("create", "halved", *module.arguments(), "processes=2")
    pids = wait_for_mains(forq, "halved", 2)
    module.write("import nowhere\n")
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: forq.queue_status("halved")["restart_error"], what="the new process fails")
    forq.client().queue("halved").enqueue(1, id="still")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == "still"], what="the other one runs jobs")
    assert [t.pid for t in forq.traces("end") if t.job == "still"] == [pids[2]]
    assert "No module named 'nowhere'" in forq.queue_status("halved")["restart_error"]["message"]
    module.write("from traced import record as handle\n")
    assert wait_for_mains(forq, "halved", 2)[2] == pids[2]
    wait_until(lambda: forq.queue_status("halved")["restart_error"] is None, what="the error is over")
