"""Metrics and health of a running forq: they show what happened, also after kill -9."""

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest

from tests.support.drive.metrics import Samples, Scraper
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

SETTINGS = '[metrics]\nlisten = "./m.sock"\nhealth_seconds = 1\n'


@contextmanager
def measured(redis: str | None = None) -> Iterator[tuple[Forq, Scraper]]:
    with running(redis=redis, settings=SETTINGS) as forq:
        yield forq, Scraper(forq.directory / "m.sock")


def counters(samples: Samples) -> Samples:
    return {key: value for key, value in samples.items() if key[0].endswith(("_total", "_bucket", "_count", "_sum"))}


def fallen(before: Samples, after: Samples) -> dict[Any, Any]:
    """Counters that decreased or disappeared."""
    return {
        key: (value, after.get(key)) for key, value in counters(before).items() if (after.get(key) or 0.0) < value
    } | {key: (value, None) for key, value in counters(before).items() if key not in after}


def metrics_pid(forq: Forq) -> int | None:
    services = forq.status()["supervisor"]["services"]
    pid: int | None = next(service["pid"] for service in services if service["name"] == "metrics")
    return pid


def titles(forq: Forq) -> set[str]:
    return {" ".join(process.cmdline()).strip() for process in forq.processes()}


def descriptors(pid: int) -> set[str]:
    """The targets of the descriptors of a process."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def fresh(scraper: Scraper) -> Samples:
    """A scrape that is not answered from the previous snapshot."""
    looks = scraper.value("forq_looks_total")
    assert looks is not None
    found: Samples = {}

    def wait_for_snapshot() -> bool:
        found.clear()
        found.update(scraper.samples())
        return found["forq_looks_total", ()] > looks

    wait_until(wait_for_snapshot, what="another snapshot")
    return found


def run_jobs(forq: Forq, name: str, count: int) -> None:
    queue = forq.client().queue(name)
    before = queue.status()["done"]
    queue.enqueue_many([0] * count)
    wait_until(lambda: queue.status()["done"] == before + count, what=f"{count} jobs done")


def faults(scraper: Scraper) -> list[tuple[str, str | None]]:
    _, found = scraper.health()
    return [(fault["check"], fault.get("queue")) for fault in found]


def test_a_scrape_shows_what_happened() -> None:
    with measured() as (forq, scraper):
        forq.create("good", "noop")
        forq.create("bad", "fail", max_retries=1, min_backoff="10ms", max_backoff="10ms")
        run_jobs(forq, "good", 300)
        bad = forq.client().queue("bad")
        bad.enqueue_many([0] * 3)
        wait_until(lambda: bad.status()["failed"] == 3, what="three failures")
        bad.enqueue(0, run_in=3600)
        forq.ctl("pause", "good")
        forq.client().queue("good").enqueue_many([0] * 5)
        samples = fresh(scraper)

    def value(name: str, **labels: str) -> float:
        return samples[name, tuple(sorted(labels.items()))]

    assert value("forq_done_total", queue="good") == 300
    assert value("forq_failed_total", queue="bad") == 3
    assert value("forq_jobs", queue="good", state="waiting") == 5
    assert value("forq_jobs", queue="bad", state="scheduled") == 1
    assert value("forq_jobs", queue="bad", state="dead") == 3
    assert 3500 < value("forq_next_due_seconds", queue="bad") <= 3600
    assert value("forq_queue_state", queue="good", mode="work", state="paused") == 1
    # Every attempt that returned is in the histogram; only first attempts have waited.
    assert value("forq_run_seconds_count", queue="good") == value("forq_wait_seconds_count", queue="good") == 300
    assert value("forq_run_seconds_bucket", queue="good", le="+Inf") == 300
    assert value("forq_run_seconds_sum", queue="good") > 0
    assert value("forq_attempts_total", queue="good", outcome="returned") == 300
    assert (
        value("forq_attempts_total", queue="bad", outcome="raised") == value("forq_run_seconds_count", queue="bad") == 6
    )
    assert value("forq_attempts_total", queue="bad", outcome="returned") == 0
    assert value("forq_wait_seconds_count", queue="bad") == 3
    assert value("forq_redis_up") == value("forq_supervisor_up") == value("forq_healthy") == 1
    assert value("forq_capacity_units") > 0
    assert value("forq_supervisor_uptime_seconds") > 0


def test_a_wait_is_as_long_as_the_job_waited_and_a_delay_does_not_count() -> None:
    with measured() as (forq, scraper):
        forq.create("q", "noop")
        queue = forq.client().queue("q")
        forq.ctl("pause", "q")
        queue.enqueue(0)
        queue.enqueue(0, id="later", run_in=0.3)
        queue.enqueue(0, id="moved")
        queue.enqueue(0, id="moved", run_in=0.3)
        wait_until(lambda: queue.status()["waiting"] == 3, what="all are due")
        wait_until(lambda: (queue.status()["oldest_waiting_seconds"] or 0) > 0.6, what="the first has waited")
        forq.ctl("resume", "q")
        wait_until(lambda: queue.status()["done"] == 3, what="all done")
        samples = fresh(scraper)
    assert samples["forq_run_seconds_count", (("queue", "q"),)] == 3
    assert samples["forq_wait_seconds_count", (("queue", "q"),)] == 1
    assert 0.6 < samples["forq_wait_seconds_sum", (("queue", "q"),)] < 10


def test_no_counter_decreases_when_workers_and_the_metrics_process_are_killed() -> None:
    with measured() as (forq, scraper):
        for name in ("a", "b"):
            forq.create(name, "noop")
            forq.wait_for_child(name)
            run_jobs(forq, name, 50)
        seen = [fresh(scraper)]
        # Both at once, so that their successors may swap slots.
        pids = {name: forq.child(name)["pid"] for name in ("a", "b")}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for name in ("b", "a"):
            forq.wait_for_child(name, not_pid=pids[name])
        seen.append(fresh(scraper))
        run_jobs(forq, "a", 10)
        before = metrics_pid(forq)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: metrics_pid(forq) not in (None, before), what="another metrics process")
        seen.append(fresh(scraper))
        run_jobs(forq, "b", 10)
        seen.append(fresh(scraper))
    for earlier, later in pairwise(seen):
        assert fallen(earlier, later) == {}
    last = seen[-1]
    for name in ("a", "b"):
        queue = ("queue", name)
        assert last["forq_run_seconds_count", (queue,)] == last["forq_done_total", (queue,)] == 60
        assert last["forq_restarts_total", (queue, ("role", "main"))] == 1
        assert last["forq_restarts_total", (queue, ("role", "retry"))] == 0
    assert last["forq_service_restarts_total", (("service", "metrics"),)] == 1


def test_a_queue_that_is_deleted_and_recreated_begins_at_zero() -> None:
    with measured() as (forq, scraper):
        forq.create("q", "noop")
        run_jobs(forq, "q", 20)
        assert fresh(scraper)["forq_run_seconds_count", (("queue", "q"),)] == 20
        forq.ctl("delete", "q")
        assert not [key for key in fresh(scraper) if ("queue", "q") in key[1]]
        forq.create("q", "noop")
        run_jobs(forq, "q", 3)
        assert fresh(scraper)["forq_run_seconds_count", (("queue", "q"),)] == 3


def test_only_the_supervisor_and_the_metrics_process_have_the_listening_socket() -> None:
    with measured() as (forq, _):
        forq.create("q", "noop")
        forq.wait_for_child("q")
        path = str(forq.directory / "m.sock")
        with open("/proc/net/unix") as sockets:
            inodes = {line.split()[6] for line in sockets if line.rstrip().endswith(path)}
        assert len(inodes) == 1
        wanted = {f"socket:[{inode}]" for inode in inodes}
        holders = [process for process in forq.processes() if wanted & descriptors(process.pid)]
        names = {" ".join(process.cmdline()).split(" (")[0].strip() for process in holders}
        assert names == {"forq: supervisor", "forq: metrics"}


def test_many_scrapes_take_one_snapshot_per_second() -> None:
    with measured() as (_, scraper):
        began = time.monotonic()
        looks = [scraper.samples()["forq_looks_total", ()] for _ in range(50)]
        for _ in range(20):
            scraper.health()
        took = time.monotonic() - began
        assert looks[-1] - looks[0] <= took + 1


def test_health_is_red_while_a_handler_hangs_and_green_when_it_is_ended() -> None:
    with measured() as (forq, scraper):
        forq.create("q", "sleep", timeout=0)
        forq.wait_for_child("q")
        queue = forq.client().queue("q")
        assert scraper.health() == (200, [])
        queue.enqueue(3600, id="hangs")
        wait_until(lambda: forq.traces("start"), what="it runs")
        queue.enqueue(0, id="waits")
        wait_until(lambda: faults(scraper) == [("stuck", "q")], what="a fault")
        assert scraper.health()[0] == 503
        assert fresh(scraper)["forq_healthy", ()] == 0
        forq.ctl("kill", "q", "hangs")
        wait_until(lambda: faults(scraper) == [], what="no fault")


def test_health_is_green_while_a_job_runs_within_its_timeout() -> None:
    with measured() as (forq, scraper):
        forq.create("q", "sleep", timeout="1h", stop_grace=0)
        queue = forq.client().queue("q")
        queue.enqueue(3600, id="takes-its-time")
        wait_until(lambda: forq.traces("start"), what="it runs")
        queue.enqueue(0)
        wait_until(lambda: (queue.status()["oldest_waiting_seconds"] or 0) > 2, what="the other is old")
        assert scraper.health() == (200, [])


def test_health_is_red_while_a_job_without_a_timeout_hangs_and_green_when_it_is_killed() -> None:
    with measured() as (forq, scraper):
        forq.create("q", "sleep", timeout=0, stop_grace=0)
        queue = forq.client().queue("q")
        queue.enqueue(3600, id="hangs")
        wait_until(lambda: forq.traces("start"), what="it runs")
        queue.enqueue_many([0] * 3)
        wait_until(lambda: faults(scraper) == [("stuck", "q")], what="a fault")
        forq.ctl("pause", "q")
        wait_until(lambda: faults(scraper) == [], what="a paused queue is not checked")
        forq.ctl("resume", "q")
        wait_until(lambda: faults(scraper) == [("stuck", "q")], what="a fault again")
        forq.ctl("kill", "q", "hangs")
        wait_until(lambda: faults(scraper) == [], what="no fault")
        wait_until(lambda: queue.status()["done"] == 3, what="the others ran")


def test_health_is_red_while_redis_is_down_and_green_when_it_is_back() -> None:
    with Server(appendonly=True) as server, measured(redis=server.url) as (forq, scraper):
        forq.create("q", "noop")
        run_jobs(forq, "q", 5)
        assert scraper.health() == (200, [])
        before = fresh(scraper)
        server.stop()
        wait_until(lambda: faults(scraper) == [("redis", None)], what="a fault")
        down = fresh(scraper)
        assert down["forq_redis_up", ()] == 0
        assert ("forq_done_total", (("queue", "q"),)) not in down
        assert down["forq_run_seconds_count", (("queue", "q"),)] == 5
        assert down["forq_scrape_errors_total", (("source", "redis"),)] >= 1
        server.start()
        wait_until(lambda: faults(scraper) == [], what="no fault")
        assert fallen(before, fresh(scraper)) == {}


def test_health_is_red_while_the_supervisor_is_frozen() -> None:
    with measured() as (forq, scraper):
        assert scraper.health() == (200, [])
        os.kill(forq.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: faults(scraper) == [("supervisor", None)], what="a fault")
            assert scraper.value("forq_supervisor_up") == 0
        finally:
            os.kill(forq.pid, signal.SIGCONT)
        wait_until(lambda: faults(scraper) == [], what="no fault")


def test_a_queue_that_cannot_be_served_is_unhealthy() -> None:
    with measured() as (forq, scraper):
        forq.ctl("create", "q", "--handler", "no_such_module:f", "--no-wait")
        wait_until(lambda: faults(scraper) == [("state", "q")], what="a fault")


def test_clients_that_send_nothing_or_garbage_delay_nobody() -> None:
    with measured() as (forq, scraper):
        idle = []
        try:
            for number in range(100):
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                client.settimeout(5)
                client.connect(str(forq.directory / "m.sock"))
                if number % 2:
                    client.sendall(b"\x00\xff garbage")
                idle.append(client)
            began = time.monotonic()
            assert scraper.health() == (200, [])
            assert time.monotonic() - began < 5
        finally:
            for client in idle:
                client.close()


def test_an_address_in_use_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        forq = Forq(settings=f'[metrics]\nlisten = "{address}"\n')
        try:
            forq.start(ready=False)
            assert forq.process is not None
            assert forq.process.wait(20) == 78
            assert f"[metrics]: cannot listen at {address}: Address already in use" in forq.log
        finally:
            forq.remove()


def test_the_metrics_are_served_over_tcp_and_the_address_is_free_after_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    with running(settings=f'[metrics]\nlisten = "{address}"\n') as forq:
        with urllib.request.urlopen(f"http://{address}/", timeout=10) as answer:
            assert b"/healthz" in answer.read()
        assert "forq: metrics" in titles(forq)
        assert forq.stop() == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5)


def test_without_the_table_there_is_no_metrics_process() -> None:
    with running() as forq:
        assert "forq: clerk" in titles(forq)
        assert "forq: metrics" not in titles(forq)
