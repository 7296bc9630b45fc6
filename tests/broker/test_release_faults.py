"""Faults in the release modes: clock jumps, lost replies, deleted queues, unusual ids, a full server."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from forq import release_wait
from forq.broker.enqueue import Update, new_job
from forq.broker.leases import LeaseReply, Leases
from forq.broker.link import Link
from forq.broker.scripts import NO_QUEUE, script
from forq.errors import BackPressure, LeaseLapsed, OutcomeUnknown
from tests.support.drive.one_queue import State
from tests.support.drive.release_queue import ReleaseQueue, gate
from tests.support.drive.server import Server
from tests.support.models.journal_replay import Replay

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


def test_a_clock_set_back_closes_the_gate_for_at_most_one_interval(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.redis.hset(queue.key("counts"), "gate_us", (now_ms(queue) + 24 * HOUR_MS) * 1000)
    first = queue.release()
    assert not first.leased
    assert 59 < first.wait_seconds <= 60
    opens_us = int(queue.hash("counts")["gate_us"])
    assert opens_us <= (now_ms(queue) + 60_001) * 1000, "the next call would wait just as long"
    assert queue.release().wait_seconds <= 60
    assert int(queue.hash("counts")["gate_us"]) == opens_us


def test_a_late_lapse_does_not_take_the_newer_item_of_its_awaiter(on_request: ReleaseQueue) -> None:
    """More leases lapse at once than one call checks, so an awaiter that requests again still owns its old item."""
    on_request.enqueue("old", "new")
    assert on_request.got("x", "old") == "old"
    on_request.redis.delete(on_request.key("awaiter:x"))
    assert on_request.got("x", "new") == "new"
    on_request.make_due("leases", "old")
    on_request.promote()
    assert on_request.state().active == {"new": "x"}
    lease = on_request.ask("x", "new")
    assert lease is not None
    assert lease.job_id == "new"
    on_request.ack("x", lease)


def test_a_queue_deleted_and_created_again_leases_nothing_twice(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    lease = queue.ask("x")
    queue.registry.delete("q", force=True)
    assert not queue.registry.purge("q", lambda dropped: None), "everything was written"
    queue.create()
    assert queue.ask("x") is None, "the item went with the queue"
    with pytest.raises(LeaseLapsed):
        queue.ack("x", lease)
    queue.enqueue("a")
    with pytest.raises(LeaseLapsed):
        queue.ack("x", lease)
    assert queue.state().jobs == {"a"}


def test_an_acknowledgement_can_be_repeated_after_its_awaiter_has_left(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    lease = queue.ask("x")
    queue.ack("x", lease)
    assert not queue.leases.leave("x")
    queue.ack("x", lease)
    assert queue.inspector.counts().done == 1


def test_redis_remembers_an_acknowledgement_longer_than_it_is_repeated(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    queue.ack("x", queue.ask("x"))
    known_ms = queue.redis.pttl(queue.key("awaiter:x"))
    assert (release_wait.ACK_RETRY_SECONDS + queue.link.timeout_seconds + 5) * 1000 < known_ms


ODD = ["[", "(", ":", "!", "~", "a:1", "1:2:removed", "a@1", "%d", "\\", '"', "-", "+inf", "a!", "a", "5:a"]


@pytest.mark.parametrize("mode", ["auto_release", "on_request"])
def test_every_allowed_id_is_leased_to_its_awaiter(redis_url: str, mode: str) -> None:
    with gate(redis_url, mode, item_timeout_ms=HOUR_MS) as queue:
        for number, job_id in enumerate(ODD):
            queue.ask(f"x{number}", job_id)
        queue.enqueue(*ODD)
        for _ in ODD:
            if mode == "auto_release":
                assert queue.attempt().leased
        assert [queue.got(f"x{number}", job_id) for number, job_id in enumerate(ODD)] == ODD
        for number, job_id in enumerate(ODD):
            if number % 2:
                queue.ack(f"x{number}", queue.ask(f"x{number}", job_id))
            else:
                assert queue.leases.leave(f"x{number}")
        assert queue.state().jobs == set(ODD[::2])
        queue.make_due("expiries", *ODD[::2])
        queue.promote()
        assert sorted(queue.state().dead) == sorted(ODD[::2])
        replay = Replay().read_all(queue.entries())
        assert (replay.ready, replay.active) == ({}, {})


def test_awaiters_keep_waiting_while_redis_is_out_of_memory(server: Server, redis_url: str) -> None:
    with gate(redis_url, "on_request") as queue:
        queue.enqueue("a")
        lease = queue.ask("x", "a")
        queue.redis.config_set("maxmemory", 1)
        with pytest.raises(BackPressure):
            queue.leases.wait("y", 0.01)
        began = time.monotonic()
        assert release_wait.get_release(queue.leases, None, mode="on_request", wait_seconds=0.3) is None
        assert time.monotonic() - began >= 0.3
        queue.ack("x", lease)


class LossyLeases(Leases):
    """Every call runs twice, because the first reply is lost."""

    def __init__(self, link: Link, prefix: str, queue: str) -> None:
        super().__init__(link, prefix, queue)
        self.lost: list[str] = []

    def _lose_first_reply(self, name: str, *args: Any, **how: Any) -> Any:
        answer = getattr(super(), name)(*args, **how)
        if len(self.lost) % 2 == 0:
            self.lost.append(name)
            raise OutcomeUnknown("the reply was lost")
        self.lost.append("")
        return answer

    def request(self, *args: Any, **how: Any) -> LeaseReply:
        answer: LeaseReply = self._lose_first_reply("request", *args, **how)
        return answer

    def ack(self, *args: Any, **how: Any) -> None:
        self._lose_first_reply("ack", *args, **how)


@pytest.mark.fault("reply lost")
def test_a_client_that_loses_every_first_reply_gets_each_item_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_wait, "RETRY_PAUSE_SECONDS", 0.0)
    with gate(redis_url, "on_request") as queue:
        queue.enqueue("a", "b")
        deaf = LossyLeases(queue.link, "forq:", "q")
        got = [release_wait.get_release(deaf, None, mode="on_request", wait_seconds=0) for _ in range(3)]
        assert [item and item.id for item in got] == ["a", "b", None]
        assert queue.state() == State(jobs=set())
        assert queue.inspector.counts().done == 2
        assert {"request", "ack"} <= set(deaf.lost)


def test_a_blocking_read_leaves_the_list_and_its_expiry_unchanged(on_request: ReleaseQueue) -> None:
    on_request.ask("x")
    on_request.enqueue("a")
    on_request.leases.wait("x", 1)
    assert on_request.list_of("x") == [""]
    assert 0 < on_request.redis.pttl(on_request.key("awaiter:x")) <= 10_000


@pytest.mark.fault("zombie")
def test_a_frozen_awaiter_cannot_acknowledge_its_item_after_another_got_it(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("frozen")
    queue.attempt()
    old = queue.ask("frozen")
    queue.make_due("leases", "a")
    queue.ask("other")
    queue.attempt()
    new = queue.ask("other")
    with pytest.raises(LeaseLapsed):
        queue.ack("frozen", old)
    assert not queue.leases.leave("frozen")
    assert queue.state().active == {"a": "other"}
    assert old is not None
    assert new is not None
    assert new.fence > old.fence
    queue.ack("other", new)


def test_a_lapsed_item_of_the_retry_lane_goes_back_there_uncounted(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    for _ in range(3):
        queue.attempt()
    queue.ask("x")
    assert queue.attempt("retry").leased
    assert queue.inspector.counts().retry == 0
    queue.make_due("leases", "a")
    queue.promote()
    assert queue.inspector.counts().retry == 1
    assert queue.inspector.job("a")["retry_count"] == 3
    queue.ask("y")
    assert queue.attempt("retry").leased


def test_an_item_updated_while_leased_comes_back_with_the_new_data(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.attempt()
    queue.ask("x")
    queue.attempt()
    queue.producer.enqueue([new_job("new", id="a", priority=1)], Update())
    queue.leases.leave("x")
    job = queue.inspector.job("a")
    assert (job["data"], job["priority"], job["retry_count"]) == ("new", 1, 0)
    assert queue.state().waiting == {1: ["a"]}


def test_a_fence_ahead_of_the_clock_gives_no_negative_duration(on_request: ReleaseQueue) -> None:
    on_request.change_summary(fence=(now_ms(on_request) + HOUR_MS) * 1000)
    on_request.enqueue("a")
    on_request.ack("x", on_request.ask("x"))
    assert [event.micros for event in on_request.events() if event.verb == "released"] == [0]


@pytest.mark.parametrize("verb", ["await", "ack", "unawait", "promote"])
def test_every_call_about_a_deleted_queue_fails_and_leaves_nothing_behind(on_request: ReleaseQueue, verb: str) -> None:
    on_request.registry.delete("q", force=True)
    before = sorted(on_request.redis.keys())
    arguments = {"await": ("x", "", "on_request", "", 1, "-"), "ack": ("x", "a", 1), "unawait": ("x",), "promote": ()}
    assert on_request.link.run(script(verb), on_request.base, *arguments[verb]) == [NO_QUEUE]
    assert sorted(on_request.redis.keys()) == before


def test_a_lapsed_lease_is_removed(queue: ReleaseQueue) -> None:
    queue.enqueue("a")
    queue.ask("x")
    queue.attempt()
    queue.make_due("leases", "a")
    assert queue.promote() is None
    assert queue.redis.exists(queue.key("leases")) == 0


def test_a_lease_without_an_owner_is_removed(queue: ReleaseQueue) -> None:
    queue.redis.zadd(queue.key("leases"), {"gone": 1})
    assert queue.promote() is None


def test_a_removed_item_is_returned_again_after_a_lost_reply(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a")
    lease = on_request.ask("x")
    on_request.producer.remove("a")
    assert on_request.ask("x") == lease


def test_a_queue_created_again_has_no_leases_and_no_awaiters(on_request: ReleaseQueue) -> None:
    on_request.enqueue("a", "b")
    on_request.ask("x", "a")
    on_request.ask("y", "another")
    on_request.registry.delete("q", force=True)
    left = [key.decode().removeprefix(f"{on_request.base}:") for key in on_request.redis.keys(f"{on_request.base}:*")]
    assert not {"awaiters", "awaiting", "leases", "expiries"} & set(left)
