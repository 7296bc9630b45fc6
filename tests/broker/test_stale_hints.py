"""Stale hints: a list never has many more hints than waiting jobs, and sweeping keeps the order of the jobs."""

from collections.abc import Iterator

import pytest

from forq.broker.enqueue import Update, new_job
from forq.broker.explain import why
from forq.broker.keys import DEFAULT_PREFIX
from tests.broker.sweeping import sweeping_at_once
from tests.support.drive.one_queue import OneQueue
from tests.support.drive.release_queue import gate


def hints(queue: OneQueue, place: str = "pending") -> int:
    return int(queue.redis.llen(queue.key(place)) + queue.redis.llen(queue.key(f"{place}:swept")))


def most(waiting: int) -> int:
    return waiting * 5 // 2 + 1250


@pytest.mark.parametrize(("first", "steps"), [(0, 2500), (1, 2500), (1000, 4500)])
def test_items_taken_by_their_ids_leave_a_bounded_number_of_hints(redis_url: str, first: int, steps: int) -> None:
    """The first items stay. In each round the next oldest is taken by its id and a new one is enqueued."""
    with gate(redis_url, "on_request") as queue:
        ids = [f"j{n}" for n in range(first + 10)]
        queue.enqueue(*ids)
        in_two_parts = 0
        for n in range(steps):
            job_id = ids.pop(first)
            queue.ack(f"x{n}", queue.ask(f"x{n}", job_id, register=False))
            ids.append(f"k{n}")
            queue.enqueue(ids[-1])
            assert hints(queue) <= most(len(ids))
            in_two_parts = in_two_parts + 1 if queue.redis.exists(queue.key("pending:swept")) else 0
            assert in_two_parts < most(len(ids)) / 3, "the sweep continues until nothing is left"
        assert queue.redis.hlen(queue.key("stale")) <= most(len(ids))
        got = [queue.got(f"z{n}") for n in range(len(ids) + 9)]
        assert [job_id for job_id in got if job_id] == ids
        assert queue.summary().other_hints == 0
        assert not queue.redis.exists(queue.key("stale"), queue.key("pending:swept"))


@pytest.mark.parametrize("priority", [5, 3])
def test_cancelling_and_enqueueing_in_a_paused_queue_leaves_a_bounded_number_of_hints(
    queue: OneQueue, priority: int
) -> None:
    queue.registry.pause(queue.name, paused=True)
    ids = [f"j{n}" for n in range(30)]
    queue.enqueue(*ids, priority=priority)
    place = "pending" if priority == 5 else f"pending:{priority}"
    for n in range(3000):
        job_id = ids[n % 30]
        queue.producer.cancel(job_id)
        queue.enqueue(job_id, priority=priority)
        assert hints(queue, place) <= most(30)
    queue.registry.pause(queue.name, paused=False)
    worker = queue.worker()
    # A turn skips at most 1,000 hints.
    claimed = worker.turn(want=128) or worker.turn(want=128)
    assert sorted(claimed) == sorted(ids)
    assert queue.state().stale == {}
    assert queue.summary().other_hints == 0


def test_updating_jobs_of_the_retry_lane_leaves_a_bounded_number_of_hints(queue: OneQueue) -> None:
    queue.registry.configure(queue.name, {"retry_lane_retries": 9, "min_backoff_ms": 0}, {})
    queue.enqueue("z", "a", "b")
    worker = queue.worker()
    for job_id in "zab":
        worker.turn(want=1)
        worker.turn(failed=job_id)
    for n in range(1400):
        job_id = "ab"[n % 2]
        queue.producer.enqueue([new_job(1, id=job_id)], Update("update"))
        assert worker.turn(want=1) == [job_id]
        worker.turn(failed=job_id)
        worker.turn()
        assert hints(queue, "retry") <= most(3)
    assert queue.inspector.counts().retry == 3
    child = queue.worker("r", lane="retry")
    assert child.turn(want=1) == ["z"]
    assert child.consumer.lane_has_jobs()


@pytest.fixture
def swept(queue: OneQueue) -> Iterator[OneQueue]:
    with sweeping_at_once():
        yield queue


def begin_sweeping(queue: OneQueue) -> None:
    """a to h wait; x, behind a, was cancelled; the sweep has passed both."""
    queue.enqueue(*"axbcdefgh")
    queue.producer.cancel("x")
    assert (queue.state().swept[5], queue.pending()) == (["a"], list("bcdefgh"))


def test_swept_jobs_are_claimed_first(swept: OneQueue) -> None:
    begin_sweeping(swept)
    assert swept.hash("stale") == {"swept": "1"}
    worker = swept.worker()
    assert worker.turn(want=1) == ["a"]
    assert worker.turn(done="a", want=9) == list("bcdefgh")
    assert swept.state().stale == {}
    assert swept.summary().other_hints == 0


def test_one_claim_takes_swept_jobs_and_the_ones_after_them(swept: OneQueue) -> None:
    begin_sweeping(swept)
    assert swept.worker().turn(want=5) == list("abcde")


def test_returned_jobs_go_before_swept_jobs(swept: OneQueue) -> None:
    queue = swept
    queue.enqueue("1", "2")
    worker = queue.worker()
    worker.turn(want=2)
    begin_sweeping(queue)
    queue.recover(worker)
    assert queue.state().swept == {5: ["1", "2", "a"]}
    assert queue.worker("w2").turn(want=9) == list("12abcdefg")


