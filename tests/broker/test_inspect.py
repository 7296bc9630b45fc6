"""Counts, a single job, and pages of jobs."""

import re
from typing import Any

import pytest

from forq.broker.enqueue import Update, new_job
from forq.broker.inspect import counts_of
from forq.broker.keys import DEFAULT_PREFIX
from forq.errors import UnknownJob, UnknownQueue, UsageError
from tests.support.drive.one_queue import OneQueue, one_queue


def ids(queue: OneQueue, state: str | None = None, limit: int = 100) -> list[str]:
    """Returns the ids of all pages."""
    found: list[str] = []
    after: str | None = None
    while True:
        page = queue.inspector.jobs(state, limit, after)
        found += [job["id"] for job in page.jobs]
        after = page.next
        if after is None:
            return found


@pytest.mark.spec("N4")
def test_counts_return_the_number_of_jobs_per_state(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c", "d")
    queue.enqueue("e", priority=9)
    worker = queue.worker()
    worker.turn(want=3)
    worker.turn(done="a", failed="b", keep=1)
    counts = queue.inspector.counts()
    assert (counts.waiting, counts.active, counts.dead) == (2, 1, 1)
    assert (counts.done, counts.failed, counts.in_flight) == (1, 1, 1)
    assert (counts.paused, counts.mode, counts.dropped) == (False, "work", 0)


@pytest.mark.spec("R5")
def test_in_flight_is_the_sum_of_the_registered_processing_lists(queue: OneQueue) -> None:
    queue.enqueue(*"abcdef")
    for name, processor, want in (("w1", "p1", 1), ("w2", "p1", 2), ("w3", "p2", 2)):
        queue.worker(name, processor).turn(want=want)
    queue.redis.config_resetstat()
    assert queue.inspector.counts().in_flight == 5
    assert not {"cmdstat_scan", "cmdstat_keys"} & set(queue.redis.info("commandstats"))


@pytest.mark.spec("N5")
def test_the_counts_of_many_queues_are_read_in_one_call(redis_url: str) -> None:
    with one_queue(redis_url, "one") as one, one_queue(redis_url, "two") as two:
        one.enqueue("a")
        two.enqueue("a", "b")
        found = counts_of(one.link, DEFAULT_PREFIX, ["one", "gone", "two"])
        assert {name: counts and counts.waiting for name, counts in found.items()} == {"one": 1, "gone": None, "two": 2}
        assert counts_of(one.link, DEFAULT_PREFIX, []) == {}


def test_the_oldest_waiting_job_is_found_in_any_list_behind_stale_hints(queue: OneQueue) -> None:
    assert queue.inspector.counts().oldest_waiting_seconds is None
    queue.enqueue("a", "b", "c")
    queue.enqueue("d", priority=9)
    queue.producer.cancel("a")
    queue.redis.hset(queue.key("jobs"), "b", "p5 1000000000\n[null,null,1]")
    now = int(queue.redis.time()[0])
    assert queue.inspector.counts().oldest_waiting_seconds == pytest.approx(now - 1000, abs=5)


def enqueued_at(queue: OneQueue, job_id: str, seconds: float) -> None:
    """Sets the enqueue time of a job."""
    flag, _, rest = queue.redis.hget(queue.key("jobs"), job_id).decode().partition(" ")
    old = re.sub(r"^\d+", str(round(seconds * 1e6)), rest)
    queue.redis.hset(queue.key("jobs"), job_id, f"{flag} {old}")


def oldest(queue: OneQueue) -> object:
    """Returns since when the oldest waiting job waits, in epoch seconds, rounded to hide the duration of the test."""
    age = queue.inspector.counts().oldest_waiting_seconds
    return None if age is None else pytest.approx(queue.redis.time()[0] - age, abs=60)


@pytest.mark.parametrize("place", ["priority", "suspect", "retry"])
def test_every_kind_of_waiting_job_has_an_age(redis_url: str, place: str) -> None:
    with one_queue(redis_url, retry_lane_retries=1, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker = queue.worker()
        queue.enqueue("a", priority=9 if place == "priority" else 5)
        enqueued_at(queue, "a", 1000)
        if place != "priority":
            worker.turn(want=1)
            assert oldest(queue) is None, "a running job does not wait"
        if place == "suspect":
            queue.recover(worker, running=True, outcome="suspect")
        elif place == "retry":
            worker.turn(failed="a")
            assert queue.inspector.job("a")["state"] == "retry"
            queue.redis.hdel(queue.key("counts"), "idle_until_ms")
        queue.enqueue("b")
        assert oldest(queue) == 1000


def test_a_due_job_waits_since_its_run_at(queue: OneQueue) -> None:
    now = queue.redis.time()[0]
    queue.producer.enqueue([new_job(1, id="a", run_at=now + 1000), new_job(1, id="b", run_at=now + 2000)])
    assert oldest(queue) is None
    queue.set_due({"a": (now - 500) * 1000})
    assert oldest(queue) == now - 500
    assert queue.inspector.counts().overdue == 1


def test_a_delayed_job_waits_only_from_its_run_at(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", run_at=4_000_000_000)])
    enqueued_at(queue, "a", 1000)
    queue.set_due({"a": 1})
    queue.recovery().promote(queue.name)
    assert queue.inspector.counts().oldest_waiting_seconds == pytest.approx(0, abs=60)
    queue.redis.hincrby(queue.key("counts"), "idle_until_ms", -500_000)
    assert queue.inspector.counts().oldest_waiting_seconds == pytest.approx(500, abs=60), "it waits from its run_at"
    queue.producer.enqueue([new_job(1, id="b", run_at=4_000_000_000)])
    queue.set_due({"b": 1})
    queue.recovery().promote(queue.name)
    assert queue.inspector.counts().oldest_waiting_seconds == pytest.approx(500, abs=60), "also with others behind it"


def test_a_blocked_job_waits_only_from_the_end_of_the_job_ahead(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.producer.enqueue([new_job(2, id="a"), new_job(2, id="b", run_at=4_000_000_000)], Update("update"))
    for job_id, entry in queue.hash("blocked").items():
        head, _, body = entry.partition("\n")
        queue.redis.hset(queue.key("blocked"), job_id, f"{head.rpartition(' ')[0]} 1000000000\n{body}")
    worker.turn(done="ab")
    assert queue.inspector.job("a")["enqueued_at"] == 1000
    assert queue.inspector.counts().oldest_waiting_seconds == pytest.approx(0, abs=60)


def test_the_oldest_job_is_not_always_the_first(queue: OneQueue) -> None:
    """Returned jobs go to the front, the last one first."""
    queue.enqueue("a", "b", "c")
    enqueued_at(queue, "a", 1000)
    workers = [queue.worker(f"w{number}") for number in range(2)]
    for worker in workers:
        worker.turn(want=1)
    for worker in workers:
        worker.turn()
    assert queue.pending() == ["b", "a", "c"]
    assert oldest(queue) == 1000


def test_a_stale_hint_has_no_age(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.producer.cancel("a")
    queue.producer.enqueue([new_job(1, id="a", run_at=4_000_000_000)])
    enqueued_at(queue, "a", 1000)
    assert queue.state().waiting == {5: ["a", "b"]}
    assert oldest(queue) == queue.redis.time()[0]
    queue.redis.hdel(queue.key("stale"), "5:a")
    queue.redis.hset(queue.key("active"), "a", "w9:1")
    assert oldest(queue) == queue.redis.time()[0], "nor has the hint of a running job"


@pytest.mark.spec("N6")
def test_pages_show_id_identifier_and_state_and_never_data(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.worker().turn(want=1)
    assert queue.inspector.jobs().jobs == [
        {"id": "a", "identifier": "a", "state": "active"},
        {"id": "b", "identifier": "b", "state": "waiting"},
    ]


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_paging_shows_each_waiting_job_once_in_claim_order(queue: OneQueue, limit: int) -> None:
    queue.enqueue("e", "f", priority=9)
    queue.enqueue("c", "x", "d")
    queue.enqueue("a", "b", priority=0)
    queue.producer.cancel("x")
    assert ids(queue, "waiting", limit) == ["a", "b", "c", "d", "e", "f"]


def test_paging_without_a_state_shows_active_then_waiting(queue: OneQueue) -> None:
    queue.enqueue(*"abcde")
    queue.worker().turn(want=2)
    assert sorted(ids(queue, "active")) == ["a", "b"]
    assert ids(queue, None, 2)[2:] == ["c", "d", "e"]
    assert ids(queue, None, 100)[2:] == ["c", "d", "e"]


def test_a_page_reads_only_lists_that_are_not_empty(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.enqueue("a", "b")
    commands: list[str] = []
    call = queue.link.call

    def counted(*args: Any) -> Any:
        commands.append(args[0])
        return call(*args)

    monkeypatch.setattr(queue.link, "call", counted)
    assert ids(queue) == ["a", "b"]
    assert commands == ["HSCAN", "LRANGE", "HMGET", "ZRANGE", "HSCAN"]


def test_paging_through_the_dead(queue: OneQueue) -> None:
    worker = queue.worker()
    for job_id in "abc":
        queue.enqueue(job_id)
        worker.turn(want=1)
        worker.turn(failed=job_id)
    assert ids(queue, "dead", 2) == ["a", "b", "c"]
    assert ids(queue) == []


def test_a_job_cancelled_and_enqueued_again_is_shown_once(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.producer.cancel("a")
    queue.enqueue("a")
    assert sorted(ids(queue, "waiting")) == ["a", "b"]


@pytest.mark.parametrize(
    "after", ["", "x", "dead/1.5", "waiting/.5", "waiting/5", "active/-1", "dead/²", "waiting/1.2.3", 5, ["x"]]
)
def test_an_invalid_cursor_is_refused(queue: OneQueue, after: Any) -> None:
    with pytest.raises(UsageError, match="cursor"):
        queue.inspector.jobs(after=after)


def test_an_unknown_state_is_refused(queue: OneQueue) -> None:
    with pytest.raises(UsageError, match="state"):
        queue.inspector.jobs("busy")


def test_one_job_shows_its_owner_while_it_runs(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    job = queue.inspector.job("a")
    assert (job["state"], job["worker"], job["fence"], job["removed"]) == ("active", "w1", int(worker.fence), False)


def test_an_id_with_several_deaths_shows_the_last(queue: OneQueue) -> None:
    worker = queue.worker()
    for job_id in ("a", "a*", "a"):
        queue.enqueue(job_id)
        worker.turn(want=1)
        worker.number += 1
        worker.consumer.turn(worker.number, [], [job_id, worker.fence, 1, '"no"', '"no"', "retriable", "", "0.5"], 0, 0)
    assert queue.inspector.job("a")["fence"] == int(worker.fence)
    assert queue.inspector.job("a")["state"] == "dead"


def test_an_unknown_job_and_an_unknown_queue_raise_different_errors(queue: OneQueue) -> None:
    with pytest.raises(UnknownJob):
        queue.inspector.job("a")
    queue.registry.delete(queue.name, force=True)
    with pytest.raises(UnknownQueue):
        queue.inspector.job("a")
    with pytest.raises(UnknownQueue):
        queue.inspector.counts()


def test_blocked_jobs_are_listed_with_their_own_identifiers(queue: OneQueue) -> None:
    queue.enqueue(*"abcd")
    queue.worker().turn(want=3)
    for job_id in "cab":
        queue.producer.enqueue([new_job({"n": 2}, id=job_id, identifier=f"second {job_id}")])
    assert queue.inspector.jobs("blocked").jobs == [
        {"id": job_id, "identifier": f"second {job_id}", "state": "blocked"} for job_id in "abc"
    ]
    assert ids(queue, "blocked", limit=2) == ["a", "b", "c"]
    assert ids(queue) == ["a", "b", "c", "d"], "blocked jobs are not listed without a state"
