"""Dead jobs and the failed log, with a real supervisor."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until, whole_lines


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="heartbeat = '200ms'\nexpiry = '1s'\n") as forq:
        yield forq


def dead_ids(forq: Forq, queue: str) -> list[str]:
    page = json.loads(forq.ctl("dead", "list", queue, "--json"))
    return [job["id"] for job in page["jobs"]]


def scribe(forq: Forq) -> dict[str, Any]:
    services = forq.status()["supervisor"]["services"]
    return next(service for service in services if service["name"] == "scribe")


def fail_by_hand(forq: Forq, queue: str, *jobs: str, fence: int = 7) -> None:
    """Fails a job permanently, as the script does."""
    key = f"forq:queue:{{{queue}}}:outbox"
    entry = {"fence": str(fence), "died_ms": 5000, "priority": 3, "enqueued_us": 1_000_000, "counts": [1, 0, 0]}
    with redis.Redis.from_url(forq.url) as store:
        for job in jobs:
            line = {**entry, "id": job, "body": [f"name of {job}", None, {"n": job}], "error": {"name": "E"}}
            store.rpush(key, json.dumps(line))
        store.publish(f"forq:queue:{{{queue}}}@0:outbox", queue)


def log_of(forq: Forq, queue: str) -> Path:
    return forq.state_dir / "logs" / queue / "failed.jsonl"


def logged(forq: Forq, queue: str) -> list[dict[str, Any]]:
    path = log_of(forq, queue)
    return [json.loads(line) for line in whole_lines(path)]


@pytest.mark.spec("M13")
def test_a_dead_job_is_listed_shown_retried_and_discarded(forq: Forq) -> None:
    forq.create("dying", "fail", max_retries=0)
    job_id = forq.ctl("push", "dying", '{"a": 1}', "--identifier", "order 7")
    wait_until(lambda: dead_ids(forq, "dying") == [job_id])
    listed = forq.ctl("dead", "list", "dying")
    assert "order 7" in listed
    assert "ValueError: no good: {'a': 1}" in listed
    shown = json.loads(forq.ctl("dead", "show", "dying", job_id, "--json"))
    assert shown["data"] == {"a": 1}
    assert "traced.py" in shown["error"]["traceback"]
    assert "traced.py" in forq.ctl("dead", "show", "dying", job_id)

    assert forq.ctl("dead", "retry", "dying", job_id) == f"retried {job_id}@{shown['fence']}"
    wait_until(lambda: dead_ids(forq, "dying") == [job_id])
    assert json.loads(forq.ctl("dead", "show", "dying", job_id, "--json"))["fence"] > shown["fence"]
    forq.ctl("dead", "discard", "dying", job_id)
    assert dead_ids(forq, "dying") == []
    assert forq.run_ctl("dead", "show", "dying", job_id).returncode == 4
    assert forq.run_ctl("dead", "retry", "nowhere", job_id).returncode == 4


@pytest.mark.spec("M13")
def test_all_dead_jobs_are_retried_once_even_if_they_die_again(forq: Forq) -> None:
    forq.create("mended", "fail", max_retries=0)
    ids = forq.client().queue("mended").enqueue_many(range(250))
    wait_until(lambda: forq.queue_status("mended")["dead"] == 250)
    assert forq.ctl("dead", "retry", "mended", "--all") == "retried 250 jobs of mended"
    wait_until(lambda: forq.queue_status("mended")["failed"] == 500)
    forq.create("mended", "record")
    forq.ctl("dead", "retry", "mended", "--all")
    wait_until(lambda: {t.job for t in forq.traces("end")} >= set(ids))
    assert forq.queue_status("mended")["dead"] == 0


@pytest.mark.spec("N19")
def test_permanent_failures_are_logged_and_recover_enqueues_each_once(forq: Forq) -> None:
    forq.create("logged", "record")
    forq.ctl("pause", "logged")
    fail_by_hand(forq, "logged", "x", "y")
    wait_until(lambda: [line["id"] for line in logged(forq, "logged")] == ["x", "y"], seconds=10)
    forq.ctl("push", "logged", "1", "--id", "y")
    file = str(log_of(forq, "logged"))
    assert forq.ctl("recover", file, "--dry-run") == "would push 2, already there 0, skipped 0, broken 0"
    first = forq.run_ctl("recover", file)
    assert (first.returncode, first.stdout) == (1, "recovered 1, already there 0, skipped 1, broken 0\n")
    assert "line 2: skipped: job y of queue logged is live" in first.stderr
    job = json.loads(forq.ctl("job", "logged", "x", "--json"))
    assert (job["data"], job["identifier"], job["priority"]) == ({"n": "x"}, "name of x", 3)
    forq.ctl("resume", "logged")
    wait_until(lambda: {t.job for t in forq.traces("end") if t.queue == "logged"} == {"x", "y"})
    forq.ctl("drain", "logged")
    assert forq.ctl("recover", file) == "recovered 1, already there 1, skipped 0, broken 0"
    forq.ctl("drain", "logged")
    assert forq.ctl("recover", file) == "recovered 0, already there 2, skipped 0, broken 0"
    assert forq.queue_status("logged")["done"] == 3


def test_each_log_line_of_an_id_that_died_several_times_can_be_recovered(forq: Forq) -> None:
    forq.create("again", "record")
    forq.ctl("pause", "again")
    for fence in (7, 8, 9):
        fail_by_hand(forq, "again", "x", fence=fence)
    wait_until(lambda: [line["id"] for line in logged(forq, "again")] == ["x"] * 3, seconds=10)
    file = str(log_of(forq, "again"))
    for known in range(3):
        ran = forq.run_ctl("recover", file)
        assert ran.stdout == f"recovered 1, already there {known}, skipped {2 - known}, broken 0\n"
        forq.ctl("resume", "again")
        forq.ctl("drain", "again")
        forq.ctl("pause", "again")
    assert forq.queue_status("again")["done"] == 3


def test_recover_accepts_lines_that_delete_wrote(forq: Forq) -> None:
    forq.create("moved", "record")
    forq.ctl("pause", "moved")
    job_id = forq.ctl("push", "moved", '{"keep": 1}', "--priority", "2")
    forq.ctl("delete", "moved", "--force")
    refused = forq.run_ctl("recover", str(log_of(forq, "moved")))
    assert refused.returncode == 4
    assert "'moved'" in refused.stderr
    forq.create("moved", "record")
    assert forq.ctl("recover", str(log_of(forq, "moved"))) == "recovered 1, already there 0, skipped 0, broken 0"
    wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])


def test_a_killed_scribe_is_replaced_and_writes_what_arrived_meanwhile(forq: Forq) -> None:
    forq.create("scribed", "noop")
    before = scribe(forq)["pid"]
    assert psutil.Process(before).cmdline()[0].startswith("forq: scribe")
    os.kill(before, signal.SIGKILL)
    fail_by_hand(forq, "scribed", "z")
    wait_until(lambda: [line["id"] for line in logged(forq, "scribed")] == ["z"])
    assert scribe(forq)["pid"] != before


def test_an_unwritable_failed_log_is_reported_and_nothing_is_lost(forq: Forq) -> None:
    forq.create("stuck", "noop")
    log = forq.state_dir / "logs" / "stuck" / "failed.jsonl"
    log.symlink_to(forq.directory / "elsewhere")
    fail_by_hand(forq, "stuck", "z")
    wait_until(lambda: forq.status()["supervisor"]["failed_log"]["errors"].get("stuck"))
    assert forq.run_ctl("status", "--check").returncode == 3
    log.unlink()
    wait_until(lambda: [line["id"] for line in logged(forq, "stuck")] == ["z"])
    wait_until(lambda: forq.status()["supervisor"]["failed_log"] == {"ok": True, "errors": {}})


def test_an_evicted_supervisor_s_scribe_continues_under_the_new_name(forq: Forq) -> None:
    forq.create("evicted", "noop")
    processor = forq.status()["supervisor"]["processor"]
    with redis.Redis.from_url(forq.url) as store:
        store.zrem("forq:queue:{evicted}:processors", processor)
        store.zadd("forq:queue:{evicted}:graves", {processor: 2**42})
    wait_until(lambda: forq.status()["supervisor"]["processor"] != processor)
    fail_by_hand(forq, "evicted", "z")
    wait_until(lambda: [line["id"] for line in logged(forq, "evicted")] == ["z"])
