"""External queues and bridges below a supervisor: found, shown and restarted; jobs that die are recovered."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forq.errors import QueueExists, UnknownQueue
from tests.support.drive.bridge import Client, accepts, bridge
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

EXAMPLES = Path(__file__).parent.parent.parent / "etc" / "examples"
SETTINGS = 'heartbeat = "200ms"\nexpiry = "10s"\nmax_queues = 20\n\n[[bridge]]\nlisten = "bridge.sock"\ntick = "3s"\n'


def exists(forq: Forq, name: str) -> bool:
    """Whether the queue exists; the registry has the name a moment earlier."""
    try:
        forq.client().queue(name).status()
    except UnknownQueue:
        return False
    return True


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings=SETTINGS) as forq:
        wait_until(lambda: accepts(socket_of(forq)))
        yield forq


@pytest.fixture
def client(forq: Forq) -> Iterator[Client]:
    client = Client(socket_of(forq))
    yield client
    client.close()


def socket_of(forq: Forq) -> Path:
    return forq.directory / "bridge.sock"


def service(forq: Forq) -> dict[str, object]:
    found = [each for each in forq.status()["supervisor"]["services"] if each["name"].startswith("bridge ")]
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


def serves(forq: Forq, name: str) -> bool:
    return name in {queue["name"] for queue in forq.status()["queues"]}


@pytest.mark.spec("P8")
def test_a_queue_that_a_worker_names_is_created_found_and_shown(forq: Forq, client: Client) -> None:
    client.send("worker_idle", queue_name="named", worker_uuid="w")
    wait_until(lambda: serves(forq, "named"), seconds=5)
    wait_until(lambda: forq.awaiters("named") == 1)
    child = forq.wait_for_child("named")
    queue = forq.queue_status("named")
    assert (queue["mode"], queue["state"]) == ("external", "running")
    assert "external" in " ".join(psutil.Process(child["pid"]).cmdline())
    job_id = forq.ctl("push", "named", '{"command": "c", "args": [1]}')
    assignment = client.wait_for("job_assignment")
    assert (assignment["uuid"], assignment["command"], assignment["args"]) == (job_id, "c", [1])
    assert "was assigned to worker w, which has not accepted it yet" in forq.ctl("why", "named", job_id)
    client.send("job_accepted", queue_name="named", worker_uuid="w", uuid=job_id)
    wait_until(lambda: "worker w runs it now" in forq.ctl("why", "named", job_id))
    client.send("job_finished", queue_name="named", worker_uuid="w", uuid=job_id)
    wait_until(lambda: forq.queue_status("named")["done"] == 1)


def test_an_external_queue_created_with_forqctl_has_its_options(forq: Forq, client: Client) -> None:
    forq.ctl("create", "made", "--mode", "external", "--set", "max_retries=0", "--set", "lease=5s")
    assert "handler is not allowed" in forq.run_ctl("create", "x", "--mode", "external", "--handler", "m:f").stderr
    assert "timeout is an option of mode work" in forq.run_ctl("set", "made", "timeout=1s").stderr
    assert forq.ctl("set", "made", "lease=2s", "max_stalls=0") == "set lease=2s, max_stalls=0 of made"
    with pytest.raises(QueueExists, match="exists with mode 'external'"):
        forq.client().create_queue("made", mode="on_request")
    client.send("add_job", queue_name="made", uuid="j", command="c", args={"n": 1}, priority=3)
    assert forq.ctl("create", "made", "--mode", "external", "--set", "max_retries=1") == "joined made"


def test_a_job_that_dies_is_in_the_failed_log_and_can_be_recovered(forq: Forq, client: Client) -> None:
    forq.ctl("create", "dying", "--mode", "external")
    worker = {"queue_name": "dying", "worker_uuid": "w"}
    client.send("add_job", queue_name="dying", uuid="j", command="c", args={"n": 1})
    client.send("worker_idle", **worker)
    client.wait_for("job_assignment")
    client.send("job_failed", **worker, uuid="j", error={"name": "Bad", "message": "input"}, kind="permanent")
    log = forq.state_dir / "logs" / "dying" / "failed.jsonl"
    wait_until(lambda: log.exists() and log.read_text())
    line = json.loads(log.read_text())
    assert (line["id"], line["data"], line["error"]["name"]) == ("j", {"command": "c", "args": {"n": 1}}, "Bad")
    assert "Bad" in forq.ctl("dead", "show", "dying", "j")
    forq.ctl("recover", str(log))
    again = client.wait_for("job_assignment", 2)
    assert (again["uuid"], again["args"], again["attempt"]) == ("j", {"n": 1}, 1)
    client.send("job_failed", **worker, uuid="j", error="again", kind="permanent")
    wait_until(lambda: forq.queue_status("dying")["dead"] == 2)
    forq.ctl("dead", "retry", "dying", "j")
    assert client.wait_for("job_assignment", 3)["uuid"] == "j"


def test_pulse_removes_silent_workers_while_no_bridge_runs(forq: Forq) -> None:
    with bridge(forq.url, "--tick", "300ms") as process:
        process.send("add_job", queue_name="silent", uuid="j", command="c")
        process.send("worker_idle", queue_name="silent", worker_uuid="w")
        process.wait_for("job_assignment")
        process.send("job_accepted", queue_name="silent", worker_uuid="w", uuid="j")
        process.send("list_progress", queue_name="silent")
        process.wait_for("progress")
        process.kill()
    wait_until(lambda: serves(forq, "silent"), seconds=5)
    wait_until(lambda: forq.client().queue("silent").job("j")["stall_count"] == 1, seconds=10)


def test_a_bridge_that_dies_is_restarted_and_its_workers_continue(forq: Forq) -> None:
    client = Client(socket_of(forq))
    worker = {"queue_name": "again", "worker_uuid": "w"}
    client.send("add_job", queue_name="again", uuid="j", command="c")
    client.send("worker_idle", **worker)
    client.wait_for("job_assignment")
    client.send("job_accepted", **worker, uuid="j")
    client.send("list_progress", queue_name="again")
    client.wait_for("progress")
    before = service(forq)
    assert isinstance(before["pid"], int)
    assert psutil.Process(before["pid"]).cmdline()[0].startswith(f"forq: bridge {socket_of(forq)}")
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: service(forq)["pid"] not in (None, before["pid"]) and accepts(socket_of(forq)))
    assert service(forq)["restarts"] == 1
    successor = Client(socket_of(forq))
    successor.send("job_finished", **worker, uuid="j")
    wait_until(lambda: forq.queue_status("again")["done"] == 1)
    assert successor.of("job_refused") == []
    successor.close()


def test_a_bridge_ends_with_its_supervisor() -> None:
    with running(settings=SETTINGS) as forq:
        wait_until(lambda: accepts(socket_of(forq)))
        pid = service(forq)["pid"]
        assert isinstance(pid, int)
        os.kill(forq.pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), what="the bridge is gone")
        forq.start()
        wait_until(lambda: accepts(socket_of(forq)))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_node_worker_runs_jobs_and_reports_progress(forq: Forq, client: Client) -> None:
    command = ["node", str(EXAMPLES / "external_worker.js"), str(socket_of(forq)), "node"]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TICK_SECONDS": "0.2"}, text=True)
    try:
        client.send("add_job", queue_name="node", uuid="slow", command="work", args={"ms": 1500})
        queue = forq.client().queue("node")
        wait_until(lambda: serves(forq, "node"))

        def progress() -> list[dict[str, object]]:
            return client.request("list_progress", "progress", queue_name="node")["jobs"]  # type: ignore[no-any-return]

        wait_until(lambda: any(row["text"] == "step 2 of 4" for row in progress()))
        client.send("add_job", queue_name="node", uuid="odd", command="unheard-of")
        client.send("add_job", queue_name="node", uuid="ok", command="sh", args="true")
        wait_until(lambda: queue.status()["done"] == 2)
        assert queue.dead().jobs[0]["message"] == "no command unheard-of"
        assert worker.stdout is not None
        lines = [worker.stdout.readline().split()[:2] for _ in range(5)]
    finally:
        worker.kill()
        worker.communicate()
    assert lines == [
        *(["accepted", "slow"], ["ended", "slow"], ["accepted", "odd"], ["accepted", "ok"], ["ended", "ok"])
    ]


def test_the_sh_worker_runs_jobs_with_its_own_bridge(forq: Forq, tmp_path: Path) -> None:
    environ = {**os.environ, "FORQ_REDIS": forq.url, "FORQ_BRIDGE": f"{sys.executable} -m forq.cli bridge"}
    command = ["sh", str(EXAMPLES / "external_worker.sh"), "shell", "my-shell"]
    worker = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**environ, "TICK_SECONDS": "0.5"}, text=True
    )
    try:
        wait_until(lambda: exists(forq, "shell"))
        queue = forq.client().queue("shell")
        queue.enqueue({"command": "sh", "args": f"echo done > {tmp_path}/trace"}, id="good")
        wait_until(lambda: queue.status()["done"] == 1)
        assert (tmp_path / "trace").read_text() == "done\n"
        queue.enqueue({"command": "sh", "args": "exit 3"}, id="bad")
        wait_until(lambda: queue.status()["scheduled"] == 1)
        assert queue.job("bad")["attempts"][0]["error"]["message"] == "it ended badly"
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: queue.status()["awaiters"] == 0, what="its bridge has noticed")
