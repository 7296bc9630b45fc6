"""The clerk's awaiters on a real server. The test drives the loop and a fake clock."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from forq import Client
from forq.broker.link import Link
from forq.client import NewJob, new_job
from forq.errors import ForqError, RedisUnavailable, UnknownQueue, WrongMode
from forq.procs.loop import service_loop
from forq.services.rpc import PendingReply
from forq.services.waiting import Awaiters
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

PREFIX = "forq:"


class AwaiterRig:
    """Runs the clerk's loop step by step; `clock` seconds are added to the real time."""

    def __init__(self, url: str) -> None:
        self.clock = 0.0
        self.client = Client(url)
        self.queue = self.client.create_queue("q", mode="on_request")
        self.answers: dict[str, object] = {}
        self._loop = service_loop()
        self.link = Link(url, name="forq-clerk")
        self.awaiters = Awaiters(self.link, PREFIX, self._loop, now=self.now)

    def now(self) -> float:
        return time.monotonic() + self.clock

    def request(self, awaiter: str, wait: float | None = 60.0, **more: Any) -> Any:
        """Returns the immediate reply, or a PendingReply whose value is later stored in `answers`."""
        until = None if wait is None else self.now() + wait
        params = {"name": "q", "awaiter": awaiter, "id": None, "mode": "on_request", "until": until, "lease_ms": None}
        answer = self.awaiters.wait_for_item(params | more)
        if isinstance(answer, PendingReply):
            answer.bind(lambda value: self.answers.update({awaiter: value}))
        return answer

    def step(self, patience_seconds: float = 0.02) -> float | None:
        """Runs one pass of the clerk's loop; returns the seconds until something is due."""
        planned = self.awaiters.tick()
        self._loop.tick(patience_seconds if planned is None else min(patience_seconds, planned))
        return self.awaiters.tick()

    def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        def stepped() -> Any:
            self.step()
            return condition()

        return wait_until(stepped, seconds)

    def registered(self) -> set[str]:
        return {name.decode() for name in self.link.call("HKEYS", "forq:queue:{q}:awaiters")}


@pytest.fixture
def rig(redis_url: str) -> Iterator[AwaiterRig]:
    rig = AwaiterRig(redis_url)
    yield rig
    rig.awaiters._subscription.close()
    rig.client.close()
    rig.link.close()


@pytest.mark.spec("N21")
def test_an_available_item_is_returned_at_once(rig: AwaiterRig) -> None:
    job_id = rig.queue.enqueue({"n": 1}, identifier="one")
    answer = rig.request("w")
    assert {key: answer[key] for key in ("id", "identifier", "data", "awaiter", "lease_seconds")} == {
        "id": job_id,
        "identifier": "one",
        "data": {"n": 1},
        "awaiter": "w",
        "lease_seconds": 10.0,
    }
    assert (len(rig.awaiters), rig.queue.job(job_id)["fence"]) == (0, answer["fence"])


@pytest.mark.spec("N21")
def test_a_new_item_is_sent_to_one_awaiter_only(rig: AwaiterRig) -> None:
    assert isinstance(rig.request("first"), PendingReply)
    assert isinstance(rig.request("second"), PendingReply)
    rig.queue.enqueue(1, id="a")
    answer = rig.until(lambda: rig.answers)
    assert [(name, item["id"]) for name, item in answer.items()] == [("first", "a")]
    assert len(rig.awaiters) == 1


def test_one_clerk_serves_two_thousand_awaiters_of_different_items(rig: AwaiterRig) -> None:
    for number in range(2000):
        assert isinstance(rig.request(f"w{number}", id=f"item{number}"), PendingReply)
    rig.queue.enqueue_jobs([_named(f"item{number}") for number in range(2000)])
    rig.until(lambda: len(rig.answers) == 2000)
    assert all(item["id"] == f"item{name[1:]}" for name, item in _items(rig).items())
    assert rig.registered() == set()


def test_a_request_without_waiting_returns_an_item_or_nothing(rig: AwaiterRig) -> None:
    assert rig.request("w", wait=0) is None
    assert rig.registered() == set()
    rig.queue.enqueue(1, id="a")
    assert rig.request("w2", wait=0, lease_ms=500)["lease_seconds"] == 0.5


def test_an_awaiter_that_times_out_gets_nothing_and_is_unregistered(rig: AwaiterRig) -> None:
    rig.request("w", wait=30)
    assert rig.registered() == {"w"}
    rig.clock += 31
    rig.until(lambda: rig.answers == {"w": None})
    assert (rig.registered(), len(rig.awaiters)) == (set(), 0)
    rig.queue.enqueue(1, id="a")
    assert rig.queue.job("a")["state"] == "waiting"