def test_a_job_moved_by_blmove_comes_after_swept_jobs(swept: OneQueue) -> None:
    begin_sweeping(swept)
    worker = swept.worker()
    assert [worker.block() for _ in range(2)] == ["b", "c"]
    assert worker.turn(want=4) == list("abcd")
    other = swept.worker("w2")
    assert other.block() == "e"
    swept.recover(other)
    assert swept.pending() == list("efgh")


def test_an_idle_worker_is_woken_for_swept_jobs(swept: OneQueue) -> None:
    swept.enqueue(*"axb")
    swept.producer.cancel("x")
    assert (swept.state().swept, swept.pending()) == ({5: ["a"]}, ["b"])
    worker = swept.worker()
    assert worker.block() == "b"
    assert swept.pending() == []
    swept.enqueue("c", priority=7)
    assert swept.pending() == [""], "the list it blocks on is not empty"
    assert worker.turn(want=9) == list("abc")


def test_a_sweep_drops_wake_tokens(swept: OneQueue) -> None:
    swept.enqueue("l", priority=7)
    swept.enqueue(*"axb")
    assert swept.pending() == ["", "a", "x", "b"]
    swept.producer.cancel("x")
    assert (swept.state().swept, swept.pending()) == ({5: ["a"]}, ["x", "b"])
    assert swept.worker().turn(want=9) == list("abl")


def test_a_list_without_any_live_hints_is_replaced(swept: OneQueue) -> None:
    swept.enqueue(*"axby")
    swept.producer.cancel("x")
    swept.producer.cancel("y")
    assert (swept.state().swept, swept.pending()) == ({}, ["a", "b"])
    assert swept.redis.exists(swept.key("stale")) == 0
    assert swept.summary().other_hints == 0


def test_a_deleted_queue_leaves_no_swept_hints(swept: OneQueue) -> None:
    begin_sweeping(swept)
    swept.redis.rpush(swept.key("retry:swept"), "y")
    swept.registry.delete(swept.name, force=True)
    assert swept.redis.keys("*swept*") == []


def test_swept_jobs_are_listed_and_explained_in_their_order(swept: OneQueue) -> None:
    swept.worker()
    begin_sweeping(swept)
    swept.enqueue(*"lmn", priority=3)
    swept.producer.cancel("m")
    pages, after = [], None
    while True:
        page = swept.inspector.jobs("waiting", limit=2, after=after)
        pages += [job["id"] for job in page.jobs]
        after = page.next
        if after is None:
            break
    assert pages == list("lnabcdefgh")
    reasons = {job_id: why(swept.link, DEFAULT_PREFIX, swept.name, job_id)[1] for job_id in "lac"}
    assert "it is next" in reasons["l"]
    assert "2 jobs before it" in reasons["a"]
    assert "4 jobs before it" in reasons["c"]
    assert swept.inspector.counts().oldest_waiting_seconds is not None


def test_the_oldest_job_is_found_among_swept_jobs(swept: OneQueue) -> None:
    begin_sweeping(swept)
    swept.redis.hset(swept.key("jobs"), "a", b"p5 1000000\n[null,null,1]")
    oldest = swept.inspector.counts().oldest_waiting_seconds
    assert oldest is not None
    assert oldest > 1_000_000


def test_a_claim_of_large_jobs_during_a_sweep_stays_within_its_budget(swept: OneQueue) -> None:
    swept.registry.configure(swept.name, {"max_data": 10_000_000}, {})
    jobs = [new_job("x" * size, id=job_id) for job_id, size in (("a", 3_000_000), ("b", 3_000_000), ("c", 5_000_000))]
    for job in jobs:
        swept.producer.enqueue([job])
    swept.enqueue("x", "d")
    swept.producer.cancel("x")
    assert (swept.state().swept[5], swept.pending()) == (["a", "b"], ["c", "x", "d"])
    swept.redis.lrem(swept.key("pending"), 1, "c")
    swept.redis.lpush(swept.key("pending"), "d")
    assert swept.worker().turn(want=9) == ["a"]


def test_items_that_expire_during_a_sweep_remove_no_hints_of_others(redis_url: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=3_600_000) as queue, sweeping_at_once():
        begin_sweeping(queue)
        queue.make_due("expiries", "a", "b")
        queue.promote()
        assert sorted(queue.state().dead) == ["a", "b"]
        assert [queue.got(f"z{n}") for n in range(7)] == [*"cdefgh", None]
        assert queue.hash("counts").get("dropped", "0") == "0"
        assert not queue.redis.exists(queue.key("stale"), queue.key("pending:swept"))
        assert queue.summary().other_hints == 0


def test_an_item_that_expires_behind_its_own_stale_hint_removes_no_hints_of_others(redis_url: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=3_600_000) as queue:
        queue.enqueue(*"abc")
        queue.producer.cancel("a")
        queue.enqueue("a")
        assert (queue.pending(), queue.state().stale) == (list("abca"), {"5:a": 1})
        with sweeping_at_once():
            queue.make_due("expiries", "a", "c")
            queue.promote()
            assert [queue.got("x"), queue.got("y")] == ["b", None]
            assert queue.hash("counts").get("dropped", "0") == "0"
