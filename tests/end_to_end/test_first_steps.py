"""The product as a new user sees it: forqctl, the Python API, a job that runs."""

import json
import os
from collections.abc import Iterator

import psutil
import pytest
import redis

from forq import Client
from forq.errors import Exists, InvalidData, QueueFull, UnknownQueue, WaitTimeout
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


@pytest.mark.spec("N1", "N10", "N20", "Q22", "Q33", "Q34")
def test_a_pushed_job_runs_in_the_queue_s_own_process(forq: Forq) -> None:
    forq.create("first", "record")
    job_id = forq.ctl("push", "first", '{"n": 1}', "--identifier", "mine")
    ran = wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])
    assert ran[0].pid == forq.child("first")["pid"] != forq.pid
    assert wait_until(lambda: forq.queue_status("first")["done"] == 1)


@pytest.mark.spec("N4", "N5", "N6")
def test_status_shows_ids_and_identifiers_but_never_data(forq: Forq) -> None:
    forq.create("listed", "noop")
    forq.ctl("pause", "listed")
    job_id = forq.ctl("push", "listed", '"secret"', "--identifier", "order 7")
    queue = forq.queue_status("listed")
    assert queue["items"] == [{"id": job_id, "identifier": "order 7"}]
    assert (queue["state"], queue["waiting"]) == ("paused", 1)
    assert "secret" not in forq.ctl("status", "listed", "--json")
    assert "listed" in {queue["name"] for queue in forq.status()["queues"]}


@pytest.mark.spec("N8")
def test_remove_removes_one_job(forq: Forq) -> None:
    forq.create("removing", "noop")
    forq.ctl("pause", "removing")
    first, second = forq.ctl("push", "removing", "1"), forq.ctl("push", "removing", "2")
    forq.ctl("remove", "removing", first)
    assert [item["id"] for item in forq.queue_status("removing")["items"]] == [second]
    assert forq.run_ctl("remove", "removing", first).returncode == 4


def test_resume_runs_what_was_pushed_while_paused(forq: Forq) -> None:
    forq.create("pausing", "record")
    forq.ctl("pause", "pausing")
    job_id = forq.ctl("push", "pausing", "1")
    wait_until(lambda: forq.child("pausing")["state"] == "parked", what="worker is parked")
    forq.ctl("resume", "pausing")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])


@pytest.mark.spec("N3")
def test_a_full_queue_refuses_jobs_and_stores_nothing(forq: Forq) -> None:
    forq.create("small", "noop", max_items=2)
    forq.ctl("pause", "small")
    queue = forq.client().queue("small")
    queue.enqueue(1)
    with pytest.raises(QueueFull, match="max_items = 2"):
        queue.enqueue_many([2, 3])
    assert queue.status()["waiting"] == 1


@pytest.mark.spec("Q2", "Q25")
def test_the_python_api_enqueues_reads_and_cancels(forq: Forq) -> None:
    forq.create("api", "noop")
    forq.ctl("pause", "api")
    queue = forq.client().queue("api")
    assert queue.enqueue({"a": [1, None]}, id="x", identifier="ix", priority=2) == "x"
    job = queue.job("x")
    assert job["data"] == {"a": [1, None]}
    assert (job["state"], job["priority"], job["identifier"]) == ("waiting", 2, "ix")
    assert (job["retry_count"], job["stall_count"], job["timeout_count"]) == (0, 0, 0)
    with pytest.raises(Exists):
        queue.enqueue(1, id="x", if_exists="refuse")
    assert queue.enqueue(1, id="x", if_exists="skip") == "x"
    assert queue.enqueue(1, token="t") == queue.enqueue(1, token="t")
    assert queue.cancel("x") is True
    assert queue.cancel("x") is False
    with pytest.raises(InvalidData):
        queue.enqueue(float("nan"))
    with pytest.raises(UnknownQueue):
        forq.client().queue("nowhere").enqueue(1)


