"""What `why` reports about a job that is not in the queue (any more)."""

import re

import pytest

from forq.broker import explain
from forq.broker.dead import DeadJobs
from forq.broker.explain import unknown_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.errors import UnknownJob, UnknownQueue
from tests.support.drive.one_queue import OneQueue

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
KEEP = r" and is not kept \(`forqctl set q keep_done=1h` keeps jobs that end after it, with results\)"


def explanation(queue: OneQueue, job_id: str) -> str:
    error = unknown_job(queue.link, DEFAULT_PREFIX, queue.name, job_id)
    assert isinstance(error, UnknownJob)
    return str(error)


def check(queue: OneQueue, job_id: str, expected: str) -> None:
    assert re.fullmatch(expected, explanation(queue, job_id)), explanation(queue, job_id)


def test_a_job_that_never_existed(queue: OneQueue) -> None:
    queue.enqueue("a", "xb")
    queue.worker().turn(want=1)
    for other in ("b", "x", "created", "1"):
        check(queue, other, f"queue 'q' never had a job '{other}'; `forqctl jobs q` lists its jobs")


def test_a_job_that_is_done_and_whose_result_is_not_kept(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    worker.turn(done="ab")
    queue.enqueue("c", "ab")
    for job_id in "ab":
        check(
            queue,
            job_id,
            rf"queue 'q' has no job '{job_id}' any more: it was done at {TIME} \(it ran for .* m?s\){KEEP}",
        )
    queue.set_options(keep_done_ms=60_000, done_max=5)
    assert explanation(queue, "a").endswith(" and is not kept any more (keep_done = 1m, done_max = 5)")


def test_jobs_cancelled_before_they_ran_or_removed_while_they_ran(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    queue.producer.cancel("b")
    queue.producer.remove("a")
    worker.turn(failed="a")
    check(queue, "b", f"queue 'q' has no job 'b' any more: it was cancelled at {TIME}")
    check(queue, "a", f"queue 'q' has no job 'a' any more: it was removed or killed while it ran, and ended at {TIME}")


def test_dead_jobs_that_were_discarded_or_forgotten(queue: OneQueue) -> None:
    queue.set_options(dead_max=1)
    queue.enqueue("a", "b", "c")
    worker = queue.worker()
    for job_id in "abc":
        worker.turn(want=1)
        worker.turn(failed=job_id)
    DeadJobs(queue.link, DEFAULT_PREFIX, "q").discard("c")
    failed = f"any more: it failed for good at {TIME}, and"
    check(queue, "c", f"queue 'q' has no job 'c' {failed} was discarded at {TIME}")
    check(queue, "a", f"queue 'q' has no job 'a' {failed} was removed by dead_ttl or dead_max at {TIME}")


def test_a_forgotten_earlier_job_of_the_id_is_not_taken_for_the_last_one(queue: OneQueue) -> None:
    worker = queue.worker()
    for fails in (True, False):
        queue.enqueue("a")
        worker.turn(want=1)
        worker.turn(failed="a" * fails, done="a" * (not fails))
    DeadJobs(queue.link, DEFAULT_PREFIX, "q").discard("a")
    assert "it was done at" in explanation(queue, "a")


@pytest.mark.parametrize("how", ["trimmed", "off", "was off"])
def test_gaps_in_the_journal_are_reported_instead_of_a_guess(queue: OneQueue, how: str) -> None:
    if how == "trimmed":
        queue.enqueue("a")
        queue.redis.xtrim(queue.key("events"), maxlen=1, approximate=False)
    else:
        queue.set_options(journal=0)
        queue.enqueue("a")
    if how == "was off":
        queue.registry.configure("q", {"journal": 1}, {})
        queue.enqueue("c")
    queue.enqueue("d")
    known = (
        "its journal is off"
        if how == "off"
        else rf"its journal does not mention it since {TIME}, as far as it was read"
    )
    check(queue, "b", f"queue 'q' has no job 'b': it never existed, or has ended{KEEP}; {known}")


def test_the_journal_is_searched_in_chunks_up_to_a_limit(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        queue.enqueue(f"job-{number}")
    queue.redis.config_resetstat()
    assert "never" in explanation(queue, "b")
    calls = queue.redis.info("commandstats")["cmdstat_xrevrange"]["calls"]
    assert 2 <= calls <= 5
    monkeypatch.setattr(explain, "MAX_JOURNAL_BYTES", 100)
    assert "never existed, or has ended" in explanation(queue, "job-x")


def test_an_earlier_queue_with_the_same_name_is_ignored(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.registry.delete("q", force=True)
    queue.registry.purge("q", lambda dropped: None)
    error = unknown_job(queue.link, DEFAULT_PREFIX, "q", "a")
    assert isinstance(error, UnknownQueue)
    queue.create()
    assert "never had a job 'a'" in explanation(queue, "a")


def test_a_program_gets_the_error_without_a_journal_search(queue: OneQueue) -> None:
    queue.redis.config_resetstat()
    with pytest.raises(UnknownJob) as caught:
        queue.inspector.job("b")
    known = (
        "it never existed, or has ended and is not kept: its queue keeps no results; "
        "`forqctl set q keep_done=1h` keeps those of jobs that end after it"
    )
    assert str(caught.value) == f"queue 'q' has no job 'b': {known}"
    assert "cmdstat_xrevrange" not in queue.redis.info("commandstats")
