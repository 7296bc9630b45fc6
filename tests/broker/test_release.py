"""release, await and ack in mode auto_release: one try per interval, for the first awaiter of the item."""

from collections.abc import Iterator

import pytest

from forq.errors import Fenced, LeaseLapsed, UnknownQueue, WrongMode
from tests.support.drive.one_queue import State
from tests.support.drive.release_queue import ReleaseQueue, gate


@pytest.fixture
def queue(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "auto_release") as queue:
        yield queue


@pytest.mark.spec("N13")
def test_one_item_is_tried_per_interval_for_any_number_of_callers(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x"), queue.ask("y")
    first = queue.release(processor="p1")
    assert first.leased
    assert first.wait_seconds == 60
    for processor in ("p1", "p2"):
        again = queue.release(processor=processor)
        assert not again.leased
        assert 59 < again.wait_seconds <= 60
    assert queue.state().active == {"a": "x"}
    assert queue.attempt().leased
    assert queue.state().active == {"a": "x", "b": "y"}


@pytest.mark.spec("N14")
def test_an_awaiter_of_the_id_comes_before_awaiters_of_any_item(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("any"), queue.ask("wants-b", "b"), queue.ask("wants-a", "a")
    queue.attempt(), queue.attempt()
    assert queue.got("wants-a", "a") == "a"
    assert queue.got("wants-b", "b") == "b"
    assert queue.got("any") is None


def test_the_first_of_several_awaiters_gets_the_item_even_after_a_renewal(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("first"), queue.ask("second"), queue.ask("first")
    queue.attempt()
    assert queue.got("second") is None
    assert queue.got("first") == "a"


def test_one_awaiter_gets_one_item(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x")
    assert queue.attempt().leased
    assert not queue.attempt().leased
    assert queue.state().active == {"a": "x"}


def test_ids_with_a_common_prefix_are_distinct(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x", "a!"), queue.ask("y", "aa")
    assert not queue.attempt().leased
    queue.ask("z", "a")
    assert queue.attempt().leased
    assert queue.state().active == {"a": "z"}


def test_an_awaiter_that_did_not_renew_gets_nothing_and_is_forgotten(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("dead"), queue.ask("alive")
    queue.let_expire("dead")
    assert queue.attempt().leased
    assert queue.state().active == {"a": "alive"}
    assert queue.hash("awaiters") == {}
    assert queue.redis.zcard(queue.key("awaiting")) == 0


@pytest.mark.spec("N15", "N16", "N17")
def test_an_item_without_awaiters_is_retried_then_moved_to_the_retry_lane_then_dead(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    for _ in range(3):
        assert queue.attempt() is not None
    assert queue.inspector.job("a")["state"] == "retry"
    queue.attempt()
    assert queue.inspector.job("a")["retry_count"] == 3, "the main lane no longer tries it"
    queue.attempt("retry")
    assert queue.state() == State(jobs=set(), dead=["a"])
    assert queue.inspector.job("a")["error"]["name"] == "NotAwaited"
    assert queue.journal_events() == [
        ("enqueued", "a"),
        *[("claimed", "a"), ("retried", "a")] * 3,
        *[("claimed", "a"), ("dead", "a")],
    ]
    assert [event.attempt for event in queue.events() if event.verb == "claimed"] == [1, 2, 3, 4]
    assert queue.redis.llen(queue.key("outbox")) == 1


@pytest.mark.spec("N15")
def test_an_item_without_awaiters_waits_for_its_interval_behind_the_others(redis_url: str) -> None:
    with gate(redis_url, "auto_release", retry_interval_ms=60_000) as queue:
        queue.enqueue("a", "b")
        queue.attempt()
        assert queue.inspector.job("a")["state"] == "scheduled"
        queue.ask("x")
        assert queue.attempt().leased
        assert queue.state().active == {"b": "x"}
        assert queue.attempt().wait_seconds == 0, "no item is ready"
        queue.make_due("scheduled", "a")
        queue.ask("y")
        assert queue.attempt().leased
        assert queue.state().active == {"a": "y", "b": "x"}


@pytest.mark.spec("N17", "N18")
def test_the_retry_lane_tries_only_while_nothing_waits(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    for _ in range(3):
        queue.attempt()
    queue.enqueue("b")
    assert queue.attempt("retry").wait_seconds == 0
    assert queue.inspector.job("a")["retry_count"] == 3
    queue.ask("x", "b")
    assert queue.attempt().leased
    queue.ask("y", "a")
    assert queue.attempt("retry").leased
    assert queue.got("y", "a") == "a"


def test_the_retry_process_is_woken_when_no_item_waits(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    for _ in range(3):
        queue.attempt()
    assert queue.state().retry_tokens == 1


def test_an_item_is_removed_only_when_it_is_acknowledged(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    lease = queue.ask("x")
    assert lease is not None
    assert lease.record.data == {"n": "a"}
    assert queue.ask("x") == lease, "after a lost reply the same call returns the same item"
    assert queue.inspector.job("a")["state"] == "active"
    queue.ack("x", lease)
    assert queue.state() == State(jobs=set())
    queue.ack("x", lease)
    assert queue.inspector.counts().done == 1
    assert queue.journal_events() == [("enqueued", "a"), ("claimed", "a"), ("released", "a")]
    assert [(event.actor, event.fence) for event in queue.events()][-1] == ("x", lease.fence)


def test_an_item_not_acknowledged_in_time_goes_back_to_the_front_uncounted(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b", "c")
    queue.ask("x"), queue.ask("y")
    queue.attempt(), queue.attempt()
    lease = queue.ask("x")
    queue.make_due("leases", "a", "b")
    queue.promote()
    assert queue.state() == State(jobs={"a", "b", "c"}, waiting={5: ["a", "b", "c"]})
    assert queue.inspector.job("a")["retry_count"] == 0
    with pytest.raises(LeaseLapsed):
        queue.ack("x", lease)
    assert queue.ask("x") is None, "it waits again"
    assert queue.attempt().leased
    assert queue.got("x") == "a"


@pytest.mark.parametrize("by", ["release", "await", "heartbeat"])
def test_every_call_that_checks_leases_lets_them_lapse(queue: ReleaseQueue, by: str) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    queue.make_due("leases", "a")
    if by == "release":
        queue.release()
    elif by == "await":
        queue.ask("y", "other")
    else:
        queue.recovery().heartbeat("q", 15_000, [])
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_an_ack_under_another_fence_or_name_is_refused(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    lease = queue.ask("x")
    assert lease is not None
    for awaiter, fence in (("x", lease.fence + 1), ("y", lease.fence), ("", lease.fence)):
        with pytest.raises(LeaseLapsed):
            queue.leases.ack(awaiter, "a", fence)
    assert queue.state().active == {"a": "x"}


def test_an_awaiter_that_leaves_returns_its_item(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x")
    queue.attempt()
    assert queue.leases.leave("x")
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
    assert queue.redis.exists(queue.key("leases")) == 0
    assert not queue.leases.leave("x")
    queue.ask("y")
    assert not queue.leases.leave("y")
    assert not queue.attempt().leased


def test_an_item_removed_while_leased_does_not_come_back(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    assert queue.producer.remove("a")
    queue.make_due("leases", "a")
    queue.promote()
    assert queue.state() == State(jobs=set())
    assert queue.journal_events()[-1] == ("cancelled", "a")


def test_an_item_removed_while_leased_can_still_be_acknowledged(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    lease = queue.ask("x")
    assert queue.producer.remove("a")
    queue.ack("x", lease)
    assert queue.journal_events()[-2:] == [("marked", "a"), ("released", "a")]


def test_an_enqueue_behind_a_leased_item_becomes_a_separate_item_after_the_ack(
    queue: ReleaseQueue,
) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    queue.enqueue("a", if_exists="update")
    assert queue.inspector.counts().blocked == 1
    queue.ack("x", queue.ask("x"))
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
    assert queue.journal_events()[-2:] == [("released", "a"), ("unblocked", "a")]


def test_items_of_a_higher_priority_are_released_first(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.enqueue("b", priority=1)
    queue.ask("x")
    queue.attempt()
    assert queue.got("x") == "b"


def test_a_paused_queue_releases_nothing(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.registry.pause("q", paused=True)
    assert queue.attempt().paused
    queue.registry.pause("q", paused=False)
    assert queue.attempt().leased


def test_an_item_moved_to_a_blocked_worker_goes_back_before_its_try(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.release()
    worker = queue.workers[0]
    assert worker.block() == "b"
    queue.ask("x"), queue.ask("y")
    queue.attempt(), queue.attempt()
    assert queue.state().active == {"a": "y", "b": "x"}
    assert worker.held() == []


def test_unregistered_workers_are_fenced(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.release()
    queue.recover(queue.workers[0])
    with pytest.raises(Fenced):
        queue.release()


def test_every_caller_of_a_deleted_queue_gets_an_error(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x"), queue.ask("y")
    queue.attempt()
    lease = queue.ask("x")
    queue.registry.delete("q", force=True)
    with pytest.raises(UnknownQueue):
        queue.release()
    with pytest.raises(UnknownQueue):
        queue.ask("y")
    with pytest.raises(UnknownQueue):
        queue.ack("x", lease)
    assert not queue.leases.leave("x")
    assert queue.list_of("y") == [""], "it is notified and need not wait until it renews"


def test_a_request_with_the_wrong_mode_is_refused(queue: ReleaseQueue) -> None:
    with pytest.raises(WrongMode, match="auto_release"):
        queue.leases.request("x", None, mode="on_request", register=True)


def test_awaiters_leave_no_keys_behind(queue: ReleaseQueue) -> None:
    queue.ask("x", "never")
    for name in ("awaiters", "awaiting"):
        assert 0 < queue.redis.pttl(queue.key(name)) <= 20_000
    queue.enqueue("a")
    queue.ask("y")
    queue.attempt()
    assert 0 < queue.redis.pttl(queue.key("awaiter:y")) <= 600_000
    queue.ack("y", queue.ask("y"))
    assert 0 < queue.redis.pttl(queue.key("awaiter:y")) <= 60_000
    assert queue.redis.exists(queue.key("leases")) == 0


def test_dead_awaiters_of_missing_items_are_removed_by_later_awaiters(queue: ReleaseQueue) -> None:
    for number in range(100):
        queue.ask(f"dead{number}", f"never{number}")
        queue.let_expire(f"dead{number}")
    for _ in range(2000):
        queue.ask("alive", "never")
        if len(queue.hash("awaiters")) == 1:
            break
    assert set(queue.hash("awaiters")) == {"alive"}
    assert queue.redis.zcard(queue.key("awaiting")) == 1


def test_the_clerk_receives_notifications_of_its_awaiters(queue: ReleaseQueue) -> None:
    subscriber = queue.redis.pubsub(ignore_subscribe_messages=True)
    subscriber.psubscribe("forq:queue:*:handed:clerk1")
    subscriber.get_message(timeout=1)
    queue.enqueue("a")
    queue.ask("x", via="clerk1")
    queue.attempt()
    message = subscriber.get_message(timeout=5)
    assert message is not None
    assert message["data"] == b"x"
    subscriber.close()


def test_the_first_lease_of_a_queue_is_published_to_pulse(queue: ReleaseQueue) -> None:
    subscriber = queue.redis.pubsub(ignore_subscribe_messages=True)
    subscriber.subscribe(queue.channel("due"))
    subscriber.get_message(timeout=1)
    queue.enqueue("a", "b")
    queue.ask("x"), queue.ask("y")
    queue.attempt(), queue.attempt()
    assert subscriber.get_message(timeout=5)["data"] == b"600000"
    assert subscriber.get_message(timeout=0.05) is None
    due_ms = queue.promote()
    assert due_ms is not None
    assert 590_000 < due_ms <= 600_000
    subscriber.close()


def test_the_claims_of_one_call_have_the_same_fence(redis_url: str) -> None:
    """An expired item and one released by the same call; the audit identifies an entry by its fence."""
    with gate(redis_url, "auto_release", item_timeout_ms=60_000) as queue:
        queue.enqueue("a", "b")
        queue.ask("x", "b")
        queue.make_due("expiries", "a")
        assert queue.attempt().leased
        fences = [event.fence for event in queue.events() if event.verb == "claimed"]
        assert len(fences) == 2
        assert len(set(fences)) == 1
