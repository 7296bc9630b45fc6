"""Jobs that wait for others, from forqctl: push, list, explain, drain and cancel them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forq import App, Client
from forq.client import new_job
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def test_a_job_pushed_after_another_runs_once_that_is_done(forq: Forq) -> None:
    forq.create("chain")
    forq.ctl("pause", "chain")
    forq.ctl("push", "chain", "1", "--id", "a")
    assert forq.ctl("push", "chain", "2", "--id", "b", "--after", "a", "--when", "ended") == "b"
    assert forq.queue_status("chain")["held"] == 1
    assert "HELD" in forq.ctl("status", "chain")
    assert forq.ctl("jobs", "chain", "--state", "held").split()[-3:] == ["b", "held", "b"]
    shown = json.loads(forq.ctl("job", "chain", "b", "--json"))
    assert (shown["when"], shown["waits_for"]) == ("ended", [{"kind": "job", "id": "a", "state": "waiting"}])
    assert json.loads(forq.ctl("job", "chain", "a", "--json"))["dependants"] == ["b"]
    assert "it waits for job a to end: a is waiting; its queue is paused" in forq.ctl("why", "chain", "b")
    forq.ctl("resume", "chain")
    assert forq.ctl("drain", "chain", "--wait", "30s") == "drained chain"
    status = forq.queue_status("chain")
    assert (status["held"], status["waiting"], status["done"]) == (0, 0, 2)


def test_a_failed_dependency_is_explained_with_the_next_command(forq: Forq) -> None:
    forq.create("failing", "fail", max_retries=0)
    forq.ctl("pause", "failing")
    forq.ctl("push", "failing", "1", "--id", "a")
    forq.ctl("push", "failing", "1", "--id", "b", "--after", "a")
    forq.ctl("push", "failing", "1", "--id", "c", "--after", "b")
    forq.ctl("resume", "failing")
    wait_until(lambda: forq.queue_status("failing")["dead"] == 3)
    assert forq.ctl("why", "failing", "c") == (
        "it could not run: job b, for which it waited, ended as dead; `forqctl dead retry failing c` runs it without "
        "waiting"
    )


def test_drain_does_not_wait_for_jobs_that_wait_for_scheduled_ones(forq: Forq) -> None:
    forq.create("later")
    forq.ctl("push", "later", "1", "--id", "a", "--in", "1h")
    forq.ctl("push", "later", "1", "--id", "b", "--after", "a")
    expected = "drained later; held jobs left: 1; see: forqctl jobs later --state held"
    assert forq.ctl("drain", "later", "--wait", "30s") == expected
    assert forq.ctl("cancel", "later", "b") == "cancelled b"
    assert forq.queue_status("later")["held"] == 0


def test_the_option_flows_refuses_or_remembers(forq: Forq) -> None:
    forq.create("optional", flows="off")
    forq.ctl("push", "optional", "1", "--id", "a")
    refused = forq.run_ctl("push", "optional", "2", "--after", "a")
    assert (refused.returncode, "forqctl set optional flows=auto" in refused.stderr) == (2, True)
    wait_until(lambda: forq.queue_status("optional")["done"] == 1)
    assert forq.ctl("set", "optional", "flows=on") == "set flows=on of optional"
    forq.ctl("push", "optional", "1", "--id", "b")
    wait_until(lambda: forq.queue_status("optional")["done"] == 2)
    # Its end is remembered, although no job has waited for another.
    forq.ctl("push", "optional", "3", "--id", "c", "--after", "b")
    wait_until(lambda: forq.queue_status("optional")["done"] == 3)
    unknown = forq.run_ctl("push", "optional", "4", "--after", "a")
    assert (unknown.returncode, "has no job 'a' to wait for" in unknown.stderr) == (4, True)
    refused = forq.run_ctl("set", "optional", "flows=maybe")
    assert (refused.returncode, '"off", "auto" or "on"' in refused.stderr) == (2, True), refused.stderr


def test_a_flow_over_two_queues_is_shown(forq: Forq) -> None:
    for name, task in (("here", "build"), ("there", "test")):
        forq.ctl("create", name, "--type", f"{task}=traced:noop", "--path", str(HANDLERS))
    forq.ctl("pause", "here")
    app = App("here", url=forq.url)
    with app.flow("release-7") as flow:
        first = flow.add(app.task_ref("build").using(id="b7").prepare(n=1))
        flow.add(app.task_ref("test").using(queue="there", id="t7").prepare(n=2), after=first)
    _, *rows = (line.split() for line in forq.ctl("flow", "release-7").splitlines())
    assert rows == [["build", "b7", "here", "waiting", "-"], ["test", "t7", "there", "held", "b7"]]
    forq.ctl("resume", "here")
    wait_until(lambda: [job["state"] for job in flow_jobs(forq)] == ["done", "done"])
    assert "j0 --> j1" in forq.ctl("flow", "release-7", "--mermaid")
    unknown = forq.run_ctl("flow", "release-8")
    assert (unknown.returncode, "no queue has a flow 'release-8'" in unknown.stderr) == (4, True)
    assert forq.run_ctl("flow", "not allowed").returncode == 2


def flow_jobs(forq: Forq) -> list[dict[str, Any]]:
    return list(json.loads(forq.ctl("flow", "release-7", "--json"))["jobs"])


def test_a_batch_is_shown_and_cancelled(forq: Forq) -> None:
    for name in ("home", "away"):
        forq.create(name)
        forq.ctl("pause", name)
    client = Client(forq.url)
    with client.batch("home", id="import-7", on_end=new_job(1)) as batch:
        for number in range(3):
            batch.enqueue("away" if number else "home", number)
    first = forq.ctl("batch", "home", "import-7").splitlines()
    assert first[0] == "batch import-7 of queue home: sealed"
    assert first[2].split() == ["3", "3", "0", "0", "0", "0", "%"]
    assert forq.ctl("batch", "home", "import-7", "--cancel") == "cancelled 3 jobs of batch import-7"
    wait_until(lambda: json.loads(forq.ctl("batch", "home", "import-7", "--json"))["state"] == "failed")
    forq.ctl("resume", "home")
    wait_until(lambda: forq.queue_status("home")["done"] == 1)
    for args in (("home", "import-8"), ("nowhere", "import-7"), ("home", "import-8", "--cancel")):
        assert forq.run_ctl("batch", *args).returncode == 4
    client.close()
