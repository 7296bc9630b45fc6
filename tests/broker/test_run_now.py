"""run_now: a scheduled job becomes ready before its time."""

import threading
from typing import Any

import pytest

from forq.broker.enqueue import Producer, Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.client import Client
from forq.errors import InvalidId, UnknownJob, UnknownQueue, UsageError
from tests.support.drive.external_queue import external_queue
from tests.support.drive.one_queue import OneQueue, State, one_queue
from tests.support.drive.release_queue import gate
from tests.support.models.journal_replay import ImpossibleEvent, Replay

HOUR_MS = 3_600_000
LANE: Any = {"retry_lane_retries": 1, "max_retries": 0, "min_backoff_ms": HOUR_MS, "max_backoff_ms": HOUR_MS}


def delay(queue: OneQueue, *ids: str, **how: Any) -> None:
    queue.producer.enqueue([new_job(1, id=job_id, run_in=3600, **how) for job_id in ids], Update("refuse"))


def state_of(queue: OneQueue, job_id: str) -> str:
    return str(queue.inspector.job(job_id)["state"])


def test_a_delayed_job_goes_to_the_end_of_its_line_at_once(queue: OneQueue) -> None:
    queue.enqueue("first")
    delay(queue, "a", "b")
    queue.producer.run_now("a")
    assert queue.state() == State(jobs={"first", "a", "b"}, waiting={5: ["first", "a"]})
    assert queue.redis.zrange(queue.key("scheduled"), 0, -1) == [b"b"]
    assert queue.journal_events()[-1] == ("promoted", "a")
    assert queue.worker().turn(want=3) == ["first", "a"]
    Replay().read_all(queue.entries())


def test_a_job_that_waits_for_its_retry_runs_with_its_counts(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=3, min_backoff_ms=HOUR_MS, max_backoff_ms=HOUR_MS) as queue:
        queue.enqueue("a", priority=7)
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(failed="a")
        before = queue.inspector.job("a")
        queue.producer.run_now("a")
        job = queue.inspector.job("a")
        assert (before["state"], job["state"], job["run_at"]) == ("scheduled", "waiting", None)
        assert (job["retry_count"], job["attempts"]) == (1, before["attempts"])
        assert queue.pending() == [""], "a worker blocked on the list of priority 5 is woken"
        assert worker.turn(want=1) == ["a"]
        assert [event.attempt for event in queue.events() if event.verb == "claimed"] == [1, 2]


def test_a_job_of_the_retry_lane_goes_to_the_lane_and_wakes_the_retry_process(redis_url: str) -> None:
    with one_queue(redis_url, **LANE) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(failed="a")
        assert queue.state().retry_tokens == 0
        queue.producer.run_now("a")
        assert state_of(queue, "a") == "retry"
        assert queue.inspector.counts().retry == 1
        assert queue.state().retry_tokens == 1
        assert queue.worker("r", lane="retry").turn(want=1) == ["a"]


