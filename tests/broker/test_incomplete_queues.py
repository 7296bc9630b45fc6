"""Queues left half created or half deleted are reported after a while, not before."""

import pytest

from forq.broker.keys import DEFAULT_PREFIX, registry_key
from forq.services import pulse
from forq.services.pulse import ABANDONED_SECONDS, IncompleteQueues
from tests.support.drive.one_queue import OneQueue


def enter(queue: OneQueue, name: str, entry: str) -> None:
    queue.link.call("HSET", registry_key(DEFAULT_PREFIX), name, entry)


def test_an_incomplete_queue_is_reported_after_a_while_and_until_it_is_repaired(queue: OneQueue) -> None:
    found = IncompleteQueues(queue.registry)
    enter(queue, "half", "work")
    enter(queue, "marked", "deleting 7")
    assert found.find(100.0) == []
    assert found.find(100.0 + ABANDONED_SECONDS - 1) == []
    for now in (100.0 + ABANDONED_SECONDS, 200.0):
        assert sorted(found.find(now)) == ["half", "marked"]
    for name in ("half", "marked"):
        while queue.registry.repair(name, lambda lines: None):
            pass
    assert found.find(300.0) == []
    assert queue.registry.names() == {"q": "work"}


def test_the_time_starts_again_after_the_queue_was_complete(queue: OneQueue) -> None:
    found = IncompleteQueues(queue.registry)
    enter(queue, "half", "work")
    found.find(0.0)
    queue.link.call("HSET", "forq:queue:{half}:options", "epoch", 1)
    found.find(20.0)
    queue.link.call("DEL", "forq:queue:{half}:options")
    assert found.find(40.0) == []
    assert found.find(40.0 + ABANDONED_SECONDS) == ["half"]


def test_many_queues_are_checked_in_slices(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        enter(queue, f"half-{number}", "work")
    found = IncompleteQueues(queue.registry)
    monkeypatch.setattr(pulse, "QUEUES_PER_CHECK", 3)
    for now in (0.0, 10.0, 20.0, 30.0):
        found.find(now)
    assert sorted(found.find(90.0)) == [f"half-{number}" for number in range(7)]
