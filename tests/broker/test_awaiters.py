"""Who stands in which line, who is rung, what a try skips: crowds, the dead, those who come late or leave."""

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
def asked(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "on_request", item_timeout_ms=HOUR_MS) as queue:
        yield queue


def now_ms(queue: ReleaseQueue) -> int:
    seconds, micros = queue.redis.time()
    return int(seconds * 1000 + micros // 1000)


def test_a_crowd_of_dead_awaiters_is_no_try_and_does_not_hide_the_one_that_lives(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    _crowd(queue, 1500)
    queue.ask("alive")
    assert not queue.attempt().leased
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
    assert queue.inspector.job("a")["retry_count"] == 0
    assert queue.release().leased, "the gate was not used"
    assert queue.got("alive") == "a"


def test_a_crowd_of_dead_awaiters_keeps_an_item_of_the_lane_in_its_lane(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    for _ in range(3):
        queue.attempt()
    _crowd(queue, 1500)
    queue.ask("alive")
    assert not queue.attempt("retry").leased
    assert queue.inspector.counts().retry == 1
    assert queue.attempt("retry").leased


def _crowd(queue: ReleaseQueue, size: int) -> None:
    """They came first, and died."""
    names = [f"dead{number}" for number in range(size)]
    queue.ask("first")
    queue.leases.leave("first")
    queue.redis.hset(queue.key("awaiters"), mapping=dict.fromkeys(names, "1 1 - "))
    queue.redis.zadd(queue.key("awaiting"), {f" 1 {name}": 0 for name in names})


def test_stale_hints_of_a_high_priority_do_not_let_a_low_one_pass(redis_url: str) -> None:
    with gate(redis_url, "on_request") as queue:
        ids = [f"gone{number}" for number in range(1100)]
        queue.enqueue(*ids, "high", priority=0)
        queue.enqueue("low")
        for job_id in ids:
            queue.producer.cancel(job_id)
        answer = queue.leases.request("x", None, mode="on_request", register=True)
        assert answer == LeaseReply(None, 0), "to be repeated at once"
        assert queue.got("x") == "high"


def test_more_stale_hints_than_one_try_skips_do_not_end_the_tries(queue: ReleaseQueue) -> None:
    ids = [f"gone{number}" for number in range(1100)]
    queue.enqueue(*ids, "a")
    for job_id in ids:
        queue.producer.cancel(job_id)
    queue.ask("x")
    assert not queue.attempt().leased
    assert queue.pending() != [], "who blocks on it is woken"
    assert queue.release().leased, "the gate was not used"


@pytest.mark.parametrize("name", ["", "a b", "a:1", "a\n", "ä"])
def test_names_of_awaiters_that_would_be_misread_are_refused(queue: ReleaseQueue, name: str) -> None:
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


def test_with_nothing_in_line_a_child_blocks_although_the_gate_is_closed(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    assert queue.attempt().wait_seconds == 60
    assert queue.release().wait_seconds == 0


def test_an_awaiter_that_has_acknowledged_its_item_gets_no_other(queue: ReleaseQueue) -> None:
    """A question that was under way when the answer to an earlier one came."""
    queue.enqueue("a", "b")
    queue.ask("x")
    queue.attempt()
    queue.ack("x", queue.ask("x"))
    with pytest.raises(LeaseLapsed):
        queue.ask("x")
    assert not queue.attempt().leased


def test_who_was_rung_too_late_is_not_rung_for_ever(asked: ReleaseQueue) -> None:
    asked.ask("x")
    asked.enqueue("a")
    assert asked.list_of("x") == [""]
    assert asked.got("faster") == "a"
    assert asked.got("x") is None
    assert asked.list_of("x") == [], "it would ask again and again"


def test_whoever_asks_and_finds_that_a_lease_has_lapsed_rings_who_awaits_the_item(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.ask("dead")
    asked.ask("y", "a")
    asked.make_due("leases", "a")
    asked.ask("z", "another")
    assert asked.list_of("y") == [""]


def test_who_leaves_after_it_was_rung_leaves_the_item_to_the_next_one_who_awaits_it(asked: ReleaseQueue) -> None:
    asked.ask("x", "a"), asked.ask("y", "a")
    asked.enqueue("a")
    assert [asked.list_of(name) for name in "xy"] == [[""], []]
    asked.leases.leave("x")
    assert asked.list_of("y") == [""]


def test_who_leaves_does_not_give_back_what_another_has(queue: ReleaseQueue) -> None:
    """The queue was deleted and made again, and the item enqueued again."""
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


@pytest.mark.parametrize("what", ["holding", "rung"])
def test_who_leaves_leaves_no_list_behind(asked: ReleaseQueue, what: str) -> None:
    if what == "holding":
        asked.enqueue("a")
    asked.ask("x")
    if what == "rung":
        asked.enqueue("a")
    assert len(asked.list_of("x")) == 1
    asked.leases.leave("x")
    assert asked.redis.exists(asked.key("awaiter:x")) == 0


def test_who_renews_too_late_stands_behind_the_others(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("late"), queue.ask("y")
    queue.let_expire("late")
    queue.ask("late")
    queue.attempt()
    assert queue.state().active == {"a": "y"}


def test_who_awaits_another_item_now_stands_in_one_line_and_behind_the_others(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x", "b"), queue.ask("y"), queue.ask("x")
    assert queue.redis.zcard(queue.key("awaiting")) == 2
    queue.attempt(), queue.attempt()
    assert queue.state().active == {"a": "y", "b": "x"}


def test_who_stands_in_a_line_by_mistake_is_taken_out_of_it_and_keeps_its_own_place(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x", "b")
    queue.redis.zadd(queue.key("awaiting"), {"a 1 x": 0, "a 2 nobody": 0})
    assert not queue.attempt().leased
    assert queue.redis.zcard(queue.key("awaiting")) == 1
    assert queue.attempt().leased
    assert queue.state().active == {"b": "x"}


def test_hints_that_were_taken_are_not_counted_any_more(queue: ReleaseQueue) -> None:
    queue.enqueue("a", priority=7)
    assert queue.pending() == [""], "a token wakes who blocks"
    queue.ask("x")
    assert queue.attempt().leased
    assert queue.hash("counts")["other_hints"] == "0"
    assert queue.inspector.counts().dropped == 0, "a token is no item"


def test_an_item_whose_record_is_gone_is_dropped_and_counted(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.redis.hdel(queue.key("jobs"), "a")
    queue.ask("x")
    assert queue.attempt().leased
    assert queue.state().active == {"b": "x"}
    assert queue.inspector.counts().dropped == 1
    assert queue.journal_events()[-2:] == [("dropped", "a"), ("claimed", "b")]


def test_a_hint_too_many_does_not_hand_an_item_to_two(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.ask("x"), queue.ask("y")
    queue.attempt()
    queue.redis.lpush(queue.key("pending"), "a")
    queue.attempt()
    assert queue.state().active == {"a": "x", "b": "y"}


def test_a_clerk_hears_that_its_awaiter_is_rung(asked: ReleaseQueue) -> None:
    heard = asked.redis.pubsub(ignore_subscribe_messages=True)
    heard.subscribe(asked.channel("handed:clerk1"))
    heard.get_message(timeout=1)
    asked.ask("x", via="clerk1")
    asked.enqueue("a")
    message = heard.get_message(timeout=5)
    heard.close()
    assert message is not None
    assert message["data"] == b"x"
    assert asked.list_of("x") == [], "nobody reads it"


def test_a_dead_awaiter_does_not_hold_up_a_resume(asked: ReleaseQueue) -> None:
    asked.enqueue("a")
    asked.registry.pause("q", paused=True)
    asked.ask("dead"), asked.ask("y")
    asked.let_expire("dead")
    asked.registry.pause("q", paused=False)
    assert asked.list_of("y") == [""]
    assert asked.list_of("dead") == []
