"""await, ack and unawait in mode on_request; item_timeout."""

from collections.abc import Iterator

import pytest

from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from tests.support.drive.one_queue import State
from tests.support.drive.release_queue import ReleaseQueue, gate


@pytest.fixture
def queue(redis_url: str) -> Iterator[ReleaseQueue]:
    with gate(redis_url, "on_request") as queue:
        yield queue


@pytest.mark.spec("N21")
def test_items_are_leased_on_request_in_queue_order(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    queue.enqueue("c", priority=0)
    assert [queue.got(name) for name in "xyz"] == ["c", "a", "b"]
    assert queue.got("w") is None


@pytest.mark.spec("N21")
def test_an_item_can_be_requested_by_its_id(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b", "c")
    assert queue.got("x", "b") == "b"
    assert queue.got("y", "b") is None, "it is leased"
    assert [queue.got(name) for name in "zuv"] == ["a", "c", None]
    queue.ack("x", queue.ask("x", "b"))
    assert queue.state().jobs == {"a", "c"}


def test_an_item_taken_by_its_id_and_enqueued_again_is_last(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b", "c")
    queue.ack("x", queue.ask("x", "b"))
    queue.enqueue("b")
    assert [queue.got(name) for name in "yzuv"] == ["a", "c", "b", None]


def test_an_item_before_its_time_cannot_be_leased(queue: ReleaseQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", run_in=60)], Update())
    assert queue.got("x", "a") is None
    assert queue.got("y") is None
    queue.make_due("scheduled", "a")
    assert queue.got("x", "a") == "a"


@pytest.mark.spec("N23")
def test_items_do_not_fail_without_requests(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    for _ in range(50):
        queue.recovery().heartbeat("q", 15_000, [])
        queue.promote()
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
    assert queue.state().tokens == 0


def test_one_awaiter_is_notified_per_new_item(queue: ReleaseQueue) -> None:
    for name in ("x", "y", "z"):
        assert queue.got(name) is None
    queue.enqueue("a", "b")
    assert [queue.list_of(name) for name in "xyz"] == [[""], [""], []]
    assert queue.got("x") == "a"
    assert queue.got("y") == "b"
    assert queue.got("z") is None


def test_an_awaiter_of_one_item_is_not_notified_of_others(queue: ReleaseQueue) -> None:
    queue.ask("x", "b")
    queue.enqueue("a")
    assert queue.list_of("x") == []
    queue.enqueue("b")
    assert queue.list_of("x") == [""]
    assert queue.got("x", "b") == "b"


def test_an_awaiter_notified_too_late_keeps_its_place(queue: ReleaseQueue) -> None:
    queue.ask("x"), queue.ask("y")
    queue.enqueue("a")
    assert queue.got("faster") == "a"
    assert queue.got("x") is None
    queue.enqueue("b")
    assert queue.list_of("x") == [""]
    assert queue.list_of("y") == []


def test_each_call_notifies_one_more_awaiter_while_items_wait(queue: ReleaseQueue) -> None:
    queue.ask("dies"), queue.ask("y")
    queue.enqueue("a")
    assert queue.list_of("dies") == [""]
    queue.recovery().heartbeat("q", 15_000, [])
    assert queue.list_of("y") == [""]
    assert queue.got("y") == "a"


@pytest.mark.parametrize("what", ["lapsed", "left", "promoted", "unblocked", "revived", "resumed"])
def test_every_way_to_make_an_item_ready_notifies_its_awaiter(queue: ReleaseQueue, what: str) -> None:
    queue.enqueue("a")
    lease = queue.ask("x", "a")
    if what == "promoted":
        queue.ack("x", lease)
        queue.producer.enqueue([new_job(1, id="a", run_in=60)], Update())
    elif what == "unblocked":
        queue.enqueue("a", if_exists="update")
    elif what == "revived":
        queue.ack("x", lease)
        _bury(queue, "a")
    elif what == "resumed":
        queue.leases.leave("x")
        queue.registry.pause("q", paused=True)
    queue.ask("y", "a")
    queue.ask("z")
    assert queue.list_of("y") == queue.list_of("z") == []
    if what == "lapsed":
        queue.make_due("leases", "a")
        queue.promote()
    elif what == "left":
        queue.leases.leave("x")
    elif what == "promoted":
        queue.make_due("scheduled", "a")
        queue.promote()
    elif what == "unblocked":
        queue.ack("x", lease)
    elif what == "revived":
        member = queue.redis.zrange(queue.key("dead"), 0, -1)[0].decode()
        _dead(queue).retry(member)
    else:
        queue.registry.pause("q", paused=False)
    assert queue.list_of("y") == [""]
    assert queue.got("y", "a") == "a"


def test_a_paused_queue_leases_nothing(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.registry.pause("q", paused=True)
    assert queue.got("x") is None
    queue.registry.pause("q", paused=False)
    assert queue.list_of("x") == [""]
    assert queue.got("x") == "a"


def test_a_custom_lease_time_applies_to_that_item(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    lease = queue.ask("x", lease_ms=1234)
    assert lease is not None
    assert lease.lease_ms == 1234
    assert 0 < queue.redis.pttl(queue.key("awaiter:x")) <= 1234


def test_a_request_without_waiting_is_not_registered(queue: ReleaseQueue) -> None:
    assert queue.ask("x") is None
    assert queue.ask("x", register=False) is None
    queue.enqueue("a")
    assert queue.list_of("x") == []
    assert queue.hash("awaiters") == {}


def test_a_cancelled_item_cannot_be_leased(queue: ReleaseQueue) -> None:
    queue.enqueue("a", "b")
    assert queue.producer.cancel("a")
    assert queue.got("x", "a") is None
    assert queue.got("y") == "b"


@pytest.mark.spec("N22")
def test_an_expired_item_is_dead_and_in_the_failed_log(redis_url: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=60_000) as queue:
        queue.enqueue("a", "b", "c", "d")
        lease = queue.ask("x", "b")
        due_ms = queue.promote()
        assert due_ms is not None
        assert 59_000 < due_ms <= 60_000
        queue.make_due("expiries", "a", "b", "c")
        queue.promote()
        state = queue.state()
        assert (state.jobs, state.active, state.dead) == ({"b", "d"}, {"b": "x"}, ["a", "c"])
        assert [queue.got(name) for name in ("y", "z")] == ["d", None]
        queue.leases.leave("y")
        error = queue.inspector.job("a")["error"]
        assert (error["name"], error["kind"]) == ("ItemTimeout", "permanent")
        assert "60.0 s" in error["message"] or "60 s" in error["message"]
        assert queue.redis.llen(queue.key("outbox")) == 2
        ends = [("claimed", "a"), ("claimed", "c"), ("dead", "a"), ("dead", "c")]
        assert [event for event in queue.journal_events() if event[1] in ("a", "c")][2:] == ends
        queue.ack("x", lease)
        assert queue.state().jobs == {"d"}
        assert queue.redis.zrange(queue.key("expiries"), 0, -1) == [b"d"]


def test_an_item_that_expired_while_leased_is_dead_when_it_comes_back(redis_url: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=60_000) as queue:
        queue.enqueue("a")
        queue.ask("x")
        queue.make_due("expiries", "a")
        queue.promote()
        assert queue.state().active == {"a": "x"}
        queue.make_due("expiries", "a")
        queue.make_due("leases", "a")
        queue.promote()
        assert queue.state() == State(jobs=set(), dead=["a"])


def test_the_age_of_an_item_counts_from_its_run_at(redis_url: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=60_000) as queue:
        now_ms = queue.redis.time()[0] * 1000
        queue.producer.enqueue([new_job(1, id="a", run_in=1000)], Update())
        queue.enqueue("b")
        scores = dict(queue.redis.zrange(queue.key("expiries"), 0, -1, withscores=True))
        assert 1_059_000 <= scores[b"a"] - now_ms <= 1_062_000
        assert 59_000 <= scores[b"b"] - now_ms <= 62_000
        queue.producer.enqueue([new_job(1, id="b", run_in=500)], Update())
        assert 559_000 <= queue.redis.zscore(queue.key("expiries"), "b") - now_ms <= 562_000


@pytest.mark.parametrize("how", ["cancel", "ack", "expire"])
def test_a_removed_item_has_no_expiry(redis_url: str, how: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=60_000) as queue:
        queue.enqueue("a")
        if how == "cancel":
            queue.producer.cancel("a")
        elif how == "ack":
            queue.ack("x", queue.ask("x"))
        else:
            queue.make_due("expiries", "a")
            queue.promote()
        assert queue.redis.exists(queue.key("expiries")) == 0


@pytest.mark.parametrize("how", ["unblocked", "revived"])
def test_an_item_enqueued_again_has_a_new_expiry(redis_url: str, how: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=60_000) as queue:
        queue.enqueue("a")
        if how == "unblocked":
            lease = queue.ask("x")
            queue.enqueue("a", if_exists="update")
            queue.ack("x", lease)
        else:
            _bury(queue, "a", exists=True)
            _dead(queue).retry("a")
        assert queue.redis.zscore(queue.key("expiries"), "a") is not None


def _dead(queue: ReleaseQueue) -> DeadJobs:
    return DeadJobs(queue.link, DEFAULT_PREFIX, "q")


def _bury(queue: ReleaseQueue, job_id: str, *, exists: bool = False) -> None:
    """Makes the item dead by its age."""
    if not exists:
        queue.enqueue(job_id)
    queue.redis.zadd(queue.key("expiries"), {job_id: 1})
    queue.promote()
    assert job_id in queue.state().dead
