"""No memory left in the server, no space on its disk, no space on the disk of the failed log."""

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.recovery import WorkerRecovery
from forq.errors import BackPressure, RedisUnavailable
from tests.faults.supervisor_pair import STEADY, assert_nobody_was_evicted, supervisor_pair
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until, whole_lines
from tests.support.faults.faulty_servers import SmallDiskServer

pytestmark = pytest.mark.timeout(120)

OUTLASTED_SECONDS = 2.5


@pytest.fixture
def pair(redis_url: str, tmp_path: Path) -> Iterator[tuple[Forq, Forq]]:
    with supervisor_pair(redis_url, tmp_path / "trace") as pair:
        yield pair


@pytest.mark.fault("server out of memory")
def test_out_of_memory_producers_get_an_error_and_every_stored_job_runs(
    server: Server, pair: tuple[Forq, Forq]
) -> None:
    one, _ = pair
    for forq in pair:
        forq.create("work", "sleep")
        forq.wait_for_child("work")
    one.create("doomed", "fail", max_retries=1, min_backoff="200ms")
    queue = one.client().queue("work")
    for name in ("work", "doomed"):
        one.ctl("pause", name)
    ids = queue.enqueue_many([0.02] * 60)
    later = queue.enqueue(0, run_in=1.0)
    one.client().queue("doomed").enqueue(1, id="d")
    with server.connect() as redis:
        redis.config_set("maxmemory", 1)
        full_at = time.monotonic()
        with pytest.raises(BackPressure, match="out of memory"):
            queue.enqueue(1, id="refused")
        assert "out of memory" in one.run_ctl("push", "work", "1").stderr
        for name in ("work", "doomed"):
            one.ctl("resume", name)
        wait_until(lambda: {*ids, later} <= {t.job for t in one.traces("end")}, what="all that is stored runs")
        wait_until(
            lambda: one.client().queue("doomed").status()["dead"] == 1, what="a failure is retried and then dead"
        )
        wait_until(lambda: list(one.state_dir.glob("logs/doomed/failed.jsonl")), what="and logged")
        wait_until(lambda: time.monotonic() - full_at > OUTLASTED_SECONDS, what="the fault outlasts the expiry")
        assert_nobody_was_evicted(*pair)
        redis.config_set("maxmemory", 0)
    queue.enqueue(0, id="after")
    wait_until(lambda: [t for t in one.traces("end") if t.job == "after"], 10.0, "workers wait for jobs again")
    assert "refused" not in {t.job for t in one.traces()}
    starts = [t.job for t in one.traces("start") if t.queue == "work"]
    assert len(starts) == len(set(starts)) == 62


@pytest.fixture
def small() -> Iterator[SmallDiskServer]:
    with SmallDiskServer() as server:
        yield server


@pytest.mark.fault("disk of the append-only file full")
def test_a_server_that_cannot_write_delays_jobs_and_loses_no_acknowledged_one(small: SmallDiskServer) -> None:
    with running(redis=small.url, settings=STEADY) as forq:
        forq.create("work", "sleep")
        forq.wait_for_child("work")
        queue = forq.client().queue("work")
        acknowledged = [queue.enqueue(1.0, id="runs")]
        wait_until(lambda: forq.traces("start"), what="a job runs")
        small.fill()

        def refused() -> bool:
            try:
                acknowledged.append(queue.enqueue(0))
            except RedisUnavailable as exc:
                return "MISCONF" in str(exc)
            return False

        wait_until(refused, what="the server refuses to write")
        full_at = time.monotonic()
        wait_until(lambda: not forq.status()["supervisor"]["redis"]["ok"], what="status reports it")
        assert forq.run_ctl("status", "--check").returncode == 3
        wait_until(lambda: time.monotonic() - full_at > OUTLASTED_SECONDS, what="the fault outlasts the expiry")
        small.free()
        wait_until(lambda: forq.status()["supervisor"]["redis"]["ok"], what="the server writes again")
        acknowledged.append(
            wait_until(lambda: forq.run_ctl("push", "work", "0").stdout.strip(), what="a push is taken")
        )
        wait_until(lambda: {t.job for t in forq.traces("end")} >= set(acknowledged), what="all ran")
        wait_until(lambda: forq.client().queue("work").status()["done"] >= len(acknowledged), what="and are settled")
        assert_nobody_was_evicted(forq)


@pytest.mark.fault("disk of the failed log full")
def test_a_full_disk_keeps_the_lines_of_the_failed_log_in_redis_until_there_is_space(redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        forq.create("doomed", "fail", max_retries=0)
        log = forq.state_dir / "logs" / "doomed" / "failed.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mknod(log, 0o600 | stat.S_IFCHR, os.makedev(1, 7))  # /dev/full
        except PermissionError:
            pytest.skip("a device that is always full needs root")
        forq.client().queue("doomed").enqueue_many([1, 2, 3])
        error = wait_until(
            lambda: forq.status()["supervisor"]["failed_log"]["errors"].get("doomed"), what="the error is reported"
        )
        assert "No space left on device" in str(error)
        assert "doomed" in forq.run_ctl("status", "--check").stderr
        wait_until(lambda: forq.client().queue("doomed").status()["dead"] == 3, what="the queue continues")
        log.unlink()
        wait_until(lambda: len(whole_lines(log)) == 3, what="they are written")
        assert len({json.loads(line)["id"] for line in log.read_text().splitlines()}) == 3
        wait_until(lambda: forq.status()["supervisor"]["failed_log"]["ok"], what="the error is gone")


def always_full(path: Path) -> None:
    """A file that cannot be written to."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 7))  # /dev/full
    except PermissionError:
        pytest.skip("a device that is always full needs root")


def test_a_supervisor_whose_disk_is_full_at_start_names_the_disk(redis_url: str) -> None:
    forq = Forq(redis=redis_url)
    try:
        always_full(forq.state_dir / "processor.tmp")
        forq.start(ready=False)
        assert forq.process is not None
        assert forq.process.wait(30) == 1
        name = forq.state_dir / "processor"
        where = forq.state_dir
        reason = f"free some space (df -h {where}; df -i {where})"
        assert (
            forq.log == f"forq: {name} cannot be written: No space left on device; the file system is full: {reason}\n"
        )
    finally:
        forq.remove()


def test_a_supervisor_evicted_while_its_disk_is_full_rejoins(redis_url: str) -> None:
    with running(redis=redis_url, settings=STEADY) as forq:
        forq.create("work", "record")
        forq.wait_for_child("work")
        always_full(forq.state_dir / "processor.tmp")
        before = forq.status()["supervisor"]["processor"]
        link = Link(redis_url)
        WorkerRecovery(link, DEFAULT_PREFIX, "another").evict("work", before, "host_lost")
        link.close()
        forq.client().queue("work").enqueue(1)
        wait_until(lambda: len(forq.traces("end")) == 1, what="a job runs")
        after = forq.status()["supervisor"]["processor"]
        assert after != before
        assert "processor cannot be written: No space left on device" in forq.log
        assert "Traceback" not in forq.log
        (forq.state_dir / "processor.tmp").unlink()
        wait_until(lambda: (forq.state_dir / "processor").read_text().startswith(after), what="its name is written")
