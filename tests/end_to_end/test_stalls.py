"""Jobs that kill their process: counted, bounded, and distinguished from jobs that ran beside them."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


@pytest.mark.fault("job that kills its worker each time")
@pytest.mark.spec("Q20", "Q39")
def test_a_job_that_kills_its_process_each_time_is_dead_after_max_stalls(forq: Forq) -> None:
    forq.create("poison", "act", max_stalls=2)
    jobs = forq.client().queue("poison")
    jobs.enqueue({"do": "die"}, id="poison")
    jobs.enqueue({"do": "sleep"}, id="good")
    wait_until(lambda: forq.queue_status("poison")["dead"] == 1, what="it is dead")
    wait_until(lambda: forq.queue_status("poison")["done"] == 1, what="the job behind it ran")
    assert len([trace for trace in forq.traces("start") if trace.job == "poison"]) == 3
    dead = jobs.job("poison")
    assert (dead["stall_count"], dead["error"]["name"], dead["error"]["kind"]) == (3, "StallError", "stall")
    assert [attempt["cause"] for attempt in dead["attempts"]] == ["exit_3"] * 3


@pytest.mark.fault("job that kills its worker each time")
@pytest.mark.spec("Q20")
def test_only_the_job_that_killed_a_shared_process_is_counted(forq: Forq) -> None:
    forq.create("crew", "act", concurrency=4, max_stalls=1)
    jobs = forq.client().queue("crew")
    jobs.enqueue_many([{"do": "sleep", "seconds": 0.5}] * 3)
    wait_until(lambda: len([t for t in forq.traces("start") if t.queue == "crew"]) == 3, what="three run")
    jobs.enqueue({"do": "die", "seconds": 0.1}, id="killer")
    wait_until(lambda: forq.queue_status("crew")["dead"] == 1, what="the killer is dead")
    wait_until(lambda: forq.queue_status("crew")["done"] == 3, what="the others are done")
    dead = jobs.job("killer")
    assert (dead["state"], dead["stall_count"]) == ("dead", 2)
    assert [attempt["outcome"] for attempt in dead["attempts"]] == ["interrupted", "stalled", "stalled"]
    started = [trace for trace in forq.traces("start") if trace.queue == "crew"]
    assert Counter(trace.job for trace in started)["killer"] == 3
    assert all(trace.stalls == 0 for trace in started if trace.job != "killer")
    for run in (trace for trace in started if trace.job == "killer" and trace.stalls > 0):
        beside = [t for t in forq.traces() if t.pid == run.pid and t.job != "killer" and t.time < run.time]
        assert [t.event for t in beside].count("start") == [t.event for t in beside].count("end"), "it runs alone"


@pytest.mark.spec("Q20", "Q38")
def test_the_fail_handler_gets_a_job_that_stalled_too_often(forq: Forq) -> None:
    settings = ("--path", str(HANDLERS), "--set=max_stalls=0")
    forq.ctl("create", "told", "--handler", "traced:die", "--fail-handler", "traced:on_fail", *settings)
    forq.client().queue("told").enqueue(1, id="t1")
    handled = wait_until(lambda: [t for t in forq.traces() if t.queue == "told" and t.event.startswith("failed=")])
    assert handled[0].event.endswith("/StallError/stall")
