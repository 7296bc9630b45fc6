"""Mode external: assignment of jobs to workers, and what happens when a worker finishes, fails or goes silent."""

from collections.abc import Callable, Iterator

import pytest

from forq.broker.journal import Event
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.leases import ExternalJobs, Lease, Leases
from forq.errors import LeaseLapsed, UnknownQueue, WrongMode
from tests.support.drive.external_queue import ExternalQueue, external_queue
from tests.support.drive.one_queue import one_queue
from tests.support.models.journal_replay import Replay


@pytest.fixture
def queue(redis_url: str) -> Iterator[ExternalQueue]:
    with external_queue(redis_url, max_retries=2) as queue:
        yield queue
        # After every test the journal must replay.
        Replay().read_all(queue.entries())


def subscribe(queue: ExternalQueue, bridge: str) -> list[str]:
    """Subscribes as this bridge; `notified` returns the workers named since the last call."""
    subscriber = queue.redis.pubsub(ignore_subscribe_messages=True)
    subscriber.subscribe(queue.channel(f"handed:{bridge}"))
    subscriber.get_message(timeout=1)
    queue.subscriber = subscriber  # type: ignore[attr-defined]
    return []


def notified(queue: ExternalQueue) -> list[str]:
    found = []
    while (message := queue.subscriber.get_message(timeout=0.2)) is not None:  # type: ignore[attr-defined]
        found.append(message["data"].decode())
    return found


def last(queue: ExternalQueue, verb: str) -> Event:
    return [event for event in queue.events() if event.verb == verb][-1]


