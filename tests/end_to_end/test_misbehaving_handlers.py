"""Handlers that attack their process: signals, descriptors, exec, tasks that refuse to end."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.drive.processes import alive
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, Trace, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def create(forq: Forq, name: str, function: str, **options: object) -> None:
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", name, "--handler", f"misbehaving:{function}", "--path", str(HANDLERS), *settings)


def traces(forq: Forq, queue: str, event: str = "end") -> list[Trace]:
    return [trace for trace in forq.traces(event) if trace.queue == queue]


@pytest.mark.fault("handler crashes in C")
@pytest.mark.parametrize("signum", [signal.SIGRTMIN + 5, signal.SIGRTMAX - 1, signal.SIGSEGV])
def test_a_death_by_any_signal_is_recovered_and_the_queue_continues(forq: Forq, signum: int) -> None:
    name = f"signal{int(signum)}"
    create(forq, name, "kill_itself")
    forq.client().queue(name).enqueue(int(signum), id="j")
    wait_until(lambda: traces(forq, name), what="it ran again")
    assert traces(forq, name)[0].stalls == 1
    assert f"end=signal {int(signum)}" in forq.log


@pytest.mark.fault("handler becomes another program")
def test_a_process_that_execs_another_program_is_killed_and_its_files_are_untouched(forq: Forq, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("untouched")
    create(forq, "exec", "become_another_program", timeout="1s", max_timeouts=0)
    forq.client().queue("exec").enqueue(str(precious), id="j")
    wait_until(lambda: traces(forq, "exec", "start"), what="it runs")
    assert "(no stack available)" in forq.ctl("stack", "exec")
    wait_until(lambda: forq.queue_status("exec")["dead"] == 1, what="it timed out")
    assert precious.read_text() == "untouched"
    forq.wait_for_child("exec")


@pytest.mark.fault("handler closes all descriptors")
def test_a_handler_that_writes_to_the_leash_is_killed_and_counted(forq: Forq) -> None:
    create(forq, "leash", "write_to_sockets")
    queue = forq.client().queue("leash")
    queue.enqueue(1, id="j")
    wait_until(lambda: forq.queue_status("leash")["done"] == 1, what="the second attempt is done")
    assert [trace.stalls for trace in traces(forq, "leash", "start")] == [0, 1]
    assert "invalid message from child; killing it child=leash main" in forq.log
    held = [grant["worker"] for grant in forq.status()["capacity"]["held"]]
    assert held.count("leash main") <= 1, "no units are lost"


def test_tasks_that_refuse_to_end_do_not_delay_a_replaced_process(forq: Forq) -> None:
    create(forq, "stubborn", "leave_a_stubborn_task", max_jobs=1)
    forq.client().queue("stubborn").enqueue_many(range(5))
    wait_until(lambda: forq.queue_status("stubborn")["done"] == 5, what="all ran")
    wait_until(lambda: len(forq.queue_status("stubborn")["children"]) == 2, what="the old processes are gone")


def test_a_job_that_failed_while_redis_was_down_is_not_treated_as_hung(server: Server, redis_url: str) -> None:
    with running(redis=redis_url, settings='expiry = "60s"\n') as forq:
        create(forq, "away", "fail_for_good", timeout="1s")
        queue = forq.client().queue("away")
        forq.create("hung", "sleep", timeout="2s")
        forq.client().queue("hung").enqueue(60)
        hung = wait_until(lambda: traces(forq, "hung", "start"), what="the other job runs")[0].pid
        queue.enqueue(0.3, id="j")
        started = wait_until(lambda: traces(forq, "away", "start"), what="it runs")[0]
        server.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        try:
            wait_until(lambda: traces(forq, "away"), what="it failed")
            # A job that really hangs has been killed at its timeout, which is later.
            wait_until(lambda: not alive({hung}), what="the process of the hung job is killed")
            wait_until(lambda: time.monotonic() > started.time + 1.5, what="the timeout of this one has passed")
        finally:
            server.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        wait_until(lambda: forq.queue_status("away")["dead"] == 1, what="it is settled")
        assert forq.child("away")["pid"] == started.pid
        assert (queue.job("j")["timeout_count"], len(traces(forq, "away", "start"))) == (0, 1)


def test_a_worker_that_has_left_returns_its_units_before_its_process_ends() -> None:
    with running(settings="capacity = 20\n") as forq:
        forq.create("two", "sleep", concurrency=2, max_jobs=1)
        queue = forq.client().queue("two")
        queue.enqueue(0.5)
        queue.enqueue(30, id="long")
        wait_until(lambda: len(traces(forq, "two", "start")) == 2, what="both run")
        queue.enqueue(0, id="next")
        wait_until(lambda: [t for t in traces(forq, "two") if t.job == "next"], 10.0, "a successor has units")
        assert not [t for t in traces(forq, "two") if t.job == "long"]


def test_a_queue_that_was_config_error_is_kept_alive_after_a_restart(redis_url: str, tmp_path: Path) -> None:
    module = tmp_path / "mended.py"
    module.write_text("raise ImportError('typo')\n")
    with running(redis=redis_url, settings='heartbeat = "200ms"\nexpiry = "600ms"\n') as forq:
        forq.ctl("create", "c", "--handler", "mended:handle", "--path", str(tmp_path), "--no-wait")
        wait_until(lambda: forq.queue_status("c")["state"] == "config_error")
        pulse = next(s["pid"] for s in forq.status()["supervisor"]["services"] if s["name"] == "pulse")
        import os

        os.kill(pulse, signal.SIGKILL)
        wait_until(lambda: next(s["pid"] for s in forq.status()["supervisor"]["services"]) not in (None, pulse))
        module.write_text("def handle(data, job): pass\n")
        forq.ctl("restart", "c")
        forq.wait_for_child("c")
        import redis

        with redis.Redis.from_url(redis_url) as client:

            def alive_for_ms() -> float:
                seconds, micros = client.time()
                ((_, expires),) = client.zrange("forq:queue:{c}:processors", 0, -1, withscores=True)
                return float(expires - seconds * 1000 - micros / 1000)

            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                assert alive_for_ms() > 0, "it gets heartbeats"
                time.sleep(0.05)


def test_a_process_forked_by_a_handler_dies_of_an_immediate_term(forq: Forq) -> None:
    create(forq, "forks", "term_what_it_forks")
    pid = forq.wait_for_child("forks")["pid"]
    forq.client().queue("forks").enqueue(30)
    traced = wait_until(lambda: [t for t in forq.traces() if t.queue == "forks"], 40.0, "it is done")
    assert traced[0].event == "survived=0"
    assert forq.child("forks")["pid"] == pid, "and none was taken for one to the worker"


@pytest.mark.parametrize("copy", ["pass", "raise SystemExit(78)", "raise ValueError('of the copy')"])
def test_a_module_that_forks_at_import_creates_no_second_worker(forq: Forq, tmp_path: Path, copy: str) -> None:
    (tmp_path / "forks_at_import.py").write_text(
        f"import os\nfrom traced import record\n\nif os.fork() == 0:\n    {copy}\n\nhandle = record\n"
    )
    name = f"forks-{len(copy)}"
    paths = [f"--path={path}" for path in (tmp_path, HANDLERS)]
    forq.ctl("create", name, "--handler", "forks_at_import", *paths)
    child = forq.wait_for_child(name)
    copies = {process.pid for process in psutil.Process(child["pid"]).children()}
    wait_until(lambda: not alive(copies), 5.0, "the copy has ended")
    ids = forq.client().queue(name).enqueue_many(range(300))
    wait_until(lambda: forq.queue_status(name)["done"] == 300, what="all jobs ran")
    assert sorted(trace.job for trace in traces(forq, name)) == sorted(ids)
    assert {trace.pid for trace in traces(forq, name)} == {child["pid"]}
    assert forq.child(name)["restarts"] == 0


def test_a_forked_copy_that_returns_from_a_handler_reports_nothing(forq: Forq, tmp_path: Path) -> None:
    (tmp_path / "forks_and_raises.py").write_text(
        "import os\nfrom traced import trace\n\ndef handle(data, job):\n    pid = os.fork()\n    if pid == 0:\n"
        "        raise ValueError('of the copy')\n    os.waitpid(pid, 0)\n    trace(job, 'end')\n"
    )
    paths = [f"--path={path}" for path in (tmp_path, HANDLERS)]
    forq.ctl("create", "copies", "--handler", "forks_and_raises", *paths)
    forq.client().queue("copies").enqueue_many(range(20))
    wait_until(lambda: forq.queue_status("copies")["done"] == 20, what="all jobs ran")
    assert len(traces(forq, "copies")) == 20
    assert "of the copy" not in forq.ctl("logs", "copies")


def test_a_long_exception_name_is_truncated(forq: Forq, tmp_path: Path) -> None:
    (tmp_path / "long_name.py").write_text(
        "def handle(data, job):\n    raise type('E' * 10_000_000, (Exception,), {})\n"
    )
    forq.ctl("create", "names", "--handler", "long_name", "--path", str(tmp_path), "--set=max_retries=0")
    job_id = forq.ctl("push", "names", "1")
    wait_until(lambda: forq.queue_status("names")["dead"] == 1, what="it is dead, and counted")
    assert f"it failed for good: {'E' * 200}: ;" in forq.ctl("why", "names", job_id)
