"""Live options, and one sentence about why a job is not running."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from forq.ctl.client import ControlClient
from forq.errors import ForqError, QueueExists, TooManyQueues, UnknownQueue
from forq.procs import jsonrpc
from forq.supervisor.requests import OPENING_SECONDS
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


@pytest.mark.spec("Q9", "N9")
def test_a_changed_option_applies_to_the_next_claim_and_after_a_restart() -> None:
    with running() as forq:
        forq.create("live", "fail", max_retries=10, min_backoff="50ms", max_backoff="50ms")
        job_id = forq.ctl("push", "live", "1")
        wait_until(lambda: json.loads(forq.ctl("job", "live", job_id, "--json"))["retry_count"] >= 1)
        pid = forq.child("live")["pid"]
        assert "set max_retries=0 of live" in forq.ctl("set", "live", "max_retries=0")
        wait_until(lambda: forq.queue_status("live")["dead"] == 1)
        assert forq.child("live")["pid"] == pid
        definition = json.loads((forq.state_dir / "queues" / "live.json").read_text())
        assert definition["options"]["max_retries"] == 0
        forq.stop()
        forq.start()
        forq.ctl("push", "live", "2")
        wait_until(lambda: forq.queue_status("live")["dead"] == 2)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "max_retries=1"], 4, "no queue"),
        (["here", "max_retry=1"], 2, "max_retries"),
        (["here", "max_retries=many"], 2, "max_retries"),
        (["here", "concurrency=3"], 2, "new process"),
        (["here", "rubbish"], 2, "OPTION=VALUE"),
    ],
)
def test_options_that_cannot_be_set_are_refused(forq: Forq, arguments: list[str], code: int, message: str) -> None:
    forq.create("here", "noop")
    done = forq.run_ctl("set", *arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def write_handler(forq: Forq, name: str, source: str) -> list[str]:
    """The arguments of create for a module with this text."""
    (forq.directory / f"{name}.py").write_text(source)
    return ["--handler", f"{name}:handle", "--path", str(forq.directory)]


def test_why_reports_that_the_processes_of_a_queue_keep_dying(forq: Forq) -> None:
    dies = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    forq.ctl("create", "dying", "--no-wait", *write_handler(forq, "dies_at_import", dies))
    job_id = forq.ctl("push", "dying", "1")
    wait_until(lambda: forq.queue_status("dying")["state"] == "flapping")
    reason = forq.ctl("why", "dying", job_id)
    assert "its queue is flapping: its processes keep dying" in reason
    assert "signal 9 (SIGKILL)" in reason
    assert "next one" not in reason
    forq.ctl("delete", "dying", "--force")


def test_a_queue_whose_import_hangs_is_starting_and_why_reports_it(forq: Forq) -> None:
    gate = forq.directory / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\ndef handle(d, j): pass\n"
    forq.ctl("create", "hanging", "--no-wait", *write_handler(forq, "hangs_at_import", waits))
    job_id = forq.ctl("push", "hanging", "1")
    assert forq.queue_status("hanging")["state"] == "starting"
    reason = forq.ctl("why", "hanging", job_id)
    assert f"its queue is starting: process {forq.child('hanging')['pid']} has been importing the handler" in reason
    assert "next one" not in reason
    assert "hangs_at_import" in forq.ctl("stack", "hanging")
    gate.touch()
    wait_until(lambda: forq.queue_status("hanging")["done"] == 1)
    assert forq.queue_status("hanging")["state"] == "running"


def test_create_during_a_shutdown_is_refused_with_the_reason() -> None:
    with running() as forq:
        forq.create("busy", "sleep", stop_grace="60s")
        forq.ctl("push", "busy", "60")
        wait_until(lambda: forq.traces("start"))
        forq.ctl("shutdown", "--no-wait")
        done = forq.run_ctl("create", "late", "--handler", "traced:noop", "--path", str(HANDLERS))
        assert done.returncode == 1
        assert "queue 'late' is not served: this supervisor is stopping; when it runs again: " in done.stderr
        assert "is stopping" in forq.run_ctl("restart", "busy").stderr
        assert forq.child("busy")["state"] == "stopping"
        forq.ctl("shutdown", "--now")


def test_a_paused_queue_that_is_drained_is_shown_as_paused(forq: Forq) -> None:
    forq.create("halted")
    forq.ctl("pause", "halted")
    forq.ctl("push", "halted", "1")
    draining = forq.begin_ctl("drain", "halted")
    assert draining.stderr is not None
    assert "forqctl resume halted" in draining.stderr.readline()
    assert forq.queue_status("halted")["state"] == "paused"
    forq.ctl("resume", "halted")
    assert draining.communicate(timeout=20)[0] == "drained halted\n"


def test_why_distinguishes_every_state(forq: Forq) -> None:
    forq.create("asked", "sleep", max_retries=1, min_backoff="100s", max_backoff="100s")
    running_id = forq.ctl("push", "asked", "30")
    wait_until(lambda: forq.queue_status("asked")["active"] == 1)
    assert "running now" in forq.ctl("why", "asked", running_id)
    first, second = forq.ctl("push", "asked", "0"), forq.ctl("push", "asked", "0")
    assert "it is next" in forq.ctl("why", "asked", first)
    assert "1 job before it" in forq.ctl("why", "asked", second)
    later = forq.ctl("push", "asked", "0", "--in", "1h")
    assert "is scheduled for" in forq.ctl("why", "asked", later)
    forq.ctl("pause", "asked")
    assert "paused" in forq.ctl("why", "asked", second)
    assert forq.run_ctl("why", "asked", "nothing").returncode == 4
    forq.create("ending", "fail", max_retries=0)
    dead = forq.ctl("push", "ending", "1")
    wait_until(lambda: forq.queue_status("ending")["dead"] == 1)
    assert "ValueError: no good: 1" in forq.ctl("why", "ending", dead)
    forq.ctl("create", "cannot", "--handler", "not_there:f", "--path", str(HANDLERS), "--no-wait")
    wait_until(lambda: forq.queue_status("cannot")["state"] == "config_error")
    waiting = forq.ctl("push", "cannot", "1")
    assert "not_there" in forq.ctl("why", "cannot", waiting)
    forq.ctl("delete", "asked", "--force")


def test_a_push_that_waits_for_an_impossible_queue_fails_at_once() -> None:
    with running(settings="max_queues = 1\n") as forq:
        forq.create("only")
        create = {"name": "second", "handler": "traced:noop", "path": [str(HANDLERS)]}
        began = time.monotonic()
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30.0)
            client.connect(str(forq.state_dir / "control.sock"))
            # Both at once: the push is read before Redis can have refused the queue.
            client.sendall(
                jsonrpc.request(1, "queue.create", create) + jsonrpc.request(2, "push", {"name": "second", "data": 1})
            )
            with client.makefile("rb") as lines:
                answers = dict(jsonrpc.read_answer(lines.readline()) for _ in range(2))
        assert [type(answers[number]) for number in (1, 2)] == [TooManyQueues, UnknownQueue]
        assert time.monotonic() - began < OPENING_SECONDS


def test_creating_deleting_and_using_a_queue_concurrently_never_blames_redis() -> None:
    with running() as forq:
        client = ControlClient(str(forq.state_dir / "control.sock"), 30.0)
        asked = []
        for turn in range(60):
            definition = {"name": "q", "handler": "traced:noop", "path": [str(HANDLERS)]}
            asked += [
                client.send("queue.create", {**definition, "options": {"max_retries": turn % 3}}),
                client.send("push", {"name": "q", "data": 1}),
                client.send("queue.delete", {"name": "q", "force": True}),
                client.send("push", {"name": "q", "data": 1}),
                client.send("queue.pause", {"name": "q"}),
            ]
            if len(asked) >= 50:
                answers = dict(client.receive(time.monotonic() + 30.0) for _ in asked)
                assert set(answers) == set(asked)
                faults = [answer for answer in answers.values() if isinstance(answer, ForqError)]
                assert {type(fault) for fault in faults} <= {UnknownQueue, QueueExists}, faults
                asked = []
        client.close()


def test_why_in_an_unserved_queue_distinguishes_waiting_from_ended_jobs() -> None:
    with running(settings="[queues.broken]\nhandler = 'nowhere:handle'\n") as forq:
        wait_until(lambda: forq.queue_status("broken")["state"] == "config_error")
        for job_id in ("waits", "ended"):
            forq.ctl("push", "broken", "1", "--id", job_id)
        forq.ctl("cancel", "broken", "ended")
        assert forq.ctl("why", "broken", "waits").startswith("its queue cannot be served: ")
        assert "it was cancelled at 20" in forq.run_ctl("why", "broken", "ended").stderr
        assert "never had a job 'other'" in forq.run_ctl("why", "broken", "other").stderr
        assert forq.run_ctl("why", "broken", "no id").returncode == 2
