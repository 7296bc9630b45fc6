"""Awaiters: their order, which one is notified, and dead, late or leaving awaiters."""

from collections.abc import Iterator

import pytest

from forq.broker.leases import LeaseReply
from forq.errors import InvalidId, LeaseLapsed
from tests.support.drive.one_queue import State
from tests.support.drive.release_queue import OPTIONS, ReleaseQueue, gate

HOUR_MS = 3_600_000


@pytest.fixture
def queue(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "auto_release") as queue:
        yield queue


@pytest.fixture
def on_request(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "on_request", item_timeout_ms=HOUR_MS) as queue:
        yield queue


def now_ms(queue: ReleaseQueue) -> int:
    seconds, micros = queue.redis.time()
    return int(seconds * 1000 + micros // 1000)


def test_many_dead_awaiters_count_as_no_try_and_do_not_hide_a_live_one(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    _add_dead_awaiters(queue, 1500)
    queue.ask("alive")
    assert not queue.attempt().leased
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
    assert queue.inspector.job("a")["retry_count"] == 0
    assert queue.release().leased, "the first call did not use the gate"
    assert queue.got("alive") == "a"


def test_many_dead_awaiters_leave_an_item_of_the_retry_lane_there(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    for _ in range(3):
        queue.attempt()
    _add_dead_awaiters(queue, 1500)
    queue.ask("alive")
    assert not queue.attempt("retry").leased
    assert queue.inspector.counts().retry == 1
    assert queue.attempt("retry").leased


def _add_dead_awaiters(queue: ReleaseQueue, size: int) -> None:
    """Adds awaiters that arrived first and have died."""
    names = [f"dead{number}" for number in range(size)]
    queue.ask("first")
    queue.leases.leave("first")
    queue.redis.hset(queue.key("awaiters"), mapping=dict.fromkeys(names, "1 1 - "))
    queue.redis.zadd(queue.key("awaiting"), {f" 1 {name}": 0 for name in names})


def test_stale_hints_of_a_high_priority_do_not_let_a_lower_priority_overtake(redis_url: str) -> None:
    with gate(redis_url, "on_request") as queue:
        ids = [f"gone{number}" for number in range(1100)]
        queue.enqueue(*ids, "high", priority=0)
        queue.enqueue("low")
        for job_id in ids:
            queue.producer.cancel(job_id)
        answer = queue.leases.request("x", None, mode="on_request", register=True)
        assert answer == LeaseReply(None, 0), "the caller repeats at once"
        assert queue.got("x") == "high"


def test_more_stale_hints_than_one_try_skips_do_not_block_later_tries(queue: ReleaseQueue) -> None:
    ids = [f"gone{number}" for number in range(1100)]
    queue.enqueue(*ids, "a")
    for job_id in ids:
        queue.producer.cancel(job_id)
    queue.ask("x")
    assert not queue.attempt().leased
    assert queue.pending() != [], "a blocked worker is woken"
    assert queue.release().leased, "the first call did not use the gate"


@pytest.mark.parametrize("name", ["", "a b", "a:1", "a\n", "ä"])
def test_ambiguous_awaiter_names_are_refused(queue: ReleaseQueue, name: str) -> None:
    with pytest.raises(InvalidId):
        queue.ask(name)
    with pytest.raises(InvalidId):
        queue.ask("x", via=name)


def test_ten_thousand_awaiters_are_served_one_by_one(queue: ReleaseQueue) -> None:
    queue.ask("first")
    expires_ms = now_ms(queue) + HOUR_MS
    names = [f"n{number:05}" for number in range(10_000)]
    arrival = 2_000_000_000_000_000
    queue.redis.hset(queue.key("awaiters"), mapping=dict.fromkeys(names, f"{expires_ms} {arrival} - "))
    queue.redis.zadd(queue.key("awaiting"), {f" {arrival} {name}": 0 for name in names})
    queue.enqueue("a", "b")
    queue.attempt(), queue.attempt()
    assert queue.state().active == {"a": "first", "b": "n00000"}


def test_without_awaiters_a_child_blocks_even_if_the_gate_is_closed(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    assert queue.attempt().wait_seconds == 60
    assert queue.release().wait_seconds == 0


def test_an_awaiter_that_has_acknowledged_its_item_gets_no_second_one(queue: ReleaseQueue) -> None:
    """A request may still be in flight when the reply to an earlier one arrives."""
    queue.enqueue("a", "b")
    queue.ask("x")
    queue.attempt()
    queue.ack("x", queue.ask("x"))
    with pytest.raises(LeaseLapsed):
        queue.ask("x")
    assert not queue.attempt().leased


def test_an_awaiter_that_came_too_late_for_its_item_stays_registered_without_a_notification(
    on_request: ReleaseQueue,
) -> None:
    on_request.ask("x")
    on_request.enqueue("a")
    assert on_request.list_of("x") == [""]
    assert on_request.got("faster") == "a"
    assert on_request.got("x") is None
    assert on_request.list_of("x") == [], "it would request again and again"


def test_a_request_that_finds_a_lapsed_lease_notifies_an_awaiter_of_the_item(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.ask("dead")
    on_request.ask("y", "a")
    on_request.make_due("leases", "a")
    on_request.ask("z", "another")
    assert on_request.list_of("y") == [""]


def test_when_a_notified_awaiter_leaves_the_next_one_is_notified(on_request: ReleaseQueue) -> None:
    on_request.ask("x", "a"), on_request.ask("y", "a")
    on_request.enqueue("a")
    assert [on_request.list_of(name) for name in "xy"] == [[""], []]
    on_request.leases.leave("x")
    assert on_request.list_of("y") == [""]


def test_an_awaiter_that_leaves_does_not_return_an_item_of_another(queue: ReleaseQueue) -> None:
    """The queue was deleted and created again, and the item enqueued again."""
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    queue.registry.delete("q", force=True)
    assert not queue.registry.purge("q", lambda dropped: None)
    queue.create(**OPTIONS)
    queue.enqueue("a")
    queue.ask("y")
    queue.open_gate()
    assert queue.release(processor="p2").leased
    assert not queue.leases.leave("x")
    assert queue.state().active == {"a": "y"}
    assert queue.redis.zscore(queue.key("leases"), "a") is not None


@pytest.mark.parametrize("what", ["holding", "notified"])
def test_an_awaiter_that_leaves_leaves_no_list_behind(on_request: ReleaseQueue, what: str) -> None:
    if what == "holding":
        on_request.enqueue("a")
    on_request.ask("x")
    if what == "notified":
        on_request.enqueue("a")
    assert len(on_request.list_of("x")) == 1
    on_request.leases.leave("x")
    assert on_request.redis.exists(on_request.key("awaiter:x")) == 0


def test_an_awaiter_that_renews_too_late_goes_to_the_back(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("late"), queue.ask("y")
    queue.let_expire("late")
    queue.ask("late")
    queue.attempt()
    assert queue.state().active == {"a": "y"}


def test_an_awaiter_that_switches_items_is_registered_once_and_goes_to_the_back(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x", "b"), queue.ask("y"), queue.ask("x")
    assert queue.redis.zcard(queue.key("awaiting")) == 2
    queue.attempt(), queue.attempt()
    assert queue.state().active == {"a": "y", "b": "x"}


def test_a_wrong_registration_is_removed_and_the_awaiter_keeps_its_own_place(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x", "b")
    queue.redis.zadd(queue.key("awaiting"), {"a 1 x": 0, "a 2 nobody": 0})
    assert not queue.attempt().leased
    assert queue.redis.zcard(queue.key("awaiting")) == 1
    assert queue.attempt().leased
    assert queue.state().active == {"b": "x"}


def test_taken_hints_are_no_longer_counted(queue: ReleaseQueue) -> None:
    queue.enqueue("a", priority=7)
    assert queue.pending() == [""], "a token wakes a blocked worker"
    queue.ask("x")
    assert queue.attempt().leased
    assert queue.summary().other_hints == 0
    assert queue.inspector.counts().dropped == 0, "a token is not an item"


def test_an_item_whose_record_is_gone_is_dropped_and_counted(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.redis.hdel(queue.key("jobs"), "a")
    queue.ask("x")
    assert queue.attempt().leased
    assert queue.state().active == {"b": "x"}
    assert queue.inspector.counts().dropped == 1
    assert queue.journal_events()[-2:] == [("dropped", "a"), ("claimed", "b")]


def test_a_duplicate_hint_does_not_lease_an_item_twice(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x"), queue.ask("y")
    queue.attempt()
    queue.redis.lpush(queue.key("pending"), "a")
    queue.attempt()
    assert queue.state().active == {"a": "x", "b": "y"}


def test_the_clerk_receives_the_notification_of_its_awaiter(on_request: ReleaseQueue) -> None:
    subscriber = on_request.redis.pubsub(ignore_subscribe_messages=True)
    subscriber.subscribe(on_request.channel("handed:clerk1"))
    subscriber.get_message(timeout=1)
    on_request.ask("x", via="clerk1")
    on_request.enqueue("a")
    message = subscriber.get_message(timeout=5)
    subscriber.close()
    assert message is not None
    assert message["data"] == b"x"
    assert on_request.list_of("x") == [], "a list that nobody reads"


def test_a_dead_awaiter_does_not_block_the_others_on_resume(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    on_request.registry.pause("q", paused=True)
    on_request.ask("dead"), on_request.ask("y")
    on_request.let_expire("dead")
    on_request.registry.pause("q", paused=False)
    assert on_request.list_of("y") == [""]
    assert on_request.list_of("dead") == []
