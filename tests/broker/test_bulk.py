"""Bulk requests: cancel jobs, and revive or discard dead ones, by ids or by a filter, while the set shrinks."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from forq.broker import search as search_module
from forq.broker.bulk import BulkChanges, CancelledPart, DeadPart
from forq.broker.enqueue import Update, new_job
from forq.broker.filters import JobFilter
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.record import pack_body
from forq.broker.search import JobSearch
from forq.errors import InvalidId, QueueFull, UnknownQueue, UsageError
from tests.support.drive.one_queue import OneQueue

ANY = JobFilter()


def bulk(queue: OneQueue) -> BulkChanges:
    return BulkChanges(queue.link, DEFAULT_PREFIX, queue.name)


def bury(queue: OneQueue, member: str, died_ms: int = 5000, name: str = "ValueError") -> None:
    packed = b"p5 1000000\n" + pack_body(1, None, "mail")
    queue.redis.zadd(queue.key("dead"), {member: died_ms})
    queue.redis.hset(queue.key("dead:jobs"), member, packed + b"\n" + json.dumps({"name": name}).encode() + b"\n[]")


def limit_scans(monkeypatch: pytest.MonkeyPatch, scanned: int, chunk: int = 2) -> None:
    monkeypatch.setattr(search_module, "SCANNED", scanned)
    monkeypatch.setattr("forq.broker.bulk.CHUNK", chunk)
    monkeypatch.setattr("forq.broker.dead.WALK_CHUNK", chunk)


def dead_ids(queue: OneQueue) -> list[str]:
    return [member.decode() for member in queue.redis.zrange(queue.key("dead"), 0, -1)]


def test_cancelling_by_ids_returns_those_that_cannot_be_cancelled(queue: OneQueue) -> None:
    queue.enqueue(*"abc")
    queue.worker().turn(want=1)
    done = bulk(queue).cancel_ids(["a", "b", "none", "c"])
    assert (done.cancelled, done.left) == (2, ["a", "none"])
    assert bulk(queue).cancel_ids(["b"]).left == ["b"]
    assert queue.state().jobs == {"a"}
    with pytest.raises(UsageError, match="at most 1000"):
        bulk(queue).cancel_ids(["a"] * 1001)
    with pytest.raises(UsageError, match="list"):
        bulk(queue).cancel_ids("abc")
    with pytest.raises(InvalidId):
        bulk(queue).cancel_ids(["a b"])


def test_more_ids_than_one_batch_are_cancelled(queue: OneQueue) -> None:
    ids = [f"j{number}" for number in range(250)]
    queue.enqueue(*ids)
    assert bulk(queue).cancel_ids(ids).cancelled == 250
    assert queue.state().jobs == set()


@pytest.mark.parametrize("state", ["waiting", "scheduled", "retry"])
def test_cancelling_by_filter_affects_one_state_only(queue: OneQueue, state: str) -> None:
    queue.set_options(retry_lane_retries=1, min_backoff_ms=0, max_backoff_ms=0, jitter=0)
    queue.enqueue("r", "t", "active")
    worker = queue.worker()
    worker.turn(want=3)
    worker.turn(failed="rt", keep=1)
    queue.recovery().promote(queue.name)
    queue.producer.enqueue([new_job(1, id=job_id, type="x") for job_id in ("w", "v")])
    queue.producer.enqueue([new_job(1, id=job_id, run_in=100) for job_id in ("s", "u")])
    expected = {"waiting": {"w", "v"}, "scheduled": {"s", "u"}, "retry": {"r", "t"}}
    before = queue.state().jobs
    part = bulk(queue).cancel_matching(state, ANY)
    assert (part.cancelled, part.left, part.next) == (2, [], None)
    assert before - queue.state().jobs == expected[state]


def test_cancelling_in_parts_skips_no_job(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs leave the queue between the parts, by the request itself and by a worker. New ones are left alone."""
    limit_scans(monkeypatch, scanned=100, chunk=50)
    ids = [f"j{number}" for number in range(1000)]
    queue.producer.enqueue_many(new_job(1, id=job_id, type="odd" if int(job_id[1:]) % 2 else "even") for job_id in ids)
    worker = queue.worker()
    claimed: set[str] = set()
    part = bulk(queue).cancel_matching("waiting", JobFilter(type="odd"))
    cancelled, parts = part.cancelled, 1
    while part.next is not None:
        claimed |= set(worker.turn(want=10, keep=len(worker.held())))
        queue.producer.enqueue([new_job(1, id=f"new{parts}", type="odd")])
        part = bulk(queue).cancel_matching("waiting", JobFilter(type="odd"), part.next)
        cancelled, parts = cancelled + part.cancelled, parts + 1
    odd = {job_id for job_id in ids if int(job_id[1:]) % 2}
    left = queue.state().jobs
    assert parts > 3
    assert left & odd <= claimed
    assert cancelled == len(odd - left)
    assert {f"new{number}" for number in range(1, parts)} <= left
    assert set(ids) - odd <= left