@pytest.mark.spec("P2", "P3", "P7")
def test_idle_workers_get_jobs_by_priority_and_then_in_order(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.enqueue("last", priority=9)
    queue.enqueue("first", priority=0)
    assert [queue.idle(f"w{n}") for n in range(5)] == ["first", "a", "b", "last", None]


@pytest.mark.spec("P17", "P18", "P19", "P20", "P4")
def test_a_worker_is_idle_then_assigned_then_busy_then_idle(queue: ExternalQueue) -> None:
    queue.idle()
    assert queue.states() == {"w1": "idle"}
    queue.enqueue("a")
    assert queue.fetch_assigned() == "a"
    assert queue.states() == {"w1": "assigned"}
    queue.external.accept("w1", "a")
    assert queue.states() == {"w1": "busy"}
    queue.external.finish("w1", "a")
    assert queue.states() == {"w1": "idle"}
    assert queue.journal_events() == [("enqueued", "a"), ("claimed", "a"), ("done", "a")]
    assert queue.traces() == {}


@pytest.mark.spec("P19")
def test_progress_without_an_accept_makes_the_worker_busy(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.idle()
    queue.external.progress("w1", "a", 0.25, "a quarter")
    assert queue.states() == {"w1": "busy"}


@pytest.mark.spec("P5", "P10", "P11", "P12", "P13", "P14")
def test_assignment_acceptance_and_progress_are_shown(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b", "c")
    queue.idle("w1")
    queue.work("w2")
    assert [(row["uuid"], row["worker_uuid"]) for row in queue.external.dispatched()] == [("a", "w1")]
    row = queue.external.running()[0]
    assert (row["uuid"], row["worker_uuid"], row["progress"], row["text"]) == ("b", "w2", 0.0, "")
    long_ago = queue.redis.time()[0] * 1000 - 5000
    queue.redis.zadd(queue.key("workers"), {"w2": long_ago})
    queue.external.progress("w2", "b", 0.5, "half, and more words")
    after = queue.external.running()[0]
    assert (after["progress"], after["text"]) == (0.5, "half, and more words")
    assert after["since"] == row["since"] <= row["last"] <= after["last"]
    assert queue.redis.zscore(queue.key("accepted"), "b") == round(after["last"] * 1000)
    assert queue.redis.zscore(queue.key("workers"), "w2") == round(after["last"] * 1000)
    assert queue.pending() == ["c"]


def test_an_idle_worker_gets_its_unaccepted_job_again(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    first = queue.lease()
    assert isinstance(first, Lease)
    assert queue.lease() == first
    assert queue.journal_events() == [("enqueued", "a"), ("enqueued", "b"), ("claimed", "a")]


def test_a_repeated_idle_through_another_bridge_moves_the_assignment_to_that_bridge(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    first = queue.lease("w1", "b1")
    assert queue.lease("w1", "b2") == first
    assert not queue.external.leave("w1", "b1")
    assert queue.states() == {"w1": "assigned"}
    assert queue.external.leave("w1", "b2")
    assert queue.states() == {}
    assert queue.pending() == ["a"]


def test_a_repeated_idle_does_not_renew_the_lease_of_an_assignment(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.idle()
    before = queue.redis.zscore(queue.key("leases"), "a")
    queue.idle()
    assert queue.redis.zscore(queue.key("leases"), "a") == before


def test_an_idle_worker_that_had_accepted_a_job_has_lost_it(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.work()
    queue.external.progress("w1", "a", 0.5, "")
    assert queue.idle() == "a", "it is first in line again"
    assert queue.stall_count("a") == 1
    assert last(queue, "stalled").cause == "idle"
    assert queue.external.running() == []
    assert queue.redis.hlen(queue.key("progress")) == 0


@pytest.mark.spec("P21")
def test_an_assignment_not_accepted_in_time_goes_back_uncounted(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b", "c")
    queue.idle("w1")
    queue.idle("w2")
    queue.end_leases("a", "b")
    assert queue.pending() == ["a", "b", "c"]
    assert (queue.stall_count("a"), queue.stall_count("b")) == (0, 0)
    assert queue.traces() == {}
    with pytest.raises(LeaseLapsed):
        queue.external.accept("w1", "a")


def test_a_job_accepted_by_a_silent_worker_goes_back_and_is_counted(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.work()
    queue.external.progress("w1", "a", 0.9, "nearly")
    queue.end_leases("a")
    assert queue.pending() == ["a", "b"]
    assert queue.stall_count("a") == 1
    stalled = last(queue, "stalled")
    assert (stalled.cause, stalled.job) == ("silent", "a")
    assert queue.traces() == {}
    for late in (queue.external.accept, queue.external.finish):
        with pytest.raises(LeaseLapsed):
            late("w1", "a")


@pytest.mark.spec("P16")
def test_every_message_from_the_worker_renews_the_lease(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.idle()
    messages: list[Callable[[], None]] = [
        lambda: queue.external.accept("w1", "a"),
        lambda: queue.external.accept("w1", "a"),
        lambda: queue.external.progress("w1", "a", 0.1, ""),
    ]
    for send in messages:
        queue.make_due("leases", "a")
        send()
        queue.promote()
        assert queue.states() == {"w1": "busy"}
    assert queue.stall_count("a") == 0


def test_a_late_message_about_a_job_of_another_worker_is_refused(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.work("w1")
    queue.end_leases("a")
    assert queue.work("w2") == "a"
    for late in (queue.external.accept, queue.external.finish):
        with pytest.raises(LeaseLapsed):
            late("w1", "a")
    with pytest.raises(LeaseLapsed):
        queue.external.progress("w1", "a", 1.0, "")
    with pytest.raises(LeaseLapsed):
        queue.fail("a", "w1")
    # A worker that sends the fence of another worker.
    fence = int(queue.hash("active")["a"].partition(":")[2])
    for late in (queue.external.accept, queue.external.finish):
        with pytest.raises(LeaseLapsed):
            late("w1", "a", fence)
    assert queue.external.running()[0]["worker_uuid"] == "w2"
    queue.external.finish("w2", "a")


def test_workers_with_a_common_name_prefix_are_distinct(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.work("w11")
    with pytest.raises(LeaseLapsed):
        queue.external.finish("w1", "a")


def test_progress_ends_with_its_job_also_if_no_earlier_job_reported_any(queue: ExternalQueue) -> None:
    for job_id in "ab":
        queue.enqueue(job_id)
        assert queue.lease() is not None
        if job_id == "b":
            assert not queue.summary().may_be_rare
            queue.external.progress("w1", "b", 0.5, "half")
        queue.external.finish("w1", job_id)
    assert not queue.redis.exists(queue.key("progress"))


def test_a_late_message_without_a_fence_does_not_apply_to_a_later_attempt(
    queue: ExternalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bridge reads the fence first, so a late message still refers to that attempt."""
    queue.enqueue("a")
    assert queue.lease() is not None
    run, carried = queue.external._run, list[tuple[str, tuple[object, ...]]]()

    def delay(verb: str, *args: object) -> list[object]:
        carried.append((verb, args))
        return []

    with monkeypatch.context() as patch:
        patch.setattr(queue.external, "_run", delay)
        queue.external.accept("w1", "a")
        queue.external.finish("w1", "a")
    queue.make_due("leases", "a")
    queue.recovery().heartbeat("q", 1000, [])
    assert queue.idle() == "a", "same worker, another attempt"
    assert [verb for verb, _ in carried] == ["accept", "finish"]
    for verb, args in carried:
        with pytest.raises(LeaseLapsed):
            run(verb, *args)
    assert queue.inspector.counts().active == 1


def test_with_a_fence_an_earlier_attempt_of_the_same_worker_is_refused(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    first = queue.lease()
    queue.end_leases("a")
    second = queue.lease()
    assert first is not None
    assert second is not None
    for late in (queue.external.accept, queue.external.finish):
        with pytest.raises(LeaseLapsed):
            late("w1", "a", first.fence)
    queue.external.accept("w1", "a", second.fence)
    queue.external.finish("w1", "a", second.fence)


def test_a_repeated_finish_is_harmless_until_the_worker_has_another_job(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.work()
    queue.external.finish("w1", "a")
    queue.external.finish("w1", "a")
    with pytest.raises(LeaseLapsed):
        queue.fail("a")
    with pytest.raises(LeaseLapsed):
        queue.external.finish("w2", "a")
    assert queue.work() == "b"
    with pytest.raises(LeaseLapsed):
        queue.external.finish("w1", "a")
    assert [verb for verb, _ in queue.journal_events()].count("done") == 1


def test_a_repeated_failure_is_counted_once(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.work()
    queue.fail("a")
    queue.fail("a")
    assert queue.inspector.job("a")["retry_count"] == 1
    assert queue.states() == {"w1": "idle"}


def test_a_finish_without_an_accept_counts(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.idle()
    queue.external.finish("w1", "a")
    assert queue.traces() == {}
    assert queue.inspector.counts().done == 1


def test_a_failed_job_is_retried_after_the_backoff_and_then_dead(redis_url: str) -> None:
    with external_queue(redis_url, max_retries=2) as queue:
        queue.enqueue("a")
        for retries in range(3):
            queue.work()
            queue.fail("a")
            assert queue.traces() == {}
            if retries < 2:
                job = queue.inspector.job("a")
                assert (job["state"], job["retry_count"]) == ("scheduled", retries + 1)
                assert job["attempts"][-1]["error"]["name"] == "Oops"
                queue.make_due("scheduled", "a")
        assert queue.state().dead == ["a"]
        assert [verb for verb, _ in queue.journal_events()].count("retried") == 2
        assert last(queue, "dead").cause == "Oops"


def test_a_permanent_failure_is_dead_at_once_and_retry_at_is_kept(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.work()
    queue.fail("a", kind="permanent")
    queue.work()
    at_ms = (queue.redis.time()[0] + 1000) * 1000
    queue.fail("b", retry_at_ms=at_ms)
    assert queue.state().dead == ["a"]
    assert queue.inspector.job("b")["run_at"] == at_ms / 1000


def test_a_job_that_stalled_too_often_is_dead_and_the_next_one_is_assigned(redis_url: str) -> None:
    with external_queue(redis_url, max_stalls=1) as queue:
        queue.enqueue("a", "b")
        for _ in range(2):
            assert queue.work() == "a"
            queue.end_leases("a")
        assert queue.work() == "b"
        assert queue.state().dead == ["a"]
        assert last(queue, "dead").cause == "StallError"
        Replay().read_all(queue.entries())


def test_the_retry_lane_is_assigned_when_nothing_else_waits(redis_url: str) -> None:
    with external_queue(redis_url, max_retries=0, retry_lane_retries=1, min_backoff_ms=0) as queue:
        queue.enqueue("a")
        queue.work()
        queue.fail("a")
        queue.enqueue("b")
        queue.enqueue("c", priority=9)
        assert queue.inspector.job("a")["state"] == "retry"
        assert [queue.work(f"w{n}") for n in range(3)] == ["b", "c", "a"]
        queue.fail("a", "w2")
        assert queue.state().dead == ["a"]
        Replay().read_all(queue.entries())


@pytest.mark.spec("P15")
def test_silent_workers_are_forgotten(queue: ExternalQueue) -> None:
    queue.idle("w1")
    queue.idle("w2")
    queue.make_silent("w1")
    queue.promote()
    assert queue.states() == {"w2": "idle"}
    assert set(queue.hash("awaiters")) == {"w2"}
    queue.enqueue("a")
    assert queue.fetch_assigned("w1") is None
    assert queue.pending() == ["a"]
    assert queue.fetch_assigned("w2") == "a"


def test_a_new_job_notifies_the_longest_idle_worker(queue: ExternalQueue) -> None:
    queue.idle("w1", "b1")
    queue.idle("w2", "b1")
    subscribe(queue, "b1")
    queue.enqueue("a")
    assert notified(queue) == ["w1"]
    queue.enqueue("b")
    assert notified(queue) == ["w2"]
    assert queue.fetch_assigned("w1") == "a"
    assert queue.fetch_assigned("w2") == "b"


def test_a_worker_notified_in_vain_is_notified_again(queue: ExternalQueue) -> None:
    queue.idle("w1")
    subscribe(queue, "b1")
    queue.enqueue("a")
    queue.producer.cancel("a")
    assert queue.fetch_assigned() is None
    queue.enqueue("b")
    assert notified(queue) == ["w1", "w1"]


def test_a_notification_does_not_renew_the_registration(queue: ExternalQueue) -> None:
    queue.idle("w1")
    queue.redis.zadd(queue.key("workers"), {"w1": queue.redis.time()[0] * 1000 - 5000})
    seen = queue.redis.zscore(queue.key("workers"), "w1")
    expires = queue.hash("awaiters")["w1"]
    queue.fetch_assigned()
    assert queue.redis.zscore(queue.key("workers"), "w1") == seen
    assert queue.hash("awaiters")["w1"] == expires


def test_a_notification_for_a_busy_worker_does_nothing(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.work()
    assert queue.fetch_assigned() is None
    assert queue.states() == {"w1": "busy"}
    assert queue.stall_count("a") == 0


def test_a_notification_for_an_expired_worker_does_nothing(queue: ExternalQueue) -> None:
    queue.set_options(paused=1)
    queue.idle("w1")
    queue.enqueue("a")
    entry = queue.hash("awaiters")["w1"].split(" ", 1)[1]
    queue.redis.hset(queue.key("awaiters"), "w1", f"1 {entry}")
    queue.set_options(paused=0)
    assert queue.fetch_assigned() is None
    assert queue.fetch_assigned("stranger") is None
    assert queue.pending() == ["a"]


def test_returned_and_due_jobs_notify_a_worker(redis_url: str) -> None:
    with external_queue(redis_url, max_retries=0, retry_lane_retries=1, min_backoff_ms=0) as queue:
        queue.enqueue("a")
        queue.work("w1")
        queue.idle("w2")
        subscribe(queue, "b1")
        queue.end_leases("a")
        assert notified(queue) == ["w2"]
        assert queue.fetch_assigned("w2") == "a"
        queue.idle("w3")
        queue.fail("a", "w2")
        assert notified(queue) == ["w3"], "the retry lane notifies too"


def test_a_paused_queue_assigns_nothing_and_notifies_on_resume(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b", "c")
    queue.work("w2")
    queue.registry.pause("q", paused=True)
    assert queue.idle("w1") is None
    assert queue.idle("w3") is None
    queue.external.finish("w2", "a")
    subscribe(queue, "b1")
    queue.registry.pause("q", paused=False)
    assert set(notified(queue)) == {"w1", "w3"}
    assert queue.fetch_assigned("w1") == "b"


def test_a_bridge_that_leaves_unregisters_its_idle_workers(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.idle("assigned")
    queue.work("busy")
    queue.idle("idle")
    assert queue.external.leave("assigned", "b1")
    assert not queue.external.leave("idle", "b1")
    assert not queue.external.leave("busy", "b1")
    assert queue.states() == {"busy": "busy"}
    assert queue.pending() == ["a"]
    assert queue.stall_count("a") == 0
    queue.external.finish("busy", "b")


def test_a_removed_job_is_done_if_its_worker_finishes_and_cancelled_if_it_fails_or_goes_silent(
    queue: ExternalQueue,
) -> None:
    queue.enqueue("a", "b", "c")
    for worker in ("w1", "w2", "w3"):
        queue.work(worker)
    for job_id in "abc":
        assert queue.producer.remove(job_id)
    queue.external.finish("w1", "a")
    queue.fail("b", "w2")
    queue.end_leases("c")
    assert queue.state().jobs == set()
    assert queue.traces() == {}
    assert [event for event in queue.journal_events() if event[0] in ("done", "cancelled")] == [
        ("done", "a"),
        ("cancelled", "b"),
        ("cancelled", "c"),
    ]


def test_a_job_enqueued_under_a_running_id_follows_when_that_one_ends(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.work()
    queue.enqueue("a", if_exists="update")
    assert queue.idle("w2") is None
    queue.external.finish("w1", "a")
    assert queue.work("w2") == "a"


def test_a_job_with_an_invalid_record_is_dead_and_does_not_come_back(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.redis.hset(queue.key("jobs"), "a", "p5 17\nrubbish")
    assert queue.external.idle("w1", "b1").valid_ms == 0, "the worker has to send idle again"
    assert queue.idle() == "b"
    assert queue.state().dead == ["a"]


def test_an_active_id_without_a_record_is_removed_when_it_fails(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.work()
    queue.redis.hdel(queue.key("jobs"), "a")
    queue.fail("a")
    assert queue.traces() == {}


def test_a_worker_keeps_its_job_when_an_older_lease_of_it_lapses(queue: ExternalQueue) -> None:
    """More leases may have lapsed than one call checks."""
    queue.enqueue("a", "b")
    queue.work()
    queue.redis.delete(queue.key("awaiter:w1"))
    assert queue.idle() == "b"
    queue.end_leases("a")
    assert queue.states() == {"w1": "assigned"}
    assert queue.idle() == "b"


def test_a_deleted_queue_leaves_only_keys_that_expire(queue: ExternalQueue) -> None:
    queue.enqueue("a", "b")
    queue.work("w1")
    queue.external.progress("w1", "a", 0.5, "")
    queue.idle("w2")
    queue.registry.delete("q", force=True)
    for name in ("leases", "accepted", "progress", "workers", "awaiters", "awaiting"):
        assert not queue.redis.exists(queue.key(name)), name
    for key in queue.redis.keys(queue.key("awaiter:*")):
        assert queue.redis.pttl(key) > 0
    for call in (queue.external.accept, queue.external.finish):
        with pytest.raises(UnknownQueue):
            call("w1", "a")
    assert not queue.external.leave("w1", "b1")


def test_a_queue_of_another_mode_has_no_external_workers(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        queue.enqueue("a")
        external = ExternalJobs(queue.link, DEFAULT_PREFIX, "q")
        for call in (
            lambda: external.idle("w", "b"),
            lambda: external.accept("w", "a"),
            lambda: external.finish("w", "a"),
        ):
            with pytest.raises(WrongMode, match="of mode work"):
                call()


def test_jobs_held_by_external_workers_cannot_be_acknowledged_or_dequeued(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    lease = queue.lease()
    assert lease is not None
    leases = Leases(queue.link, DEFAULT_PREFIX, "q")
    with pytest.raises(WrongMode, match="of mode external"):
        leases.ack("w1", "a", lease.fence)
    with pytest.raises(WrongMode, match="of mode external"):
        leases.request("x", None, mode="on_request", register=False)


@pytest.mark.spec("P22")
def test_enqueue_and_assignment_cost_the_same_for_any_number_of_waiting_jobs(queue: ExternalQueue) -> None:
    def commands() -> int:
        stats = queue.redis.info("commandstats")
        return sum(
            entry["calls"] for name, entry in stats.items() if name not in ("cmdstat_info", "cmdstat_config|resetstat")
        )

    def cost() -> int:
        queue.redis.config_resetstat()
        queue.enqueue("one", if_exists="update", priority=0)
        assert queue.work() == "one"
        queue.external.finish("w1", "one")
        return commands()

    cost()
    few = cost()
    for n in range(20):
        queue.enqueue(*(f"{n}-{m}" for m in range(500)))
    assert cost() == few


def test_an_idle_worker_is_registered_for_a_lease(queue: ExternalQueue) -> None:
    assert queue.external.idle("w1", "b1").valid_ms == 600_000
    expires_ms = int(queue.hash("awaiters")["w1"].split(" ")[0])
    assert expires_ms > queue.redis.time()[0] * 1000 + 500_000


def test_the_progress_of_a_finished_job_is_gone(queue: ExternalQueue) -> None:
    queue.enqueue("a")
    queue.work()
    queue.external.progress("w1", "a", 1.0, "ready")
    queue.external.finish("w1", "a")
    assert queue.traces() == {}


def test_the_retry_lane_notifies_one_more_worker_with_each_call(redis_url: str) -> None:
    with external_queue(redis_url, max_retries=0, retry_lane_retries=1, min_backoff_ms=0) as queue:
        queue.enqueue("a")
        queue.work("w1")
        queue.idle("w2")
        queue.idle("w3")
        subscribe(queue, "b1")
        queue.fail("a")
        queue.promote()
        assert notified(queue) == ["w2", "w3"], "the first worker may have died"


def test_a_new_external_queue_is_published_to_supervisors(redis_url: str) -> None:
    with external_queue(redis_url) as queue:
        subscriber = queue.redis.pubsub(ignore_subscribe_messages=True)
        subscriber.psubscribe("*:due")
        subscriber.get_message(timeout=1)
        with external_queue(redis_url, name="other") as other:
            message = subscriber.get_message(timeout=1)
            assert message is not None
            assert (message["channel"].decode(), message["data"]) == (other.channel("due"), b"new")
