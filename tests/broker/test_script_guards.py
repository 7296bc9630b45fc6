"""Guards in the scripts that matter only in rare cases, one test for each."""

import pytest

from forq.broker.enqueue import Update, new_job
from forq.broker.recovery import Position
from forq.errors import Fenced, QueueExists, UnknownQueue
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, OneQueue, State, one_queue

FUTURE = 4_000_000_000  # epoch seconds
LATER = 5_000_000_000


def attempts(queue: OneQueue, job_id: str = "a") -> list[str]:
    return [attempt["outcome"] for attempt in queue.inspector.job(job_id)["attempts"]]


def fail_to_retry_now(worker: HandWorker, job_id: str = "a") -> None:
    worker.number += 1
    worker.consumer.turn(worker.number, [], [job_id, worker.fence, 1, "{}", "{}", "retriable", 1, "0.5"], 0, 0)


def failed_once(queue: OneQueue) -> HandWorker:
    """Returns a worker that runs `a` for the second time."""
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    fail_to_retry_now(worker)
    assert worker.turn(want=1) == ["a"]
    assert attempts(queue) == ["failed"]
    return worker


def test_a_blocked_reset_clears_the_attempts_of_the_returning_job(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=9) as queue:
        worker = failed_once(queue)
        queue.enqueue("a", if_exists="update")
        fail_to_retry_now(worker)
        assert attempts(queue) == []
        assert queue.journal_events()[-2:] == [("merged", "a"), ("retried", "a")]


@pytest.mark.parametrize("end", ["crash", "failure"])
def test_a_removed_job_leaves_no_attempts(redis_url: str, end: str) -> None:
    with one_queue(redis_url, max_retries=9) as queue:
        worker = failed_once(queue)
        queue.producer.remove("a")
        if end == "crash":
            queue.recover(worker, running=True)
        else:
            fail_to_retry_now(worker)
        assert queue.hash("attempts") == {}


def test_a_lowered_dead_max_is_reached_in_slices(queue: OneQueue) -> None:
    queue.redis.zadd(queue.key("dead"), {f"old{n}@1": 10**15 + n for n in range(250)})
    queue.create(dead_max=2)
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(failed="a")
    assert queue.redis.zcard(queue.key("dead")) == 151