def test_an_async_handler_runs(forq: Forq) -> None:
    forq.create("coroutines", "sleep_async")
    job_id = forq.ctl("push", "coroutines", "0.01")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])


@pytest.mark.spec("Q34")
@pytest.mark.parametrize(("function", "name"), [("fail", "ValueError"), ("leave", "SystemExit")])
def test_a_handler_that_raises_sends_its_job_to_dead_with_the_error(forq: Forq, function: str, name: str) -> None:
    forq.create(f"raising-{function}", function, max_retries=0)
    job_id = forq.ctl("push", f"raising-{function}", "3")
    wait_until(lambda: forq.queue_status(f"raising-{function}")["dead"] == 1)
    job = json.loads(forq.ctl("job", f"raising-{function}", job_id, "--json"))
    assert (job["state"], job["error"]["name"], job["data"]) == ("dead", name, 3)
    assert forq.queue_status(f"raising-{function}")["failed"] == 1


@pytest.mark.spec("M2")
def test_a_job_s_type_picks_its_handler(forq: Forq) -> None:
    forq.ctl("create", "typed", "--handler", "traced:fail", "--type", "good=traced", "--path", str(HANDLERS))
    good = forq.ctl("push", "typed", "1", "--type", "good")
    forq.ctl("push", "typed", "1", "--type", "strange")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == good])
    wait_until(lambda: forq.queue_status("typed")["dead"] == 1)


def test_a_handler_that_cannot_be_imported_is_shown_and_retried_on_change(forq: Forq) -> None:
    forq.ctl("create", "broken", "--handler", "no_such_module:f", "--path", str(HANDLERS), "--no-wait")
    queue = wait_until(lambda: (q := forq.queue_status("broken"))["state"] == "config_error" and q)
    assert "no_such_module" in queue["reason"]
    forq.ctl("create", "broken", "--handler", "traced:record", "--path", str(HANDLERS))
    job_id = forq.ctl("push", "broken", "1")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])


def test_restart_replaces_both_children_and_the_queue_continues(forq: Forq) -> None:
    forq.create("renewed", "record")
    before = forq.wait_for_child("renewed")["pid"]
    forq.ctl("restart", "renewed")
    after = forq.wait_for_child("renewed", not_pid=before)["pid"]
    assert after != before
    job_id = forq.ctl("push", "renewed", "1")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id])


def test_drain_answers_when_nothing_is_left(forq: Forq) -> None:
    forq.create("drained", "sleep")
    for _ in range(5):
        forq.ctl("push", "drained", "0.05")
    forq.ctl("drain", "drained")
    queue = forq.queue_status("drained")
    assert (queue["waiting"], queue["active"], queue["done"]) == (0, 0, 5)


@pytest.mark.spec("N7", "N12")
def test_delete_needs_force_for_jobs_and_logs_what_it_drops(forq: Forq) -> None:
    forq.create("doomed", "noop")
    forq.ctl("pause", "doomed")
    job_id = forq.ctl("push", "doomed", '{"keep": "me"}', "--identifier", "precious")
    pids = {child["pid"] for child in forq.queue_status("doomed")["children"]}
    refused = forq.run_ctl("delete", "doomed")
    assert refused.returncode == 1
    assert "force" in refused.stderr
    forq.ctl("delete", "doomed", "--force")
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert forq.run_ctl("status", "doomed").returncode == 4
    line = json.loads((forq.state_dir / "logs" / "doomed" / "failed.jsonl").read_text())
    assert (line["id"], line["identifier"], line["data"]) == (job_id, "precious", {"keep": "me"})
    forq.create("doomed", "record")
    again = forq.ctl("push", "doomed", "1")
    wait_until(lambda: [t for t in forq.traces("end") if t.job == again])