def test_scheduled_jobs_are_cancelled_in_parts(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_scans(monkeypatch, scanned=100, chunk=50)
    queue.producer.enqueue_many(new_job(1, id=f"j{number}", run_in=100 + number) for number in range(500))
    part, parts = bulk(queue).cancel_matching("scheduled", ANY), 1
    while part.next is not None:
        part, parts = bulk(queue).cancel_matching("scheduled", ANY, part.next), parts + 1
    assert parts > 2
    assert queue.state().jobs == set()
    assert queue.redis.zcard(queue.key("scheduled")) == 0


def test_a_job_that_changed_after_it_was_read_is_not_confused_with_another(
    queue: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was claimed and has a job blocked behind it; one has ended, and another job has its id."""
    queue.enqueue("a", "b", "c")
    read = JobSearch.live_jobs

    def change_meanwhile(*args: Any, **kwargs: Any) -> Any:
        found = list(read(*args, **kwargs))
        queue.worker().turn(want=1)
        queue.producer.enqueue([new_job(2, id="a")], Update())
        queue.producer.cancel("b")
        queue.enqueue("b")
        return iter(found)

    monkeypatch.setattr(JobSearch, "live_jobs", change_meanwhile)
    part = bulk(queue).cancel_matching("waiting", ANY)
    assert (part.cancelled, sorted(part.left)) == (1, ["a", "b"])
    assert queue.state().jobs == {"a", "b"}
    assert set(queue.hash("blocked")) == {"a"}


def test_large_records_are_scanned_a_few_at_a_time(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.set_options(max_data=4 << 20)
    queue.producer.enqueue_many(new_job("x" * 1_000_000, id=f"j{number}", type="t") for number in range(6))
    counts: list[int] = []
    call = queue.link.call

    def note_count(*args: Any, **others: Any) -> Any:
        if args[0] == "HSCAN":
            counts.append(args[4])
        return call(*args, **others)

    monkeypatch.setattr(queue.link, "call", note_count)
    assert bulk(queue).cancel_matching("waiting", JobFilter(type="t")).cancelled == 6
    assert counts[0] == 4


def test_a_filter_by_id_needs_no_walk(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    bury(queue, "a@1")
    bury(queue, "a@2")
    assert bulk(queue).cancel_matching("waiting", JobFilter(id="a")) == CancelledPart(1, [], 1, None)
    assert bulk(queue).cancel_matching("waiting", JobFilter(id="a")) == CancelledPart(0, [], 0, None)
    assert bulk(queue).discard_matching(JobFilter(id="a@1")) == DeadPart(1, {}, 1, None)
    assert dead_ids(queue) == ["a@2"]


@pytest.mark.parametrize("died_ms", [lambda number: 5000, lambda number: 5000 + number], ids=["at once", "in order"])
@pytest.mark.parametrize("scanned", [1, 3, 4])
def test_dead_jobs_are_changed_in_parts_without_skipping_any(
    queue: OneQueue, monkeypatch: pytest.MonkeyPatch, scanned: int, died_ms: Callable[[int], int]
) -> None:
    """The oldest are forgotten by others meanwhile; jobs that die during the walk are not changed."""
    limit_scans(monkeypatch, scanned)
    for number in range(15):
        bury(queue, f"j{number:02}@1", died_ms(number), "KeyError" if number % 3 else "IOError")
    wanted = JobFilter(error="keyerror")
    part = bulk(queue).discard_matching(wanted)
    done, looked, walked = part.done, part.scanned, 1
    forgotten: set[str] = set()
    while part.next is not None:
        walked += 1
        oldest = dead_ids(queue)[0]
        queue.redis.zrem(queue.key("dead"), oldest)
        queue.redis.hdel(queue.key("dead:jobs"), oldest)
        forgotten.add(oldest)
        bury(queue, f"new{walked}@1", 9_000_000_000_000, "KeyError")
        part = bulk(queue).discard_matching(wanted, part.next)
        done, looked = done + part.done, looked + part.scanned
    left = {member for member in dead_ids(queue) if not member.startswith("new")}
    assert left == {f"j{number:02}@1" for number in range(0, 15, 3)} - forgotten
    assert len(dead_ids(queue)) - len(left) == walked - 1 - len([name for name in forgotten if name.startswith("new")])
    assert walked >= 15 // scanned // 2
    assert done >= 10 - len(forgotten)
    assert looked <= 15


def test_retrying_by_filter_reports_the_refused_ones(queue: OneQueue) -> None:
    queue.enqueue("b")
    for number, job_id in enumerate("abc"):
        bury(queue, f"{job_id}@{number}", 1000 + number)
    bury(queue, "other@9", 2000, "KeyError")
    part = bulk(queue).retry_matching(JobFilter(error="ValueError"))
    assert (part.done, part.scanned, part.next) == (2, 4, None)
    assert list(part.refused) == ["b@1"]
    assert "already has a job" in part.refused["b@1"]
    assert queue.pending() == ["b", "a", "c"]
    assert dead_ids(queue) == ["b@1", "other@9"]
    assert bulk(queue).retry_matching(JobFilter(error="ValueError")).done == 0


def test_a_full_queue_ends_the_request_and_the_walk_can_continue(queue: OneQueue) -> None:
    queue.set_options(max_items=2)
    for number in range(5):
        bury(queue, f"j{number}@1", 1000 + number)
    part = bulk(queue).retry_matching(ANY)
    assert (part.done, part.refused) == (2, {})
    assert part.next is not None
    with pytest.raises(QueueFull, match="max_items = 2"):
        bulk(queue).retry_matching(ANY, part.next)
    queue.set_options(max_items=10)
    rest = bulk(queue).retry_matching(ANY, part.next)
    assert (rest.done, rest.next) == (3, None)
    assert dead_ids(queue) == []


def test_since_and_until_bound_the_walk(queue: OneQueue) -> None:
    for number in range(6):
        bury(queue, f"j{number}@1", 1000 * number)
    assert bulk(queue).discard_matching(JobFilter(since=2, until=3)) == DeadPart(2, {}, 2, None)
    assert dead_ids(queue) == ["j0@1", "j1@1", "j4@1", "j5@1"]


@pytest.mark.parametrize("after", ["1", "1/2/", 7, "x/y/z"])
def test_a_foreign_cursor_is_refused(queue: OneQueue, after: object) -> None:
    with pytest.raises(UsageError, match="cursor"):
        bulk(queue).discard_matching(ANY, after)
    with pytest.raises(UsageError, match="cursor"):
        bulk(queue).cancel_matching("waiting", ANY, after)


def test_other_states_and_unknown_queues_are_refused(queue: OneQueue) -> None:
    with pytest.raises(UsageError, match="waiting, scheduled, retry"):
        bulk(queue).cancel_matching("active", ANY)
    other = BulkChanges(queue.link, DEFAULT_PREFIX, "other")
    for call in (other.retry_matching, other.discard_matching, lambda wanted: other.cancel_matching("waiting", wanted)):
        with pytest.raises(UnknownQueue):
            call(ANY)
    with pytest.raises(UnknownQueue):
        other.cancel_ids(["a"])
