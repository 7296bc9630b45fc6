"""Calls that reach a queue after it was deleted create no keys."""

import pytest

from forq.broker.scripts import NO_QUEUE, script
from forq.errors import UnknownQueue
from tests.support.drive.one_queue import OneQueue


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("collect", ("p1", 1000, 10, 1000)),
        ("configure", ("max_retries", 1)),
        ("discard", ("a@1",)),
        ("revive", ("a@1",)),
    ],
)
def test_the_script_reports_an_unknown_queue(queue: OneQueue, verb: str, arguments: tuple[object, ...]) -> None:
    queue.registry.delete(queue.name, force=True)
    queue.redis.rpush(queue.key("outbox"), "line")
    before = sorted(queue.redis.keys("*"))
    assert queue.link.run(script(verb), queue.base, *arguments)[0] == NO_QUEUE
    assert sorted(queue.redis.keys("*")) == before


def test_options_of_a_deleted_queue_cannot_be_set(queue: OneQueue) -> None:
    queue.registry.delete(queue.name, force=True)
    with pytest.raises(UnknownQueue):
        queue.registry.configure(queue.name, {"max_retries": 1}, {})
