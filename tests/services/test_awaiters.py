"""Awaiters of the clerk: the real class and a real server, with a fake clock and a loop that the test drives."""

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
    """The clerk's loop, a step at a time; `clock` is added to the real time."""

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

    def ask(self, awaiter: str, wait: float | None = 60.0, **more: Any) -> Any:
        """What the verb answers at once; else the answer will be in `answers`."""
        until = None if wait is None else self.now() + wait
        params = {"name": "q", "awaiter": awaiter, "id": None, "mode": "on_request", "until": until, "lease_ms": None}
        answer = self.awaiters.wait_for_item(params | more)
        if isinstance(answer, PendingReply):
            answer.bind(lambda value: self.answers.update({awaiter: value}))
        return answer

    def step(self, patience_seconds: float = 0.02) -> float | None:
        """As the clerk's loop does it; how long nothing is due then."""
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
def test_what_is_there_is_answered_at_once(rig: AwaiterRig) -> None:
    job_id = rig.queue.enqueue({"n": 1}, identifier="one")
    answer = rig.ask("w")
    assert {key: answer[key] for key in ("id", "identifier", "data", "awaiter", "lease_seconds")} == {
        "id": job_id,
        "identifier": "one",
        "data": {"n": 1},
        "awaiter": "w",
        "lease_seconds": 10.0,
    }
    assert (len(rig.awaiters), rig.queue.job(job_id)["fence"]) == (0, answer["fence"])


@pytest.mark.spec("N21")
def test_one_who_waits_is_answered_when_there_is_an_item_and_nobody_else_is(rig: AwaiterRig) -> None:
    assert isinstance(rig.ask("first"), PendingReply)
    assert isinstance(rig.ask("second"), PendingReply)
    rig.queue.enqueue(1, id="a")
    answer = rig.until(lambda: rig.answers)
    assert [(name, item["id"]) for name, item in answer.items()] == [("first", "a")]
    assert len(rig.awaiters) == 1


def test_two_thousand_await_their_own_items_through_one_clerk(rig: AwaiterRig) -> None:
    for number in range(2000):
        assert isinstance(rig.ask(f"w{number}", id=f"item{number}"), PendingReply)
    rig.queue.enqueue_jobs([_named(f"item{number}") for number in range(2000)])
    rig.until(lambda: len(rig.answers) == 2000)
    assert all(item["id"] == f"item{name[1:]}" for name, item in _items(rig).items())
    assert rig.registered() == set()


def test_one_who_does_not_wait_gets_what_is_there_or_nothing(rig: AwaiterRig) -> None:
    assert rig.ask("w", wait=0) is None
    assert rig.registered() == set()
    rig.queue.enqueue(1, id="a")
    assert rig.ask("w2", wait=0, lease_ms=500)["lease_seconds"] == 0.5


def test_when_time_is_up_the_awaiter_is_forgotten_and_gets_nothing(rig: AwaiterRig) -> None:
    rig.ask("w", wait=30)
    assert rig.registered() == {"w"}
    rig.clock += 31
    rig.until(lambda: rig.answers == {"w": None})
    assert (rig.registered(), len(rig.awaiters)) == (set(), 0)
    rig.queue.enqueue(1, id="a")
    assert rig.queue.job("a")["state"] == "waiting"


def test_a_registration_is_renewed_in_half_the_time_that_it_is_valid(rig: AwaiterRig) -> None:
    rig.ask("w", wait=None)
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


def test_one_that_leaves_is_answered_with_nothing_and_its_item_goes_back(rig: AwaiterRig) -> None:
    rig.ask("w")
    rig.queue.enqueue(1, id="a")
    held = rig.until(lambda: rig.answers.get("w"))
    assert (held["id"], rig.queue.job("a")["state"]) == ("a", "active")
    rig.awaiters.leave({"name": "q", "awaiter": "w"})
    assert rig.queue.job("a")["state"] == "waiting"
    rig.ask("other", id="none")
    rig.awaiters.leave({"name": "q", "awaiter": "other"})
    assert (rig.answers["other"], rig.registered(), len(rig.awaiters)) == (None, set(), 0)


def test_what_was_published_while_nobody_heard_it_is_found_after_a_reconnect(rig: AwaiterRig) -> None:
    rig.ask("w", wait=None)
    numbers = [
        line.split(b"id=")[1].split()[0]
        for line in rig.link.call("CLIENT", "LIST").splitlines()
        if b"name=forq-clerk-subscription" in line
    ]
    assert len(numbers) == 1
    assert rig.link.call("CLIENT", "KILL", "ID", numbers[0]) == 1
    rig.queue.enqueue(1, id="a")
    # Its next renewal would come later.
    assert rig.until(lambda: rig.answers, seconds=3)["w"]["id"] == "a"


def test_awaiters_wait_on_while_redis_is_away(server: Server, rig: AwaiterRig) -> None:
    rig.ask("w", wait=None)
    rig.ask("short", wait=1.0)
    server.stop()
    with pytest.raises(RedisUnavailable):
        rig.ask("impatient", wait=0)
    assert isinstance(rig.ask("late", wait=None), PendingReply)
    rig.until(lambda: rig.answers == {"short": None})
    server.start()
    queue = rig.client.create_queue("q", mode="on_request")
    queue.enqueue_jobs([_named("a"), _named("b")])
    rig.until(lambda: len(rig.answers) == 3)
    assert sorted(item["id"] for name, item in _items(rig).items() if name != "short") == ["a", "b"]


def test_one_failure_is_enough_to_know_that_redis_is_away(
    server: Server, rig: AwaiterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        rig.ask(f"w{number}", wait=None)
    server.stop()
    calls: list[object] = []

    def unreachable() -> NoReturn:
        calls.append(1)
        raise RedisUnavailable("away")

    monkeypatch.setattr(rig.link, "_ready", unreachable)
    monkeypatch.setattr(rig.awaiters._subscription, "connect", unreachable)
    rig.clock += 6
    for _ in range(5):
        rig.step(0.001)
    assert len(calls) == 1
    assert len(rig.awaiters) == 50


def test_a_queue_of_another_mode_or_none_at_all_is_an_error(rig: AwaiterRig) -> None:
    rig.client.create_queue("works")
    for name, error in (("works", WrongMode), ("none", UnknownQueue)):
        with pytest.raises(error):
            rig.ask("w", name=name)
    assert len(rig.awaiters) == 0


def test_one_whose_queue_is_deleted_meanwhile_is_told_so(rig: AwaiterRig) -> None:
    rig.ask("w", wait=None)
    rig.link.call("DEL", "forq:queue:{q}:options")
    rig.clock += 6
    answer = rig.until(lambda: rig.answers.get("w"))
    assert isinstance(answer, UnknownQueue)


def test_a_fault_of_one_is_not_the_fault_of_all(rig: AwaiterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ask("broken", id="a")
    rig.ask("fine", id="b")
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
