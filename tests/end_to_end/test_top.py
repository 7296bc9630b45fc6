"""forqctl top against a real supervisor."""

import json
from collections.abc import Iterator

import pytest

from tests.support.drive.supervisor import BIN, Forq, running
from tests.support.drive.terminal import OnTerminal
from tests.support.drive.wait import wait_until


@pytest.fixture
def forq() -> Iterator[Forq]:
    with running() as forq:
        forq.create("mails")
        forq.create("slow", "sleep", stop_grace="0s")
        forq.wait_for_child("mails")
        yield forq


def test_keys_pause_and_resume_a_queue_and_the_screen_survives_the_supervisor(forq: Forq) -> None:
    terminal = OnTerminal([str(BIN / "forqctl"), "top", "--interval", "200ms"], forq.environ(), columns=100)
    try:
        terminal.wait_for(lambda text: "mails" in text and "redis: ok, counts in" in text)
        terminal.press("p")
        terminal.wait_for("paused mails")
        assert forq.queue_status("mails")["state"] == "paused"
        job = forq.ctl("push", "mails", "1")
        terminal.press("\r")
        terminal.wait_for(f"{job}: its queue is paused")
        terminal.press("r")
        terminal.wait_for("no job is waiting")
        wait_until(lambda: forq.queue_status("mails")["done"] == 1, what="the job has run")
        forq.stop()
        terminal.wait_for("unreachable, retrying")
        forq.start()
        terminal.wait_for(lambda text: "mails" in text and "not reachable" not in text)
        terminal.press("qq")
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_json_shows_running_jobs_and_counts(forq: Forq) -> None:
    forq.ctl("push", "slow", "60", "--id", "nap")
    forq.wait_for_child("slow", "busy")
    first, second = (
        json.loads(line) for line in forq.ctl("top", "--json", "--count", "2", "--interval", "500ms").splitlines()
    )
    slow = next(queue for queue in second["queues"] if queue["name"] == "slow")
    assert (slow["job"], slow["running"], slow["done_per_second"]) == ("nap", 1, 0.0)
    assert slow["job_seconds"] > 0.4
    assert first["supervisor"]["redis"]["counts_ms"] > 0