def test_a_registration_is_renewed_after_half_its_lifetime(rig: AwaiterRig) -> None:
    rig.request("w", wait=None)
    patience_seconds = rig.awaiters.tick()
    assert patience_seconds is not None
    expires_ms = int(rig.link.call("HGET", "forq:queue:{q}:awaiters", "w").split()[0])
    left_ms = expires_ms - time.time() * 1000
    assert patience_seconds * 1000 == pytest.approx(left_ms / 2, abs=200)
    rig.clock += patience_seconds
    again_seconds = rig.step()
    assert again_seconds is not None
    assert int(rig.link.call("HGET", "forq:queue:{q}:awaiters", "w").split()[0]) >= expires_ms
    assert again_seconds * 1000 == pytest.approx(left_ms / 2, abs=200)


def test_an_awaiter_that_leaves_gets_nothing_and_its_item_goes_back(rig: AwaiterRig) -> None:
    rig.request("w")
    rig.queue.enqueue(1, id="a")
    held = rig.until(lambda: rig.answers.get("w"))
    assert (held["id"], rig.queue.job("a")["state"]) == ("a", "active")
    rig.awaiters.leave({"name": "q", "awaiter": "w"})
    assert rig.queue.job("a")["state"] == "waiting"
    rig.request("other", id="none")
    rig.awaiters.leave({"name": "q", "awaiter": "other"})
    assert (rig.answers["other"], rig.registered(), len(rig.awaiters)) == (None, set(), 0)


def test_messages_lost_during_a_disconnect_are_made_up_for_after_a_reconnect(rig: AwaiterRig) -> None:
    rig.request("w", wait=None)
    numbers = [
        line.split(b"id=")[1].split()[0]
        for line in rig.link.call("CLIENT", "LIST").splitlines()
        if b"name=forq-clerk-subscription" in line
    ]
    assert len(numbers) == 1
    assert rig.link.call("CLIENT", "KILL", "ID", numbers[0]) == 1
    rig.queue.enqueue(1, id="a")
    # The next renewal is due later than this.
    assert rig.until(lambda: rig.answers, seconds=3)["w"]["id"] == "a"


def test_awaiters_keep_waiting_while_redis_is_down(server: Server, rig: AwaiterRig) -> None:
    rig.request("w", wait=None)
    rig.request("short", wait=1.0)
    server.stop()
    with pytest.raises(RedisUnavailable):
        rig.request("impatient", wait=0)
    assert isinstance(rig.request("late", wait=None), PendingReply)
    rig.until(lambda: rig.answers == {"short": None})
    server.start()
    queue = rig.client.create_queue("q", mode="on_request")
    queue.enqueue_jobs([_named("a"), _named("b")])
    rig.until(lambda: len(rig.answers) == 3)
    assert sorted(item["id"] for name, item in _items(rig).items() if name != "short") == ["a", "b"]


def test_one_failed_call_stops_the_calls_of_all_awaiters_while_redis_is_down(
    server: Server, rig: AwaiterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        rig.request(f"w{number}", wait=None)
    server.stop()
    calls: list[object] = []

    def unreachable() -> NoReturn:
        calls.append(1)
        raise RedisUnavailable("away")

    monkeypatch.setattr(rig.link, "_ready_connection", unreachable)
    monkeypatch.setattr(rig.awaiters._subscription, "connect", unreachable)
    rig.clock += 6
    for _ in range(5):
        rig.step(0.001)
    assert len(calls) == 1
    assert len(rig.awaiters) == 50


def test_a_missing_queue_or_a_queue_of_another_mode_is_an_error(rig: AwaiterRig) -> None:
    rig.client.create_queue("works")
    for name, error in (("works", WrongMode), ("none", UnknownQueue)):
        with pytest.raises(error):
            rig.request("w", name=name)
    assert len(rig.awaiters) == 0


def test_an_awaiter_of_a_deleted_queue_gets_an_error(rig: AwaiterRig) -> None:
    rig.request("w", wait=None)
    rig.link.call("DEL", "forq:queue:{q}:options", "forq:queue:{q}:summary")
    rig.clock += 6
    answer = rig.until(lambda: rig.answers.get("w"))
    assert isinstance(answer, UnknownQueue)


def test_an_error_of_one_awaiter_does_not_affect_the_others(rig: AwaiterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.request("broken", id="a")
    rig.request("fine", id="b")
    broken = rig.awaiters._awaiters["broken"]
    monkeypatch.setattr(broken.leases, "request", lambda *_, **__: 1 / 0)
    rig.queue.enqueue(1, id="a")
    rig.queue.enqueue(1, id="b")
    rig.until(lambda: len(rig.answers) == 2)
    assert isinstance(rig.answers["broken"], ForqError)
    assert _items(rig)["fine"]["id"] == "b"


def _named(job_id: str) -> NewJob:
    return new_job(job_id, id=job_id)


def _items(rig: AwaiterRig) -> dict[str, Any]:
    return rig.answers