@pytest.mark.spec("R6")
def test_concurrency_workers_run_side_by_side_in_one_process(forq: Forq) -> None:
    forq.create("wide", "sleep", concurrency=4)
    forq.wait_for_child("wide")
    # All at once: every job must have begun before the first one ends.
    ids = set(forq.client().queue("wide").enqueue_many([1.5] * 4))
    wait_until(lambda: len({t.job for t in forq.traces("start")} & ids) == 4)
    assert not {t.job for t in forq.traces("end")} & ids
    assert len({t.pid for t in forq.traces("start") if t.job in ids}) == 1
    wait_until(lambda: len({t.job for t in forq.traces("end")} & ids) == 4)


def test_a_push_right_after_the_start_waits_for_the_queue() -> None:
    starting = Forq(settings=f"[queues.early]\nhandler = 'traced:record'\npath = ['{HANDLERS}']\n")
    try:
        starting.start(ready=False)
        wait_until(lambda: starting.run_ctl("ping").returncode == 0)
        job_id = starting.ctl("push", "early", "1")
        wait_until(lambda: [t for t in starting.traces("end") if t.job == job_id])
    finally:
        starting.remove()


@pytest.mark.spec("R3")
def test_each_worker_blocks_on_a_connection_of_its_own(forq: Forq) -> None:
    forq.create("blocking", "noop", concurrency=3)
    forq.wait_for_child("blocking")
    with redis.Redis.from_url(forq.url) as server:

        def blocked() -> list[dict[str, str]]:
            return [c for c in server.client_list() if c["name"].startswith("forq-worker-") and c["cmd"] == "blmove"]

        everywhere = sum(len(queue["children"]) for queue in forq.status()["queues"])
        found = wait_until(lambda: len(blocked()) >= 3 and blocked())
    assert len({client["name"] for client in found}) == len(found) <= everywhere + 10


def test_a_handler_reaches_its_own_redis_without_configuration(redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        forq.create("chain", "enqueue_another")
        forq.client().queue("chain").enqueue(3)
        wait_until(lambda: forq.queue_status("chain")["done"] == 4)


def test_a_handler_finds_the_queues_of_its_own_prefix() -> None:
    with running(settings='prefix = "mine:"\n') as forq:
        forq.create("chain", "enqueue_another")
        queue = Client(forq.url, prefix="mine:").queue("chain")
        queue.enqueue(2)
        wait_until(lambda: queue.status()["done"] == 3, what="each job has enqueued the next one")


def test_a_queue_is_paused_drained_and_deleted_from_python(forq: Forq) -> None:
    forq.create("py", "noop")
    client = forq.client()
    queue = client.queue("py")
    queue.pause()
    queue.enqueue_many(range(10), tokens=[f"t{number}" for number in range(10)])
    with pytest.raises(WaitTimeout, match="10 waiting, 0 active; it is paused"):
        queue.drain(timeout=0.2)
    queue.resume()
    queue.drain(timeout=60)
    assert queue.status()["done"] == 10
    (main, *_) = forq.queue_status("py")["children"]
    assert client.delete_queue("py") == 0
    # The supervisor learns it from the next heartbeat.
    wait_until(
        lambda: "py" not in {each["name"] for each in forq.status()["queues"]}, 30.0, "it is not served any more"
    )
    wait_until(lambda: not psutil.pid_exists(main["pid"]), what="its process has ended")
    forq.create("py", "noop")


def test_shutdown_names_the_jobs_it_waits_for_and_returns_when_the_supervisor_has_ended() -> None:
    with running() as forq:
        forq.create("busy", "sleep", stop_grace="60s")
        forq.ctl("push", "busy", "3", "--id", "long")
        wait_until(lambda: forq.traces("start"))
        stopped = forq.run_ctl("shutdown")
        assert (stopped.returncode, stopped.stdout) == (0, "the supervisor has stopped\n")
        assert "forqctl: waiting for running jobs, at most 1m00s: busy long (" in stopped.stderr
        assert forq.process is not None
        assert forq.process.poll() == 0, "it has ended, so that another may start at once"
