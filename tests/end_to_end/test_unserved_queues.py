"""Queues in Redis that no supervisor serves: status lists them and names the next command."""

import json
import signal

import pytest

from forq import Client
from tests.support.drive.metrics import Scraper
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


def states(forq: Forq) -> dict[str, str]:
    return {queue["name"]: queue["state"] for queue in forq.status()["queues"]}


def test_an_unserved_queue_is_listed_with_the_next_command(redis_url: str) -> None:
    orphan = Client(redis_url).create_queue("orphan")
    with running(redis=redis_url) as forq:
        forq.create("mine")
        forq.wait_for_child("mine")
        assert states(forq) == {"mine": "running", "orphan": "unserved"}
        assert forq.run_ctl("status", "--check").returncode == 0, "nothing waits in it"
        orphan.enqueue_many([1, 2, 3])
        rows = [line.split() for line in forq.ctl("status").splitlines()]
        assert rows[2][:3] == ["orphan", "unserved", "3"]
        line = (
            "orphan: unserved: no supervisor serves it; "
            "`forqctl create orphan --handler MODULE:FUNCTION --path DIR` makes this one serve it"
        )
        assert line in forq.ctl("status").splitlines()
        assert line in forq.ctl("status", "orphan").splitlines()
        shown = json.loads(forq.ctl("status", "orphan", "--json"))["queues"][0]
        assert (shown["state"], shown["mode"], shown["waiting"], shown["children"]) == ("unserved", "work", 3, [])
        assert len(shown["items"]) == 3
        check = forq.run_ctl("status", "--check")
        assert (check.returncode, check.stderr) == (
            3,
            "forqctl: not healthy: queue orphan is unserved with 3 jobs waiting\n",
        )
        reason = forq.ctl("why", "orphan", shown["items"][0]["id"])
        assert reason == "no supervisor serves its queue; `forqctl status orphan` says what to do"
        missing = forq.run_ctl("status", "nowhere")
        assert (missing.returncode, missing.stderr) == (4, "forqctl: no queue 'nowhere'\n")

        forq.create("orphan", "record")
        wait_until(lambda: orphan.status()["done"] == 3, what="its jobs have run")
        assert states(forq) == {"mine": "running", "orphan": "running"}
        assert forq.run_ctl("status", "--check").returncode == 0


def test_a_queue_of_another_supervisor_is_not_listed_until_that_one_is_gone(redis_url: str) -> None:
    beats = 'heartbeat = "200ms"\nexpiry = "1s"\n'
    with running(redis=redis_url, settings=beats) as one, running(redis=redis_url, settings=beats) as two:
        two.create("theirs")
        two.wait_for_child("theirs")
        wait_until(lambda: states(one) == {}, what="the other supervisor is known to serve it")
        shown = one.ctl("status", "theirs")
        assert "theirs: elsewhere: another supervisor serves it" in shown
        two.ctl("pause", "theirs")
        two.ctl("push", "theirs", "1")
        assert one.run_ctl("status", "theirs", "--check").returncode == 0
        for process in two.processes():
            process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: states(one) == {"theirs": "unserved"}, what="the other supervisor is stopped")
        finally:
            for process in two.processes():
                process.send_signal(signal.SIGCONT)
        wait_until(lambda: states(one) == {}, what="its heartbeats are back")


def test_metrics_include_unserved_queues(redis_url: str) -> None:
    Client(redis_url).create_queue("orphan").enqueue_many([1, 2])
    with running(redis=redis_url, settings='[metrics]\nlisten = "./m.sock"\n') as forq:
        scraper = Scraper(forq.directory / "m.sock")
        labels = {"queue": "orphan", "mode": "work", "state": "unserved"}
        wait_until(lambda: scraper.value("forq_queue_state", **labels) == 1, what="its state is reported")
        assert scraper.value("forq_jobs", queue="orphan", state="waiting") == 2
        forq.create("orphan", "record")
        wait_until(lambda: scraper.value("forq_jobs", queue="orphan", state="waiting") == 0, what="it is served")
        wait_until(lambda: scraper.value("forq_queue_state", **labels) is None, what="and its state is another")


@pytest.mark.one_server
def test_while_redis_is_down_only_its_own_queues_are_known(server: Server, redis_url: str) -> None:
    Client(redis_url).create_queue("orphan")
    with running(redis=redis_url) as forq:
        forq.create("mine")
        wait_until(lambda: set(states(forq)) == {"mine", "orphan"}, what="both are known")
        server.kill()
        try:
            wait_until(lambda: not forq.status()["supervisor"]["redis"]["ok"], what="Redis is down")
            assert set(states(forq)) == {"mine"}
            missing = forq.run_ctl("status", "orphan")
            assert (missing.returncode, missing.stderr.startswith("forqctl: no queue 'orphan': ")) == (4, True)
        finally:
            server.start()
