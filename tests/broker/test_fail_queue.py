"""Permanent failure: the script that moves a job to dead also writes its fail job and its failed-log line."""

import json

import pytest

from forq.broker.claim import Consumer, Settled
from forq.broker.journal import read_entry
from forq.broker.keys import DEFAULT_PREFIX, fail_queue, queue_base
from forq.settings import stored_defaults
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, OneQueue, one_queue

ERROR = '{"name":"ValueError","message":"no","kind":"permanent","traceback":"..."}'
BRIEF = '{"name":"ValueError","message":"no","kind":"permanent"}'


def with_fail_queue(queue: OneQueue, **options: int) -> OneQueue:
    queue.registry.create(
        queue.name, "work", 100, stored_defaults(), {"fail_handler": 1, **options}, fail_options={"max_retries": 1}
    )
    return queue


def fail(worker: HandWorker, job_id: str, kind: str = "permanent") -> None:
    worker.number += 1
    failed: Settled = [job_id, worker.fence, 1, ERROR, BRIEF, kind, "", "0.5"]
    worker.consumer.turn(worker.number, [], failed, 0, 0)


class RetryWorker:
    """A worker of the retry process, registered in the queue and in its fail queue."""

    def __init__(self, queue: OneQueue, *, fails: bool = True, name: str = "r1") -> None:
        where = (queue.url, DEFAULT_PREFIX)
        self.lane = Consumer(*where, queue.name, "p1", name, lane="retry")
        self.fails = Consumer(*where, fail_queue(queue.name), "p1", name, lane="retry")
        for consumer in (self.lane, self.fails) if fails else (self.lane,):
            consumer.join(EXPIRY_MS)
        self.number = 0

    def claim(
        self, consumer: Consumer, done: Settled | None = None, failed: Settled | None = None
    ) -> tuple[str, list[bytes]]:
        self.number += 1
        turn = consumer.turn(self.number, done or [], failed or [], 0, 1)
        return turn.fence, turn.jobs


@pytest.mark.spec("Q6", "Q38", "Q40")
def test_a_permanent_failure_creates_a_fail_job_with_all_data_for_the_fail_handler(queue: OneQueue) -> None:
    with_fail_queue(queue)
    worker = queue.worker()
    queue.enqueue('a"b\\')
    worker.turn(want=1)
    fail(worker, 'a"b\\')
    assert queue.redis.lrange(queue.key("failed"), 0, -1) == [b""]
    assert (queue.inspector.counts().fail_jobs, queue.inspector.counts().dead) == (1, 1)
    retry = RetryWorker(queue)
    _, [fail_id, record] = retry.claim(retry.fails)
    assert fail_id == f'a"b\\:{worker.fence}'.encode()
    _, _, [original, job, error] = json.loads(record.partition(b"\n")[2])
    assert original == [None, None, {"n": 'a"b\\'}]
    assert (job["id"], job["retry_count"], job["fence"]) == ('a"b\\', 0, int(worker.fence))
    assert error == json.loads(BRIEF)


@pytest.mark.spec("Q40")
def test_a_fail_job_is_retried_and_ends_in_its_own_dead_list(queue: OneQueue) -> None:
    with_fail_queue(queue)
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    fail(worker, "a")
    retry = RetryWorker(queue)
    fence, [fail_id, _] = retry.claim(retry.fails)
    _, jobs = retry.claim(retry.fails, failed=[fail_id, fence, 1, ERROR, BRIEF, "retriable", 1, "0.5"])
    assert jobs[0] == fail_id
    fence = queue.hash("fail:active")[fail_id.decode()].split(":")[1]
    retry.claim(retry.fails, failed=[fail_id, fence, 1, ERROR, BRIEF, "retriable", "", "0.5"])
    assert queue.redis.zcard(queue.key("fail:dead")) == 1
    assert (queue.inspector.counts().fail_jobs, queue.inspector.counts().dead) == (0, 1)
    assert queue.redis.llen(queue.key("outbox")) == 1
    assert not queue.redis.exists(queue.key("fail:outbox")), "only the queue's own jobs go to the failed log"