def test_an_unstarted_job_of_a_lost_host_is_not_counted_and_leaves_no_keys(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker("w2", "p2")
    worker.turn(want=1)
    queue.recovery("p2").heartbeat(queue.name, 1000, [Position("w2", worker.number, 0, False)])
    queue.recovery().evict(queue.name, "p2", "supervisor_lost")
    assert (queue.stall_count("a"), attempts(queue)) == (0, [])
    assert queue.redis.keys("*:processor:p2:*") == []


def test_no_wake_list_of_a_removed_worker_is_left(queue: OneQueue) -> None:
    worker = queue.worker()
    for paused in (True, False):
        queue.registry.pause(queue.name, paused=paused)
    assert 0 < queue.redis.ttl(queue.key("processor:p1:worker:w1:wake")) <= 60
    queue.recover(worker)
    assert queue.redis.keys("*:wake") == []


def test_a_rescue_does_not_register_a_removed_worker_again(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.recover(worker)
    queue.enqueue("a", "b")
    assert [worker.block(), worker.block()] == ["a", "b"]
    assert queue.rescue(worker, 0) == 0
    with pytest.raises(Fenced):
        worker.turn()


def test_a_job_with_a_duplicate_hint_is_done_once(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.redis.lpush(worker.processing, "a")
    queue.recover(worker, 2)
    assert queue.inspector.counts().done == 1


def test_a_job_with_a_stale_hint_is_returned_once(queue: OneQueue) -> None:
    queue.enqueue("a", "z")
    queue.producer.cancel("a")
    queue.enqueue("a", priority=0)
    worker = queue.worker()
    worker.turn(want=1)
    assert worker.block() == "a"
    worker.turn()
    assert queue.state() == State(jobs=set("az"), waiting={0: ["a"], 5: ["z"]})


def test_a_hint_of_a_job_running_elsewhere_is_not_returned(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.rpush(queue.key("pending"), "a")
    queue.worker("w1").turn(want=1)
    other = queue.worker("w2")
    assert other.block() == "a"
    queue.recover(other)
    assert queue.state() == State(jobs={"a"}, active={"a": "w1"}, processing={"w1": ["a"]})


def test_a_hint_without_a_record_does_not_stop_recovery(queue: OneQueue) -> None:
    queue.redis.rpush(queue.key("pending"), "nobody")
    worker = queue.worker()
    worker.block()
    queue.recover(worker)
    assert queue.state() == State(jobs=set())


def test_a_hint_is_neither_journaled_as_returned_nor_taken_for_a_running_job(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn()
    worker.block()
    queue.recover(worker, running=True)
    assert (queue.stall_count("a"), attempts(queue)) == (0, [])
    assert queue.journal_events() == [("enqueued", "a")]


def test_only_a_new_earliest_scheduled_time_is_published(queue: OneQueue) -> None:
    listener = queue.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(queue.channel("due"))
    listener.get_message(timeout=5)
    for job_id, run_at in (("a", LATER), ("b", LATER + 1), ("c", FUTURE)):
        queue.producer.enqueue([new_job(1, id=job_id, run_at=run_at)])
    queue.redis.publish(queue.channel("due"), "end")
    published: list[bytes] = []
    while not published or published[-1] != b"end":
        message = listener.get_message(timeout=5)
        assert message is not None, "nothing more is published"
        published.append(message["data"])
    listener.close()
    now = queue.redis.time()[0]
    assert [int(ms) / 1000 for ms in published[:-1]] == [
        pytest.approx(LATER - now, abs=60),
        pytest.approx(FUTURE - now, abs=60),
    ]


def test_many_due_jobs_are_promoted_in_slices(queue: OneQueue) -> None:
    ids = [f"n{n}" for n in range(550)]
    queue.producer.enqueue([new_job(1, id=job_id, run_at=FUTURE) for job_id in ids])
    queue.set_due({job_id: 1000 + n for n, job_id in enumerate(ids)})
    assert queue.recovery().promote(queue.name) == 0
    assert queue.pending() == ids[:500]


def test_jobs_due_together_keep_their_order_in_each_priority(queue: OneQueue) -> None:
    jobs = [new_job(1, id=f"n{n}", priority=(5, 3, 7)[n % 3], run_at=FUTURE) for n in range(30)]
    queue.producer.enqueue(jobs)
    queue.set_due({job.id: 1000 + n / 4096 for n, job in enumerate(jobs)})
    queue.recovery().promote(queue.name)
    for priority in (5, 3, 7):
        assert queue.pending(priority) == [job.id for job in jobs if job.priority == priority]
    assert [job for verb, job in queue.journal_events() if verb == "promoted"] == [job.id for job in jobs]


def test_a_scheduled_id_without_a_record_is_forgotten(queue: OneQueue) -> None:
    queue.set_due({"nobody": 1})
    assert queue.recovery().promote(queue.name) is None
    assert queue.state() == State(jobs=set())


def test_a_token_returns_its_first_id_for_any_number_of_repeated_calls(queue: OneQueue) -> None:
    assert [queue.enqueue(job_id, token="t") for job_id in "abc"] == [["a"], ["a"], ["a"]]
    assert queue.enqueue("d", "e", token="u") == ["d", "d"]
    assert queue.enqueue("f", token="u") == ["d"]


def test_an_update_without_a_time_change_keeps_the_order_of_jobs_due_together(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id=job_id, run_at=FUTURE) for job_id in "ab"])
    queue.producer.enqueue([new_job(2, id="a", run_at=FUTURE)])
    assert queue.redis.zrange(queue.key("scheduled"), 0, -1) == [b"a", b"b"]


def test_an_update_keeps_the_place_in_line(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.enqueue("a", if_exists="update")
    assert queue.worker().turn(want=2) == ["a", "b"]
    assert queue.journal_events()[2] == ("updated", "a")


def test_an_invalid_record_is_replaced_by_the_next_dispatch_of_its_id(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.hset(queue.key("jobs"), "a", b"\x00garbage")
    queue.producer.enqueue([new_job("whole", id="a")], Update(update_data=False))
    assert queue.inspector.job("a")["data"] == "whole"
    assert queue.worker().turn(want=2) == ["a"]


def test_the_journal_has_the_options_of_a_job_whose_invalid_record_was_replaced(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", expires_in=60)])
    queue.redis.hset(queue.key("jobs"), "a", b"\x00garbage")
    queue.producer.enqueue([new_job(2, id="a")])
    last = [event.cause for event in queue.events() if event.verb == "options"][-1]
    assert last == "-"


def test_a_backoff_of_zero_stays_zero_after_a_thousand_retries(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=5000, min_backoff_ms=0) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        queue.redis.hset(queue.key("jobs"), "a", b"c5 1 2000 0 0\n[null,null,1]")
        worker.turn(failed="a")
        assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


@pytest.mark.parametrize("step", ["evict", "recover", "rescue", "promote"])
def test_returned_work_of_another_priority_wakes_a_worker(queue: OneQueue, step: str) -> None:
    queue.enqueue("a", "b", priority=3)
    worker = queue.worker("w2", "p2")
    worker.turn(want=2)
    queue.redis.delete(queue.key("pending"))
    if step == "evict":
        queue.recovery().evict(queue.name, "p2", "supervisor_lost")
    elif step == "recover":
        queue.recover(worker)
    elif step == "rescue":
        queue.rescue(worker, 0)
    else:
        queue.producer.enqueue([new_job(1, id="c", priority=7, run_at=FUTURE)])
        queue.set_due({"c": 1})
        queue.recovery().promote(queue.name)
    assert queue.pending() == [""]


def test_calls_about_a_deleted_queue_leave_nothing_behind(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.registry.delete(queue.name, force=True)
    queue.registry.purge(queue.name, lambda jobs: None)
    before = sorted(queue.redis.keys("*"))
    graves = queue.redis.zrange(queue.key("graves"), 0, -1)
    queue.recovery().recover(queue.name, "p7", Position("w7", 1, 0, False), outcome="stalled", cause="signal 9")
    queue.recovery().evict(queue.name, "p7", "supervisor_lost")
    assert queue.rescue(worker, 0) == 0
    assert queue.recovery().promote(queue.name) is None
    assert sorted(queue.redis.keys("*")) == before
    assert queue.redis.zrange(queue.key("graves"), 0, -1) == graves


def test_a_heartbeat_and_a_busy_worker_promote_due_jobs(queue: OneQueue) -> None:
    worker = queue.worker()
    for step in ("beat", "turn"):
        queue.producer.enqueue([new_job(1, id=step, run_at=FUTURE)])
        queue.set_due({step: 1})
        if step == "beat":
            queue.recovery().heartbeat(queue.name, 1000, [])
            assert queue.pending() == ["beat"]
        assert worker.turn(want=1) == [step]
        worker.number += 1
        worker.consumer.turn(worker.number, [step, worker.fence, 1], [], 0, 0)


def test_a_heartbeat_forgets_the_position_of_a_worker_it_does_not_list(queue: OneQueue) -> None:
    queue.recovery().heartbeat(queue.name, 1000, [Position("w1", 1, 0, True)])
    queue.recovery().heartbeat(queue.name, 1000, [Position("w2", 1, 0, True)])
    assert queue.hash("processor:p1:positions") == {"w2": "1 0 1"}


def test_a_joining_worker_does_not_renew_a_silent_processor(queue: OneQueue) -> None:
    queue.worker("w1")
    queue.redis.zadd(queue.key("processors"), {"p1": 5})
    queue.worker("w2")
    assert queue.redis.zscore(queue.key("processors"), "p1") == 5


def test_graves_of_a_deleted_queue_expire_unless_it_is_created_again(queue: OneQueue) -> None:
    queue.worker()
    queue.registry.delete(queue.name, force=True)
    queue.registry.purge(queue.name, lambda jobs: None)
    assert queue.redis.ttl(queue.key("graves")) > 0
    queue.create()
    assert queue.redis.ttl(queue.key("graves")) == -1


def test_a_rescue_with_nothing_to_return_settles_nothing(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    assert queue.rescue(worker, 1) == 0
    assert worker.whole_turn(done="ab").refused == []


def test_a_queue_created_again_does_not_count_as_deleted(queue: OneQueue) -> None:
    queue.registry.delete(queue.name, force=True)
    queue.registry.purge(queue.name, lambda jobs: None)
    assert queue.redis.exists(queue.key("deleted")) == 1
    queue.create()
    assert queue.redis.exists(queue.key("deleted")) == 0


def test_run_at_and_run_in_delay_a_job(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", run_at=FUTURE), new_job(1, id="b", run_in=3600)])
    assert queue.worker().turn(want=2) == []
    assert queue.inspector.job("a")["run_at"] == pytest.approx(FUTURE, abs=1)
    assert queue.inspector.job("b")["run_at"] == pytest.approx(queue.redis.time()[0] + 3600, abs=60)


def test_an_update_with_reset_clears_the_attempts(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=9) as queue:
        fail_to_retry_now(failed_once(queue))
        queue.producer.enqueue([new_job(1, id="a")], Update(reset_counts=False))
        assert attempts(queue) == ["failed", "failed"]
        queue.producer.enqueue([new_job(1, id="a")], Update(reset_counts=True))
        assert attempts(queue) == []


def test_a_processor_that_had_expired_itself_evicts_nobody(queue: OneQueue) -> None:
    for processor in ("p1", "p2"):
        queue.worker(f"w-{processor}", processor)
        queue.recovery(processor).heartbeat(queue.name, EXPIRY_MS, [])
    queue.redis.hset(queue.key("counts"), "sweep_after_ms", 0)
    queue.redis.zadd(queue.key("processors"), {"p1": 1, "p2": 1})
    assert queue.recovery("p1").heartbeat(queue.name, EXPIRY_MS, []).evicted == []


def test_a_worker_cannot_join_a_deleted_queue(queue: OneQueue) -> None:
    queue.registry.delete(queue.name, force=True)
    with pytest.raises(UnknownQueue):
        queue.worker()


@pytest.mark.one_server
def test_a_name_reserved_for_another_mode_is_refused_before_the_queue_is_created(queue: OneQueue) -> None:
    queue.redis.hset("forq:queues", "half", "external")
    with pytest.raises(QueueExists):
        queue.registry.create("half", "work", 100, {}, {})
    assert queue.redis.keys("*{half}*") == []


def test_a_job_blocked_behind_a_removed_job_runs_after_that_one_failed(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.producer.remove("a")
    queue.enqueue("a", if_exists="update")
    assert worker.turn(failed="a", want=1) == ["a"]


def test_a_duplicate_hint_is_claimed_once_per_batch(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.redis.lpush(queue.key("pending"), "a")
    assert queue.worker().turn(want=3) == ["a", "b"]


@pytest.mark.parametrize("journal", [1, 0])
def test_fences_keep_growing_while_the_clock_is_behind(redis_url: str, journal: int) -> None:
    with one_queue(redis_url, journal=journal) as queue:
        queue.enqueue("a", "b", "c")
        worker = queue.worker()
        queue.change_summary(fence=5 * 10**15)
        fences: list[int] = []
        for _ in range(3):
            worker.turn(want=1, keep=len(fences))
            fences.append(int(worker.fence))
        assert fences == [5 * 10**15 + 1, 5 * 10**15 + 2, 5 * 10**15 + 3]
