"""Queues that release, as their users meet them: real supervisors, forqctl, the Python API beside them."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import psutil
import pytest

from forq import Client
from forq.broker.journal import Event, read_entry
from forq.client import NewJob, new_job
from forq.errors import QueueExists, UnknownQueue
from forq.supervisor.ctl.client import Client as ControlClient
from tests.support.running import BIN, Forq, running, wait_until
from tests.support.server import Server

QUICK = ("--set", "release_interval=10ms", "--set", "retry_interval=10ms")


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings='heartbeat = "200ms"\nexpiry = "10s"\n') as forq:
        yield forq


def started(forq: Forq, *arguments: str) -> "subprocess.Popen[str]":
    """A forqctl that goes on while the test does."""
    return subprocess.Popen(
        [str(BIN / "forqctl"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=forq.environ(),
    )


def awaiters(forq: Forq, name: str) -> int:
    return int(forq.queue_status(name)["awaiters"])


def control(forq: Forq) -> ControlClient:
    return ControlClient(str(forq.state_dir / "control.sock"), 20.0)


@pytest.mark.spec("N13", "N14", "N20")
def test_an_item_goes_to_the_one_who_awaits_it(forq: Forq) -> None:
    forq.ctl("create", "gate", "--mode", "auto_release", *QUICK)
    any_item = started(forq, "await", "gate", "--json", "--wait", "20s")
    wait_until(lambda: awaiters(forq, "gate") == 1)
    this_item = started(forq, "await", "gate", "wanted", "--json", "--wait", "20s")
    wait_until(lambda: awaiters(forq, "gate") == 2)
    forq.ctl("push", "gate", '{"n": 1}', "--id", "wanted", "--identifier", "mine")
    assert json.loads(this_item.communicate(timeout=20)[0]) == {"id": "wanted", "identifier": "mine", "data": {"n": 1}}
    other = forq.ctl("push", "gate", "2")
    assert json.loads(any_item.communicate(timeout=20)[0])["id"] == other
    assert (any_item.returncode, this_item.returncode) == (0, 0)
    queue = forq.queue_status("gate")
    assert (queue["mode"], queue["waiting"], queue["active"], queue["awaiters"]) == ("auto_release", 0, 0, 0)


@pytest.mark.spec("N13")
def test_one_item_is_released_per_interval(forq: Forq) -> None:
    forq.ctl("create", "slow", "--mode", "auto_release", "--set", "release_interval=300ms")
    waiting = [started(forq, "await", "slow", "--wait", "20s") for _ in range(4)]
    wait_until(lambda: awaiters(forq, "slow") == 4)
    forq.client().queue("slow").enqueue_many([1, 2, 3, 4])
    for process in waiting:
        assert process.wait(20) == 0
    times_us = sorted(event.time_us for event in _journal(forq, "slow") if event.verb == "claimed")
    assert len(times_us) == 4
    assert all(later - earlier >= 300_000 for earlier, later in pairwise(times_us))


@pytest.mark.spec("N15", "N16", "N19")
def test_an_item_that_nobody_awaits_is_dead_in_the_failed_log_and_recovered(forq: Forq) -> None:
    forq.ctl("create", "lost", "--mode", "auto_release", *QUICK, "--set", "release_retries=2")
    job_id = forq.ctl("push", "lost", '{"keep": "me"}', "--identifier", "order 7")
    wait_until(lambda: forq.queue_status("lost")["dead"] == 1)
    log = forq.state_dir / "logs" / "lost" / "failed.jsonl"
    line = wait_until(lambda: log.exists() and log.read_text().splitlines())[0]
    written = json.loads(line)
    assert (written["id"], written["identifier"], written["data"]) == (job_id, "order 7", {"keep": "me"})
    assert written["error"]["name"] == "NotAwaited"
    found = started(forq, "await", "lost", "--json", "--wait", "20s")
    wait_until(lambda: awaiters(forq, "lost") == 1)
    forq.ctl("recover", str(log))
    assert json.loads(found.communicate(timeout=20)[0])["data"] == {"keep": "me"}


@pytest.mark.spec("N21", "N23")
def test_items_leave_a_queue_on_request_only(forq: Forq) -> None:
    forq.ctl("create", "orders", "--mode", "on_request")
    empty = forq.run_ctl("dequeue", "orders")
    assert (empty.returncode, empty.stdout) == (6, "")
    first, second, third = (forq.ctl("push", "orders", str(n)) for n in range(3))
    assert forq.ctl("dequeue", "orders", third) == f"{third} 2"
    assert json.loads(forq.ctl("dequeue", "orders", "--json")) == {"id": first, "identifier": first, "data": 0}
    assert forq.run_ctl("dequeue", "orders", "none").returncode == 6
    assert forq.ctl("dequeue", "orders", "--wait", "5s") == f"{second} 1"
    waiting = started(forq, "dequeue", "orders", "--wait", "20s")
    wait_until(lambda: awaiters(forq, "orders") == 1)
    late = forq.ctl("push", "orders", '"late"')
    assert waiting.communicate(timeout=20)[0] == f'{late} "late"\n'
    queue = forq.queue_status("orders")
    assert (queue["dead"], queue["failed_total"], queue["waiting"], queue["active"]) == (0, 0, 0, 0)


def test_when_time_is_up_nobody_awaits_any_more(forq: Forq) -> None:
    forq.ctl("create", "timed", "--mode", "auto_release")
    done = forq.run_ctl("await", "timed", "--wait", "300ms")
    assert (done.returncode, done.stdout) == (6, "")
    assert awaiters(forq, "timed") == 0


@pytest.mark.spec("N21")
def test_with_a_lease_the_item_is_held_until_it_is_acknowledged_or_goes_back(forq: Forq) -> None:
    forq.ctl("create", "leased", "--mode", "on_request")
    job_id = forq.ctl("push", "leased", "1")
    item = json.loads(forq.ctl("dequeue", "leased", "--lease", "200ms", "--json"))
    assert (item["id"], item["lease_seconds"]) == (job_id, 0.2)
    assert forq.ctl("dequeue", "leased", "--wait", "10s", "--lease", "10s").startswith(f"{job_id} ")
    late = forq.run_ctl("ack", "leased", job_id, str(item["fence"]), item["awaiter"])
    assert (late.returncode, "gone back" in late.stderr) == (1, True)
    held = forq.client().queue("leased").job(job_id)
    assert forq.ctl("ack", "leased", job_id, str(held["fence"]), held["worker"]) == f"acknowledged {job_id}"
    queue = forq.queue_status("leased")
    assert (queue["waiting"], queue["active"], queue["processed"]) == (0, 0, 1)


@pytest.mark.spec("N14")
def test_one_who_hangs_up_awaits_nothing_any_more(forq: Forq) -> None:
    forq.ctl("create", "hung", "--mode", "auto_release")
    waiting = started(forq, "await", "hung")
    wait_until(lambda: awaiters(forq, "hung") == 1)
    waiting.kill()
    waiting.communicate()
    wait_until(lambda: awaiters(forq, "hung") == 0, seconds=5)


def test_an_item_is_not_lost_when_forqctl_dies_before_it_acknowledges(forq: Forq) -> None:
    forq.ctl("create", "kept", "--mode", "on_request", "--set", "lease=300ms")
    job_id = forq.ctl("push", "kept", "1")
    client = control(forq)
    assert client.call("dequeue", {"name": "kept"})["id"] == job_id
    client.close()
    assert forq.queue_status("kept")["active"] in (0, 1)
    assert forq.ctl("dequeue", "kept", "--wait", "10s") == f"{job_id} 1"


def test_awaiters_outlive_the_clerk(forq: Forq) -> None:
    forq.ctl("create", "outlive", "--mode", "auto_release", *QUICK)
    waiting = started(forq, "await", "outlive", "--wait", "20s")
    wait_until(lambda: awaiters(forq, "outlive") == 1)
    clerk = next(each for each in forq.status()["supervisor"]["services"] if each["name"] == "clerk")
    os.kill(clerk["pid"], signal.SIGKILL)

    def is_replaced() -> bool:
        now = next(each for each in forq.status()["supervisor"]["services"] if each["name"] == "clerk")
        return now["pid"] not in (None, clerk["pid"])

    wait_until(is_replaced)
    job_id = forq.ctl("push", "outlive", "1")
    assert waiting.communicate(timeout=20)[0] == f"{job_id} 1\n"


def test_one_connection_may_have_many_awaiters_and_other_requests_between_them(forq: Forq) -> None:
    forq.ctl("create", "many", "--mode", "on_request")
    client = control(forq)
    asked = {client.send("dequeue", {"name": "many", "id": f"i{n}", "wait": 20}): f"i{n}" for n in range(50)}
    assert client.call("ping", {})["pong"] is True
    wait_until(lambda: awaiters(forq, "many") == 50)
    forq.client().queue("many").enqueue_jobs([_named(f"i{n}") for n in range(50)])
    answers = dict(client.receive(None) for _ in range(50))
    assert {number: item["id"] for number, item in answers.items()} == asked
    client.close()


@pytest.mark.parametrize(
    ("verb", "params", "code"),
    [
        ("await", {"name": "works"}, "wrong_mode"),
        ("dequeue", {"name": "works", "wait": 1}, "wrong_mode"),
        ("await", {"name": "none"}, "unknown_queue"),
        ("dequeue", {"name": "works", "id": "a b"}, "invalid_id"),
        ("dequeue", {"name": "works", "wait": -1}, "usage"),
        ("dequeue", {"name": "works", "lease": 0}, "invalid_option"),
        ("ack", {"name": "works", "id": "a", "fence": "x", "awaiter": "w"}, "usage"),
        ("ack", {"name": "works", "id": "a", "fence": 1, "awaiter": 5}, "invalid_id"),
    ],
)
def test_what_makes_no_sense_is_refused(forq: Forq, verb: str, params: dict[str, Any], code: str) -> None:
    if "works" not in {queue["name"] for queue in forq.status()["queues"]}:
        forq.create("works")
    with control_socket(forq) as client:
        client.sendall(json.dumps({"jsonrpc": "2.0", "id": 1, "method": verb, "params": params}).encode() + b"\n")
        assert json.loads(client.makefile().readline())["error"]["data"]["code"] == code


@pytest.mark.spec("N24", "N25")
def test_mode_and_release_options_never_change_while_the_queue_exists(forq: Forq) -> None:
    forq.ctl("create", "fixed", "--mode", "auto_release", "--set", "release_interval=250ms")
    pid = forq.wait_for_child("fixed")["pid"]
    refusals = {
        ("create", "fixed", "--mode", "on_request"): "'fixed' exists with mode 'auto_release'; a queue's mode never",
        ("create", "fixed", "--handler", "m:f"): "'fixed' exists with mode 'auto_release'; a queue's mode never",
        ("create", "fixed", "--mode", "auto_release", "--set", "release_interval=1s"): "release_interval = 250ms; it",
        ("create", "fixed", "--mode", "auto_release", "--set", "lease=1s"): "lease = 10s; it is fixed for the life",
        ("set", "fixed", "release_interval=1s"): "release_interval of queue 'fixed' cannot be changed: it is fixed",
        ("set", "fixed", "mode=on_request"): "mode of queue 'fixed' cannot be changed: it is fixed",
        ("set", "fixed", "max_retries=1"): "max_retries is an option of mode work, not of mode auto_release",
    }
    for command, reason in refusals.items():
        done = forq.run_ctl(*command)
        assert done.returncode != 0
        assert reason in done.stderr
    with pytest.raises(QueueExists, match="release_interval = 250ms"):
        forq.client().create_queue("fixed", mode="auto_release", release_interval=1)
    assert forq.ctl("set", "fixed", "max_items=3") == "set max_items=3 of fixed"
    assert forq.ctl("create", "fixed", "--mode", "auto_release", "--set", "max_items=4") == "joined fixed"
    queue = forq.queue_status("fixed")
    assert (queue["state"], queue["reason"], forq.child("fixed")["pid"]) == ("running", None, pid)


@pytest.mark.spec("N10")
def test_a_queue_made_by_a_client_is_served_at_once_and_dropped_with_its_deletion(forq: Forq) -> None:
    forq.client().create_queue("found", mode="auto_release", release_interval=0.01)
    wait_until(lambda: "found" in {queue["name"] for queue in forq.status()["queues"]}, seconds=5)
    waiting = started(forq, "await", "found", "--wait", "20s")
    wait_until(lambda: awaiters(forq, "found") == 1)
    job_id = forq.ctl("push", "found", "1")
    assert waiting.communicate(timeout=20)[0] == f"{job_id} 1\n"
    assert not (forq.state_dir / "queues" / "found.json").exists()
    pids = {child["pid"] for child in forq.queue_status("found")["children"]}
    forq.ctl("delete", "found")
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(UnknownQueue):
        forq.client().queue("found").next_release(timeout=1)


def test_children_say_in_their_titles_what_they_do(forq: Forq) -> None:
    forq.ctl("create", "titled", "--mode", "auto_release", *QUICK)
    forq.ctl("create", "asked", "--mode", "on_request")
    forq.wait_for_child("titled")
    wanted = {
        ("titled", "main"): "forq: titled main idle 0 released",
        ("titled", "retry"): "forq: titled retry parked 0 released",
        ("asked", "main"): "forq: asked main on request",
    }
    for (name, role), title in wanted.items():
        pid = forq.child(name, role)["pid"]
        wait_until(lambda pid=pid, title=title: _title(pid) == title, what=title)  # type: ignore[misc]


def test_queues_that_release_take_no_capacity(forq: Forq) -> None:
    forq.ctl("create", "light", "--mode", "on_request")
    forq.wait_for_child("light")
    workers = {grant["worker"] for grant in forq.status()["capacity"]["held"]}
    assert "light main" not in workers


@pytest.mark.spec("N22")
def test_an_item_that_is_too_old_is_given_up(forq: Forq) -> None:
    forq.ctl("create", "old", "--mode", "on_request", "--set", "item_timeout=200ms")
    job_id = forq.ctl("push", "old", "1")
    wait_until(lambda: forq.queue_status("old")["dead"] == 1)
    assert forq.client().queue("old").job(job_id)["error"]["name"] == "ItemTimeout"
    log = forq.state_dir / "logs" / "old" / "failed.jsonl"
    assert wait_until(lambda: log.exists() and json.loads(log.read_text())["id"] == job_id)


@pytest.mark.spec("N7")
def test_a_queue_with_items_is_deleted_with_force_only_and_its_awaiters_are_told(forq: Forq) -> None:
    forq.ctl("create", "ended", "--mode", "on_request")
    forq.ctl("push", "ended", "1")
    assert forq.run_ctl("delete", "ended").returncode == 1
    waiting = started(forq, "dequeue", "ended", "other", "--wait", "30s")
    wait_until(lambda: awaiters(forq, "ended") == 1)
    forq.ctl("delete", "ended", "--force")
    assert waiting.wait(20) == 4
    assert "no queue" in waiting.communicate()[1]


def test_definitions_survive_a_restart_and_found_queues_are_found_again() -> None:
    with running() as forq:
        forq.ctl("create", "mine", "--mode", "on_request", "--set", "lease=7s")
        forq.client().create_queue("theirs", mode="auto_release")
        wait_until(lambda: len(forq.status()["queues"]) == 2)
        assert forq.stop() == 0
        forq.start()
        wait_until(lambda: [queue["state"] for queue in forq.status()["queues"]] == ["running", "running"])
        saved = [path.name for path in (forq.state_dir / "queues").iterdir()]
        assert saved == ["mine.json"]
        assert {queue["name"]: queue["mode"] for queue in forq.status()["queues"]} == {
            "mine": "on_request",
            "theirs": "auto_release",
        }


@pytest.mark.spec("N10", "N24")
def test_another_supervisor_serves_the_queue_too_or_says_why_it_does_not(server: Server, redis_url: str) -> None:
    beats = 'heartbeat = "200ms"\nexpiry = "10s"\n'
    other_opinion = beats + '[queues.gate]\nmode = "auto_release"\nrelease_interval = "1s"\n'
    with (
        running(redis=redis_url, settings=beats + 'mode = "auto_release"\n') as one,
        running(redis=redis_url, settings=beats) as two,
    ):
        one.ctl("create", "gate", "--set", "release_interval=20ms")
        wait_until(lambda: [queue["name"] for queue in two.status()["queues"]] == ["gate"])
        wait_until(lambda: two.queue_status("gate")["state"] == "running")
        with running(redis=redis_url, settings=other_opinion) as three:
            wait_until(lambda: three.queue_status("gate")["state"] == "config_error")
            assert "exists with release_interval = 20ms" in three.queue_status("gate")["reason"]
        options = Client(redis_url).link().call("HGET", "forq:queue:{gate}:options", "release_interval_ms")
        assert options == b"20"
        one.ctl("delete", "gate")
        wait_until(lambda: two.status()["queues"] == [])


def control_socket(forq: Forq) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(str(forq.state_dir / "control.sock"))
    return client


def _title(pid: int) -> str:
    return psutil.Process(pid).cmdline()[0]


def _named(job_id: str) -> NewJob:
    return new_job(1, id=job_id)


def _journal(forq: Forq, name: str) -> list[Event]:
    flat = Client(forq.url).link().call("XRANGE", f"forq:queue:{{{name}}}:events", "-", "+")
    entries = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in flat]
    return [event for fields in entries for event in read_entry(fields, name)]