def test_a_suspect_stays_one(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.recover(worker, running=True, outcome="suspect")
    queue.producer.enqueue([new_job(1, id="a", run_in=3600)], Update(update_data=False, reset_counts=False))
    queue.producer.run_now("a")
    assert queue.state() == State(jobs={"a"}, suspects=["a"])


@pytest.mark.parametrize("state", ["waiting", "active", "retry"])
def test_a_job_in_another_state_is_refused_and_unchanged(redis_url: str, state: str) -> None:
    with one_queue(redis_url, **(LANE | {"min_backoff_ms": 0, "max_backoff_ms": 0})) as queue:
        queue.enqueue("a")
        if state != "waiting":
            queue.worker().turn(want=1)
        if state == "retry":
            queue.workers[0].turn(failed="a")
            queue.recovery().promote(queue.name)
        before, events = queue.state(), queue.journal_events()
        with pytest.raises(UsageError, match=f"is {state}, not scheduled"):
            queue.producer.run_now("a")
        assert (queue.state(), queue.journal_events()) == (before, events)


def test_a_job_that_does_not_exist_is_not_created(queue: OneQueue) -> None:
    delay(queue, "a")
    queue.producer.cancel("a")
    for job_id in ("a", "none"):
        with pytest.raises(UnknownJob, match="forqctl why q"):
            queue.producer.run_now(job_id)
    assert queue.state() == State(jobs=set())
    with pytest.raises(UnknownQueue):
        Producer(queue.link, DEFAULT_PREFIX, "other").run_now("a")
    with pytest.raises(InvalidId):
        queue.producer.run_now("a b")


def test_a_due_time_without_a_record_stays_for_promote(queue: OneQueue) -> None:
    delay(queue, "a")
    queue.redis.hdel(queue.key("jobs"), "a")
    with pytest.raises(UnknownJob):
        queue.producer.run_now("a")
    queue.set_due({"a": 1})
    queue.recovery().promote(queue.name)
    assert queue.inspector.counts().dropped == 1


def test_a_paused_queue_starts_the_job_when_it_is_resumed(queue: OneQueue) -> None:
    delay(queue, "a")
    worker = queue.worker()
    queue.registry.pause(queue.name, paused=True)
    queue.producer.run_now("a")
    assert worker.turn(want=1) == []
    assert state_of(queue, "a") == "waiting"
    queue.registry.pause(queue.name, paused=False)
    assert worker.turn(want=1) == ["a"]


def test_a_full_queue_and_its_limits_are_no_obstacle(redis_url: str) -> None:
    with one_queue(redis_url, max_items=2, max_active=1) as queue:
        delay(queue, "a", "b")
        queue.producer.run_now("a")
        queue.producer.run_now("b")
        worker = queue.worker()
        assert worker.turn(want=2) == ["a"]
        assert worker.turn(want=2, done="a") == ["b"]


def test_the_job_counts_as_waiting_from_now_on(queue: OneQueue) -> None:
    delay(queue, "a")
    queue.redis.hset(queue.key("jobs"), "a", b"d5 1000000\n[null,null,1]")
    queue.producer.run_now("a")
    assert (queue.inspector.counts().oldest_waiting_seconds or 0) < 60


def test_an_item_is_notified_and_its_age_counts_from_now(redis_url: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=HOUR_MS) as queue:
        delay(queue, "a")
        assert queue.got("x") is None
        before = queue.redis.zscore(queue.key("expiries"), "a")
        queue.producer.run_now("a")
        assert before - queue.redis.zscore(queue.key("expiries"), "a") == pytest.approx(HOUR_MS, abs=5000)
        assert queue.redis.llen(queue.key("awaiter:x")) == 1
        assert queue.got("x") == "a"


def test_an_item_between_two_tries_keeps_its_expiry(redis_url: str) -> None:
    with gate(redis_url, "auto_release", item_timeout_ms=HOUR_MS, retry_interval_ms=HOUR_MS) as queue:
        queue.enqueue("a")
        queue.attempt()
        before = queue.redis.zscore(queue.key("expiries"), "a")
        queue.producer.run_now("a")
        assert queue.redis.zscore(queue.key("expiries"), "a") == before
        assert state_of(queue, "a") == "waiting"
        Replay().read_all(queue.entries())


def test_an_external_worker_gets_the_job(redis_url: str) -> None:
    with external_queue(redis_url) as queue:
        delay(queue, "a")
        assert queue.idle() is None
        subscriber = queue.redis.pubsub(ignore_subscribe_messages=True)
        subscriber.subscribe(queue.channel("handed:b1"))
        subscriber.get_message(timeout=1)
        queue.producer.run_now("a")
        assert subscriber.get_message(timeout=1)["data"] == b"w1"
        assert queue.idle() == "a"
        subscriber.close()
        Replay().read_all(queue.entries())


def test_many_calls_at_once_make_a_job_ready_once(queue: OneQueue) -> None:
    delay(queue, "a")
    outcomes: list[str] = []

    def run() -> None:
        link = Link(queue.url)
        try:
            Producer(link, DEFAULT_PREFIX, queue.name).run_now("a")
            outcomes.append("ready")
        except UsageError:
            outcomes.append("refused")
        link.close()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["ready"] + ["refused"] * 7
    assert queue.pending() == ["a"]


def test_the_replay_accepts_an_early_promotion_of_one_job_only(queue: OneQueue) -> None:
    delay(queue, "a", "b")
    replay = Replay().read_all(queue.entries())
    with pytest.raises(ImpossibleEvent):
        replay.read(replay.next_entry(replay.epoch, "promoted 0 a b"))


def test_the_python_api_runs_a_job_now(queue: OneQueue) -> None:
    delay(queue, "a")
    ours = Client(queue.url).queue(queue.name)
    ours.run_now("a")
    with pytest.raises(UsageError, match="is waiting"):
        ours.run_now("a")
