"""Queues of the release modes and their supervisors: created, found, refused, restarted, shown, deleted."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from forq import Client
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.registry import Registry
from forq.errors import QueueExists, UnknownQueue
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

QUICK = ("--set", "release_interval=10ms", "--set", "retry_interval=10ms")


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings='heartbeat = "200ms"\nexpiry = "10s"\n') as forq:
        yield forq


@pytest.mark.spec("N24", "N25")
def test_mode_and_release_options_never_change_while_the_queue_exists(forq: Forq) -> None:
    forq.ctl("create", "fixed", "--mode", "auto_release", "--set", "release_interval=250ms")
    pid = forq.wait_for_child("fixed")["pid"]
    refusals = {
        ("create", "fixed", "--mode", "on_request"): "'fixed' exists with mode 'auto_release'; a queue's mode never",
        ("create", "fixed", "--handler", "m:f"): "'fixed' exists with mode 'auto_release'; a queue's mode never",
        ("create", "fixed", "--mode", "auto_release", "--set", "release_interval=1s"): "release_interval = 250ms; it",
        ("create", "fixed", "--mode", "auto_release", "--set", "lease=1s"): "lease = 10s; it is fixed while",
        ("set", "fixed", "release_interval=1s"): "release_interval of queue 'fixed' cannot be changed: it is fixed",
        ("set", "fixed", "mode=on_request"): "mode of queue 'fixed' cannot be changed: it is fixed",
        ("set", "fixed", "max_retries=1"): "max_retries is an option of mode work or external, not of",
    }
    for command, reason in refusals.items():
        done = forq.run_ctl(*command)
        assert done.returncode != 0
        assert reason in done.stderr
    with pytest.raises(QueueExists, match="release_interval = 250ms"):
        forq.client().create_queue("fixed", mode="auto_release", release_interval=1)
    assert forq.ctl("set", "fixed", "max_items=3") == "set max_items=3 of fixed"
    assert forq.ctl("create", "fixed", "--mode", "auto_release", "--set", "max_items=4") == "joined fixed"
    forq.wait_for_child("fixed")
    queue = forq.queue_status("fixed")
    assert (queue["state"], queue["reason"], forq.child("fixed")["pid"]) == ("running", None, pid)


@pytest.mark.spec("N10")
def test_a_queue_created_by_a_client_is_served_at_once_and_dropped_on_deletion(forq: Forq) -> None:
    forq.client().create_queue("found", mode="auto_release", release_interval=0.01)
    wait_until(lambda: "found" in {queue["name"] for queue in forq.status()["queues"]}, seconds=5)
    waiting = forq.begin_ctl("await", "found", "--wait", "20s")
    wait_until(lambda: forq.awaiters("found") == 1)
    job_id = forq.ctl("push", "found", "1")
    assert waiting.communicate(timeout=20)[0] == f"{job_id} 1\n"
    assert not (forq.state_dir / "queues" / "found.json").exists()
    pids = {child["pid"] for child in forq.queue_status("found")["children"]}
    forq.ctl("delete", "found")
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(UnknownQueue):
        forq.client().queue("found").next_release(timeout=1)


def test_definitions_survive_a_restart_and_found_queues_are_found_again(server: Server, redis_url: str) -> None:
    """There is one heartbeat per start: later queues are found because the supervisor is notified."""
    with running(redis=redis_url, settings='heartbeat = "1h"\nexpiry = "2h"\n') as forq:
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


def test_a_queue_of_another_creator_is_not_created_again_when_its_data_is_lost(server: Server, redis_url: str) -> None:
    """Only its creator knows its options."""
    client = Client(redis_url)
    with running(redis=redis_url, settings='heartbeat = "200ms"\nexpiry = "10s"\n') as forq:
        forq.ctl("create", "mine", "--mode", "on_request", "--set", "lease=7s")
        client.create_queue("theirs", mode="auto_release", release_interval=0.5)
        wait_until(lambda: [queue["state"] for queue in forq.status()["queues"]] == ["running", "running"])
        client.link().call("FLUSHALL")
        wait_until(lambda: [queue["name"] for queue in forq.status()["queues"]] == ["mine"])
        wait_until(lambda: client.queues() == {"mine": "on_request"})
        lease_ms = wait_until(lambda: client.link().call("HGET", "forq:queue:{mine}:options", "lease_ms"))
        assert lease_ms == b"7000"


@pytest.mark.spec("N24")
def test_a_queue_created_with_another_mode_is_refused_until_it_is_gone(server: Server, redis_url: str) -> None:
    queue = Client(redis_url).create_queue("q", mode="on_request")
    queue.enqueue(1, id="a")
    settings = f'[queues.q]\nhandler = "traced:record"\npath = ["{HANDLERS}"]\n'
    with running(redis=redis_url, settings=settings) as forq:
        wait_until(lambda: forq.queue_status("q")["state"] == "config_error")
        assert "exists with mode 'on_request'" in forq.queue_status("q")["reason"]
        refused = forq.run_ctl("restart", "q")
        assert (refused.returncode, "exists with mode 'on_request'" in refused.stderr) == (1, True)
        assert forq.child("q")["pid"] is None
        item = queue.dequeue()
        assert item is not None
        assert item.id == "a"
        Registry(Client(redis_url).link(), DEFAULT_PREFIX).delete("q", force=False)
        while Registry(Client(redis_url).link(), DEFAULT_PREFIX).purge("q", lambda jobs: None):
            pass
        forq.ctl("restart", "q")
        job_id = forq.ctl("push", "q", "1")
        wait_until(lambda: [trace for trace in forq.traces("end") if trace.job == job_id])


@pytest.mark.spec("N10", "N24")
def test_another_supervisor_also_serves_the_queue_or_reports_why_not(server: Server, redis_url: str) -> None:
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
            assert three.run_ctl("restart", "gate").returncode == 1
            assert three.queue_status("gate")["state"] == "config_error"
        options = Client(redis_url).link().call("HGET", "forq:queue:{gate}:options", "release_interval_ms")
        assert options == b"20"
        one.ctl("delete", "gate")
        wait_until(lambda: two.status()["queues"] == [])


@pytest.mark.spec("N7")
def test_a_queue_with_items_is_deleted_only_with_force_and_its_awaiters_are_notified(forq: Forq) -> None:
    forq.ctl("create", "ended", "--mode", "on_request")
    forq.ctl("push", "ended", "1")
    assert forq.run_ctl("delete", "ended").returncode == 1
    waiting = forq.begin_ctl("dequeue", "ended", "other", "--wait", "30s")
    wait_until(lambda: forq.awaiters("ended") == 1)
    forq.ctl("delete", "ended", "--force")
    assert waiting.wait(20) == 4
    assert "no queue" in waiting.communicate()[1]


@pytest.mark.spec("N4", "N5", "N6", "N8")
def test_status_shows_waiting_items_without_data_and_remove_removes_one(forq: Forq) -> None:
    forq.ctl("create", "shown", "--mode", "on_request")
    first = forq.ctl("push", "shown", '"secret"', "--identifier", "order 7")
    second = forq.ctl("push", "shown", '"secret"')
    queue = forq.queue_status("shown")
    assert queue["items"] == [{"id": first, "identifier": "order 7"}, {"id": second, "identifier": second}]
    assert "secret" not in forq.ctl("status", "shown", "--json")
    forq.wait_for_child("shown")
    table = [line.split()[:3] for line in forq.ctl("status").splitlines()]
    assert ["shown", "on_request", "running"] in table
    forq.ctl("remove", "shown", first)
    assert forq.ctl("dequeue", "shown").startswith(second)
    assert forq.run_ctl("status", "--check").returncode == 0


def test_children_show_their_activity_in_their_titles(forq: Forq) -> None:
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


@pytest.mark.parametrize(
    ("mode", "roles"),
    [("auto_release", ["main", "retry"]), ("on_request", ["main"]), ("external", ["main"])],
)
def test_a_queue_whose_items_others_take_has_one_process(forq: Forq, mode: str, roles: list[str]) -> None:
    forq.ctl("create", f"roles-{mode}", "--mode", mode)
    forq.wait_for_child(f"roles-{mode}")
    assert [child["role"] for child in forq.queue_status(f"roles-{mode}")["children"]] == roles
    forq.ctl("restart", f"roles-{mode}")

    def roles_now() -> list[str]:
        return [child["role"] for child in forq.queue_status(f"roles-{mode}")["children"]]

    wait_until(lambda: roles_now() == roles, what="the old processes are gone")


def test_release_queues_take_no_capacity(forq: Forq) -> None:
    forq.ctl("create", "light", "--mode", "on_request")
    forq.wait_for_child("light")
    workers = {grant["worker"] for grant in forq.status()["capacity"]["held"]}
    assert "light main" not in workers


@pytest.mark.parametrize("mode", ["auto_release", "on_request"])
def test_a_killed_child_is_replaced_and_items_are_released_as_before(forq: Forq, mode: str) -> None:
    name = f"killed-{mode}"
    forq.ctl("create", name, "--mode", mode)
    pid = forq.wait_for_child(name)["pid"]
    os.kill(pid, signal.SIGKILL)
    forq.wait_for_child(name, not_pid=pid)
    waiting = forq.begin_ctl("await" if mode == "auto_release" else "dequeue", name, "--wait", "20s")
    wait_until(lambda: forq.awaiters(name) == 1)
    job_id = forq.ctl("push", name, "1")
    assert waiting.communicate(timeout=20)[0] == f"{job_id} 1\n"


def _title(pid: int) -> str:
    return psutil.Process(pid).cmdline()[0]
