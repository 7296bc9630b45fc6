"""await, dequeue and ack against a real supervisor, and the fate of items without an awaiter."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from forq import Client
from forq.broker.journal import Event, read_entry
from forq.client import NewJob, new_job
from forq.ctl.client import ControlClient
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until, whole_lines

QUICK = ("--set", "release_interval=10ms", "--set", "retry_interval=10ms")


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings='heartbeat = "200ms"\nexpiry = "10s"\n') as forq:
        yield forq


def control(forq: Forq) -> ControlClient:
    return ControlClient(str(forq.state_dir / "control.sock"), 20.0)


@pytest.mark.spec("N13", "N14", "N20")
def test_an_item_goes_to_its_awaiter(forq: Forq) -> None:
    forq.ctl("create", "gate", "--mode", "auto_release", *QUICK)
    any_item = forq.begin_ctl("await", "gate", "--json", "--wait", "20s")
    wait_until(lambda: forq.awaiters("gate") == 1)
    this_item = forq.begin_ctl("await", "gate", "wanted", "--json", "--wait", "20s")
    wait_until(lambda: forq.awaiters("gate") == 2)
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
    waiting = [forq.begin_ctl("await", "slow", "--wait", "20s") for _ in range(4)]
    wait_until(lambda: forq.awaiters("slow") == 4)
    forq.client().queue("slow").enqueue_many([1, 2, 3, 4])
    for process in waiting:
        assert process.wait(20) == 0
    times_us = sorted(event.time_us for event in _journal(forq, "slow") if event.verb == "claimed")
    assert len(times_us) == 4
    assert all(later - earlier >= 300_000 for earlier, later in pairwise(times_us))


@pytest.mark.spec("N15", "N16", "N19")
def test_an_item_without_an_awaiter_ends_in_the_failed_log_and_can_be_recovered(forq: Forq) -> None:
    forq.ctl("create", "lost", "--mode", "auto_release", *QUICK, "--set", "release_retries=2")
    job_id = forq.ctl("push", "lost", '{"keep": "me"}', "--identifier", "order 7")
    wait_until(lambda: forq.queue_status("lost")["dead"] == 1)
    log = forq.state_dir / "logs" / "lost" / "failed.jsonl"
    line = wait_until(lambda: whole_lines(log))[0]
    written = json.loads(line)
    assert (written["id"], written["identifier"], written["data"]) == (job_id, "order 7", {"keep": "me"})
    assert written["error"]["name"] == "NotAwaited"
    found = forq.begin_ctl("await", "lost", "--json", "--wait", "20s")
    wait_until(lambda: forq.awaiters("lost") == 1)
    forq.ctl("recover", str(log))
    assert json.loads(found.communicate(timeout=20)[0])["data"] == {"keep": "me"}


@pytest.mark.spec("N21", "N23")
def test_items_leave_a_queue_only_on_request(forq: Forq) -> None:
    forq.ctl("create", "orders", "--mode", "on_request")
    empty = forq.run_ctl("dequeue", "orders")
    assert (empty.returncode, empty.stdout) == (6, "")
    first, second, third = (forq.ctl("push", "orders", str(n)) for n in range(3))
    assert forq.ctl("dequeue", "orders", third) == f"{third} 2"
    assert json.loads(forq.ctl("dequeue", "orders", "--json")) == {"id": first, "identifier": first, "data": 0}
    assert forq.run_ctl("dequeue", "orders", "none").returncode == 6
    assert forq.ctl("dequeue", "orders", "--wait", "5s") == f"{second} 1"
    waiting = forq.begin_ctl("dequeue", "orders", "--wait", "20s")
    wait_until(lambda: forq.awaiters("orders") == 1)
    late = forq.ctl("push", "orders", '"late"')
    assert waiting.communicate(timeout=20)[0] == f'{late} "late"\n'
    queue = forq.queue_status("orders")
    assert (queue["dead"], queue["failed"], queue["waiting"], queue["active"]) == (0, 0, 0, 0)


def test_why_names_the_holder_of_an_item_or_its_position(forq: Forq) -> None:
    forq.ctl("create", "asked-why", "--mode", "on_request")
    first, second = forq.ctl("push", "asked-why", "1"), forq.ctl("push", "asked-why", "2")
    awaiter = forq.ctl("dequeue", "asked-why", "--lease", "1m").split()[2]
    assert (
        forq.ctl("why", "asked-why", first) == f"it is leased to awaiter {awaiter}, which has not acknowledged it yet"
    )
    reason = wait_until(lambda: "released" in (why := forq.ctl("why", "asked-why", second)) and why)
    assert reason == "it waits to be released: 0 items before it, 0 awaiters"


def test_an_await_that_timed_out_is_unregistered(forq: Forq) -> None:
    forq.ctl("create", "timed", "--mode", "auto_release")
    done = forq.run_ctl("await", "timed", "--wait", "300ms")
    assert (done.returncode, done.stdout) == (6, "")
    assert forq.awaiters("timed") == 0


@pytest.mark.spec("N21")
def test_a_leased_item_is_held_until_it_is_acknowledged_or_returned(forq: Forq) -> None:
    forq.ctl("create", "leased", "--mode", "on_request")
    job_id = forq.ctl("push", "leased", "1")
    item = json.loads(forq.ctl("dequeue", "leased", "--lease", "200ms", "--json"))
    assert (item["id"], item["lease_seconds"]) == (job_id, 0.2)
    assert forq.ctl("dequeue", "leased", "--wait", "10s", "--lease", "10s").startswith(f"{job_id} ")
    late = forq.run_ctl("ack", "leased", job_id, str(item["fence"]), item["awaiter"])
    assert (late.returncode, "is waiting again" in late.stderr) == (1, True)
    held = forq.client().queue("leased").job(job_id)
    assert forq.ctl("ack", "leased", job_id, str(held["fence"]), held["worker"]) == f"acknowledged {job_id}"
    queue = forq.queue_status("leased")
    assert (queue["waiting"], queue["active"], queue["done"]) == (0, 0, 1)


@pytest.mark.spec("N14")
def test_a_client_that_disconnects_is_no_longer_an_awaiter(forq: Forq) -> None:
    forq.ctl("create", "hung", "--mode", "auto_release")
    waiting = forq.begin_ctl("await", "hung")
    wait_until(lambda: forq.awaiters("hung") == 1)
    waiting.kill()
    waiting.communicate()
    wait_until(lambda: forq.awaiters("hung") == 0, seconds=5)


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
    waiting = forq.begin_ctl("await", "outlive", "--wait", "20s")
    wait_until(lambda: forq.awaiters("outlive") == 1)
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
    wait_until(lambda: forq.awaiters("many") == 50)
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
def test_invalid_requests_are_refused(forq: Forq, verb: str, params: dict[str, Any], code: str) -> None:
    if "works" not in {queue["name"] for queue in forq.status()["queues"]}:
        forq.create("works")
    with control_socket(forq) as client:
        client.sendall(json.dumps({"jsonrpc": "2.0", "id": 1, "method": verb, "params": params}).encode() + b"\n")
        assert json.loads(client.makefile().readline())["error"]["data"]["code"] == code


@pytest.mark.spec("N22")
def test_an_item_above_max_age_is_given_up(forq: Forq) -> None:
    forq.ctl("create", "old", "--mode", "on_request", "--set", "item_timeout=200ms")
    job_id = forq.ctl("push", "old", "1")
    wait_until(lambda: forq.queue_status("old")["dead"] == 1)
    assert forq.client().queue("old").job(job_id)["error"]["name"] == "ItemTimeout"
    log = forq.state_dir / "logs" / "old" / "failed.jsonl"
    assert wait_until(lambda: log.exists() and json.loads(log.read_text())["id"] == job_id)


def control_socket(forq: Forq) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(str(forq.state_dir / "control.sock"))
    return client


def _named(job_id: str) -> NewJob:
    return new_job(1, id=job_id)


def _journal(forq: Forq, name: str) -> list[Event]:
    flat = Client(forq.url).link().call("XRANGE", f"forq:queue:{{{name}}}:events", "-", "+")
    entries = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in flat]
    return [event for fields in entries for event in read_entry(fields, name)]
