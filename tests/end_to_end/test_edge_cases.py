"""Edge cases: handlers that fork, unprintable exceptions, poison jobs, services that die at a bad moment."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.drive.processes import alive
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def ends(forq: Forq, queue: str) -> list[str]:
    return [t.job for t in forq.traces("end") if t.queue == queue]


@pytest.mark.fault("handler forks without end")
@pytest.mark.parametrize("function", ["fork_and_return", "fork_and_exit"])
def test_a_forked_copy_of_the_handler_never_becomes_a_second_worker(forq: Forq, function: str) -> None:
    forq.create(function, function)
    ids = forq.client().queue(function).enqueue_many(range(5))
    wait_until(lambda: forq.queue_status(function)["done"] == 5)
    expected = ids if function == "fork_and_exit" else [job for job in ids for _ in range(2)]
    # The copy may return from the handler later than the worker.
    wait_until(lambda: len(ends(forq, function)) >= len(expected))
    assert sorted(ends(forq, function)) == sorted(expected)
    assert forq.child(function)["restarts"] == 0


def test_a_pool_in_a_handler_can_be_terminated_and_the_worker_continues(forq: Forq) -> None:
    forq.create("pools", "use_pool")
    pid = forq.wait_for_child("pools")["pid"]
    forq.client().queue("pools").enqueue_many(range(5))
    wait_until(lambda: forq.queue_status("pools")["done"] == 5)
    assert forq.child("pools")["pid"] == pid


@pytest.mark.parametrize("function", ["raise_strange", "raise_surrogate"])
def test_an_exception_that_cannot_be_printed_still_makes_the_job_dead(forq: Forq, function: str) -> None:
    forq.create(function, function, max_retries=0)
    forq.ctl("push", function, "1")
    wait_until(lambda: forq.queue_status(function)["dead"] == 1)
    assert forq.child(function)["restarts"] == 0


def test_a_poison_job_slows_down_respawns_of_its_queue(forq: Forq) -> None:
    forq.create("poison", "die", max_stalls=1000)
    forq.ctl("push", "poison", "1")
    wait_until(lambda: len([t for t in forq.traces("start") if t.queue == "poison"]) >= 5)
    began = len([t for t in forq.traces("start") if t.queue == "poison"])
    # A rate needs a fixed window.
    time.sleep(2)
    assert len([t for t in forq.traces("start") if t.queue == "poison"]) - began < 10
    stalls = [t.stalls for t in forq.traces("start") if t.queue == "poison"]
    assert stalls == list(range(len(stalls)))
    forq.ctl("delete", "poison", "--force")


def test_zombies_of_daemons_are_reaped(forq: Forq) -> None:
    forq.create("daemons", "daemonise")
    pid = forq.wait_for_child("daemons")["pid"]
    forq.client().queue("daemons").enqueue_many(range(3))
    wait_until(lambda: len(ends(forq, "daemons")) == 3)
    wait_until(lambda: not psutil.Process(pid).children(recursive=True), 10.0, "no zombie is left")


def test_the_retry_child_claims_no_jobs_of_the_main_lane(forq: Forq) -> None:
    forq.create("lanes", "sleep")
    forq.client().queue("lanes").enqueue_many([0.2] * 6)
    forq.ctl("restart", "lanes")
    forq.ctl("pause", "lanes")
    forq.ctl("resume", "lanes")
    wait_until(lambda: len(ends(forq, "lanes")) == 6)
    retry = forq.child("lanes", "retry")["pid"]
    assert retry not in {t.pid for t in forq.traces("end") if t.queue == "lanes"}


def test_an_import_that_hangs_ends_with_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(600)\n")
    with running(settings='cgroup = "off"\n') as forq:
        forq.ctl("create", "hanging", "--handler", "hanging", "--path", str(tmp_path), "--no-wait")
        pids = {child["pid"] for child in forq.queue_status("hanging")["children"]}
        assert forq.child("hanging")["state"] == "starting"
        os.kill(forq.pid, signal.SIGKILL)
        wait_until(lambda: not alive(pids), 10.0, "both children are gone")


def test_a_queue_can_be_deleted_right_after_its_handler_changed_during_a_job(forq: Forq) -> None:
    """The old process must not outlive the delete, and the queue must not come back."""
    forq.create("changing", "sleep", stop_grace="5s")
    forq.ctl("push", "changing", "60")
    pid = wait_until(lambda: [t for t in forq.traces("start") if t.queue == "changing"])[0].pid
    forq.ctl("create", "changing", "--handler", "traced:record", "--path", str(HANDLERS))
    assert alive({pid}) == {pid}, "it runs its job for up to 5 s"
    forq.ctl("delete", "changing", "--force")
    assert not alive({pid})
    assert "changing" not in forq.client().queues()


def test_recovery_still_happens_when_pulse_dies_while_redis_is_frozen(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        forq.create("frozen", "sleep")
        job_id = forq.ctl("push", "frozen", "[60]")
        started = wait_until(lambda: forq.traces("start"))[0]
        pulse = next(s["pid"] for s in forq.status()["supervisor"]["services"] if s["name"] == "pulse")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            os.kill(started.pid, signal.SIGKILL)
            # When the supervisor no longer lists the process, it has sent the recovery request to pulse.
            wait_until(lambda: started.pid not in forq.child_states("frozen"), what="pulse has the request")
            os.kill(pulse, signal.SIGKILL)
            wait_until(lambda: not alive({pulse}))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id], 15.0, "the job runs again")


def test_workers_share_the_jobs_of_an_oversized_batch(forq: Forq) -> None:
    """Quick jobs make batches large; the first batch of slower jobs must not stay with the worker that claimed it."""
    forq.create("shared", "share", concurrency=4)
    queue = forq.client().queue("shared")
    forq.wait_for_child("shared")
    forq.ctl("pause", "shared")
    queue.enqueue_many([0.00005] * 2000 + [0.008] * 100)
    forq.ctl("resume", "shared")
    wait_until(lambda: forq.queue_status("shared")["done"] == 2100)
    per_worker = Counter(trace.event for trace in forq.traces() if trace.queue == "shared")
    assert sum(per_worker.values()) >= 100
    assert len(per_worker) == 4, per_worker
    assert max(per_worker.values()) <= 50, per_worker
    forq.ctl("delete", "shared", "--force")


def test_rescue_works_after_pulse_was_replaced(forq: Forq) -> None:
    forq.create("rescued", "sleep", concurrency=2)
    queue = forq.client().queue("rescued")
    forq.wait_for_child("rescued")
    pulse = next(s["pid"] for s in forq.status()["supervisor"]["services"] if s["name"] == "pulse")
    queue.enqueue_many([0.0001] * 2000)
    os.kill(pulse, signal.SIGKILL)
    wait_until(lambda: forq.queue_status("rescued")["done"] == 2000)
    wait_until(lambda: next(s["pid"] for s in forq.status()["supervisor"]["services"] if s["name"] == "pulse"))
    forq.ctl("pause", "rescued")
    queue.enqueue_many([0.0001] * 400)
    slow = queue.enqueue(30)
    behind = queue.enqueue_many([0.0001] * 200)
    forq.ctl("resume", "rescued")
    wait_until(lambda: set(behind) <= set(ends(forq, "rescued")), 10.0, "the jobs behind the slow one ran")
    assert slow not in ends(forq, "rescued")
    forq.ctl("delete", "rescued", "--force")


def hgetall_calls(server: Server) -> int:
    with server.connect() as redis:
        return int(redis.info("commandstats")["cmdstat_hgetall"]["calls"])


def test_a_queue_deleted_by_one_supervisor_is_dropped_by_the_other(server: Server, redis_url: str) -> None:
    quick = 'heartbeat = "300ms"\nexpiry = "3s"\n'
    with running(redis=redis_url, settings=quick) as one, running(redis=redis_url, settings=quick) as other:
        one.create("both", "sleep")
        other.create("both", "sleep")
        other.client().queue("both").enqueue_many([0.1] * 20)
        wait_until(lambda: other.traces("start"))
        one.ctl("delete", "both", "--force")
        wait_until(lambda: other.run_ctl("status", "both").returncode == 4, 10.0, "the other supervisor drops it")
        before = hgetall_calls(server)
        # Each round of heartbeats ends with one HGETALL of the registry.
        wait_until(lambda: hgetall_calls(server) >= before + 8, what="three more rounds of both supervisors")
        assert other.client().queues() == {}
        assert not (other.state_dir / "queues" / "both.json").exists()


def test_a_queue_whose_data_was_lost_is_created_again(server: Server, redis_url: str) -> None:
    with running(redis=redis_url, settings='heartbeat = "300ms"\nexpiry = "3s"\n') as forq:
        forq.create("lost", "record")
        forq.wait_for_child("lost")
        server.flush()
        wait_until(lambda: "lost" in forq.client().queues(), 10.0, "the queue is there again")
        job_id = wait_until(lambda: (done := forq.run_ctl("push", "lost", "1")).returncode == 0 and done.stdout.strip())
        wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])


def test_an_unfinished_delete_does_not_block_the_name(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        with server.connect() as redis:
            redis.hset("forq:queues", "half", "deleting")
        forq.create("half", "record")
        job_id = forq.ctl("push", "half", "1")
        wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])
