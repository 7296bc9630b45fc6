"""Jobs that wait for others, from forqctl: push, list, explain, drain and cancel them."""

import json
from collections.abc import Iterator

import pytest

from tests.support.drive.supervisor import Forq, running
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