@pytest.mark.spec("Q39")
def test_without_a_fail_handler_there_is_no_fail_job(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    fail(worker, "a")
    assert queue.inspector.counts().fail_jobs == 0
    assert queue.redis.exists(queue.key("failed")) == 0


def test_the_outbox_line_has_what_recovery_needs(queue: OneQueue) -> None:
    worker = queue.worker()
    subscriber = queue.redis.pubsub()
    subscriber.psubscribe("*:outbox")
    subscriber.get_message(timeout=1)
    queue.enqueue("a", priority=3)
    worker.turn(want=1)
    fail(worker, "a")
    [line] = map(json.loads, queue.redis.lrange(queue.key("outbox"), 0, -1))
    assert (line["id"], line["fence"], line["priority"], line["counts"]) == ("a", int(worker.fence), 3, [0, 0, 0])
    assert (line["body"], line["error"]) == ([None, None, {"n": "a"}], json.loads(ERROR))
    assert subscriber.get_message(timeout=1)["data"] == b"q"
    subscriber.close()


@pytest.mark.spec("N16", "N17")
def test_the_retry_lane_is_served_only_while_nothing_else_waits(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=0, retry_lane_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker, retry = queue.worker(), RetryWorker(queue, fails=False)
        queue.enqueue("a", "b")
        worker.turn(want=1)
        fail(worker, "a", "retriable")
        assert (queue.inspector.job("a")["state"], queue.inspector.counts().retry) == ("retry", 1)
        assert [job["id"] for job in queue.inspector.jobs("retry").jobs] == ["a"]
        assert [job["id"] for job in queue.inspector.jobs("waiting").jobs] == ["b"]
        assert queue.redis.exists(queue.key("failed")) == 0
        assert retry.claim(retry.lane)[1] == []
        assert worker.turn(want=5) == ["b"], "the main lane never claims it"
        assert queue.redis.lrange(queue.key("failed"), 0, -1) == [b""], (
            "the script that empties the main lane wakes the retry lane"
        )
        fence, [job_id, _] = retry.claim(retry.lane)
        assert job_id == b"a"
        retry.claim(retry.lane, failed=[job_id, fence, 1, ERROR, BRIEF, "retriable", "", "0.5"])
        assert queue.inspector.job("a")["retry_count"] == 2


@pytest.mark.spec("N16", "N18")
def test_tries_in_the_retry_lane_are_counted_and_then_the_job_is_dead(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=0, retry_lane_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker, retry = queue.worker(), RetryWorker(queue, fails=False)
        queue.enqueue("a")
        worker.turn(want=1)
        fail(worker, "a", "retriable")
        failed: Settled = []
        for _ in range(2):
            fence, [job_id, _] = retry.claim(retry.lane, failed=failed)
            queue.enqueue("c")
            failed = [job_id, fence, 1, ERROR, BRIEF, "retriable", "", "0.5"]
            assert retry.claim(retry.lane, failed=failed)[1] == [], "the retry lane yields as soon as a job waits"
            failed = []
            worker.turn(want=1)
            worker.turn(done="c")
        assert queue.state().dead == ["a"]
        assert queue.inspector.counts().retry == 0


def test_cancel_and_update_reach_a_job_in_the_retry_lane(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=0, retry_lane_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker, retry = queue.worker(), RetryWorker(queue, fails=False)
        queue.enqueue("a", "b")
        for job_id in "ab":
            worker.turn(want=1)
            fail(worker, job_id, "retriable")
        assert queue.inspector.counts().retry == 2
        assert queue.producer.cancel("a")
        queue.enqueue("b", if_exists="update")
        counts = queue.inspector.counts()
        assert (counts.retry, counts.waiting) == (0, 1)
        assert retry.claim(retry.lane)[1] == []
        assert worker.turn(want=1) == ["b"]
        worker.turn(done="b")
        assert queue.inspector.counts().waiting == 0


def test_jobs_of_a_dead_retry_worker_go_back_to_the_retry_lane(redis_url: str) -> None:
    from forq.broker.recovery import Position

    with one_queue(redis_url, max_retries=0, retry_lane_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        with_fail_queue(queue, retry_lane_retries=2, max_retries=0)
        worker, retry = queue.worker(), RetryWorker(queue)
        queue.enqueue("a", "b")
        for job_id, kind in (("a", "retriable"), ("b", "permanent")):
            worker.turn(want=1)
            fail(worker, job_id, kind)
        retry.claim(retry.lane)
        retry.claim(retry.fails)
        at = Position("r1", retry.number, 0, True)
        for name in (queue.name, fail_queue(queue.name)):
            queue.recovery().recover(name, "p1", at, outcome="stalled", cause="signal 9")
        counts = queue.inspector.counts()
        assert (counts.retry, counts.fail_jobs, counts.active) == (1, 1, 0)
        assert queue.stall_count("a") == 0, "its position belongs to the other queue"
        other = RetryWorker(queue, name="r2")
        assert other.claim(other.fails)[1][1].startswith(b"c5 ")


def test_delete_counts_fail_jobs_and_leaves_nothing_behind(queue: OneQueue) -> None:
    with_fail_queue(queue)
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    fail(worker, "a")
    assert queue.registry.delete(queue.name, force=True) == 2
    while queue.registry.purge(queue.name, lambda jobs: None):
        pass
    left = {key.decode().rpartition("}")[2] for key in queue.redis.keys("*") if b"graves" not in key}
    outlives = {":deleted", ":freed", ":counts", ":events"}
    assert left <= outlives | {f":fail{name}" for name in outlives} | {"forq:queues:deleted"}


def paused_and_events(queue: OneQueue) -> tuple[bytes, list[str]]:
    """Returns whether the fail queue is paused, and the verbs in its journal."""
    base = queue_base(DEFAULT_PREFIX, fail_queue(queue.name))
    entries = [fields for _, fields in queue.redis.xrange(f"{base}:events")]
    verbs = [event.verb for fields in entries for event in read_entry(fields, queue.name)]
    return queue.redis.hget(f"{base}:options", "paused"), verbs


def test_the_fail_queue_of_a_paused_queue_is_created_paused(queue: OneQueue) -> None:
    queue.registry.pause(queue.name, paused=True)
    with_fail_queue(queue)
    assert paused_and_events(queue) == (b"1", ["created", "paused"])
    queue.registry.pause(queue.name, paused=False)
    assert paused_and_events(queue) == (b"0", ["created", "paused", "resumed"])


@pytest.mark.parametrize("paused", [True, False])
def test_a_join_during_pause_or_resume_leaves_the_fail_queue_unchanged(queue: OneQueue, paused: bool) -> None:
    """The join may have read the paused flag just before it changed."""
    with_fail_queue(queue)
    queue.registry.pause(queue.name, paused=True)
    queue.registry.pause(queue.name, paused=paused)
    before = paused_and_events(queue)
    queue.set_options(paused=int(not paused))
    with_fail_queue(queue)
    assert paused_and_events(queue) == before
