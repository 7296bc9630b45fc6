"""A server that is out of memory or has lost its scripts, and invalid records."""

from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from forq.broker.recovery import Position
from forq.broker.registry import Dropped
from forq.errors import BackPressure, RedisUnavailable
from tests.support.drive.one_queue import OneQueue, State

GARBAGE = (
    b"",
    b"x",
    b"\xff\xfe\x00",
    b"p",
    b"pX 12\n[]",
    b"p5 1\n{",
    b"c5 1 2\n[null,null,1]",
    b"p5 1\n" + b"[" * 5000,
)


@pytest.fixture
def full(queue: OneQueue) -> Iterator[OneQueue]:
    """A queue with a to d, of which w1 runs a and b, on a server that is out of memory."""
    queue.enqueue("a", "b", "c", "d")
    queue.worker().turn(want=2)
    queue.redis.config_set("maxmemory", 1)
    yield queue
    queue.redis.config_set("maxmemory", 0)


@pytest.mark.fault("server out of memory")
def test_a_full_server_refuses_new_jobs_and_stores_nothing(full: OneQueue) -> None:
    before = full.state()
    with pytest.raises(BackPressure):
        full.enqueue("e")
    assert full.state() == before


@pytest.mark.fault("server out of memory")
@pytest.mark.parametrize("forgotten", [False, True])
def test_on_a_full_server_work_continues(full: OneQueue, forgotten: bool) -> None:
    if forgotten:
        full.redis.function_flush()
    [worker] = full.workers
    assert worker.turn(done="a", failed="b", want=1) == ["c"]
    full.recovery("p1").heartbeat(full.name, 1000, [Position("w1", worker.number, 0, True)])
    full.recover(worker, 0, running=True)
    assert full.state() == State(jobs={"c", "d"}, waiting={5: ["c", "d"]}, dead=["b"])
    other = full.worker("w2")
    assert other.turn(want=2) == ["c", "d"]
    assert full.rescue(other, 0) == 1
    assert full.producer.cancel("d") is True
    assert full.inspector.counts().active == 1
    full.registry.pause(full.name, paused=True)
    assert full.recovery().evict(full.name, "p1", "supervisor_lost") == 1
    assert full.registry.delete(full.name, force=True) == 2


@pytest.mark.fault("server out of memory")
def test_on_a_full_server_blmove_is_refused_but_waiting_for_a_wake_works(full: OneQueue) -> None:
    [worker] = full.workers
    with pytest.raises(BackPressure):
        worker.consumer.wait_for_job()
    full.registry.pause(full.name, paused=True)
    full.registry.pause(full.name, paused=False)
    worker.consumer.wait_for_wake()


@pytest.mark.fault("scripts forgotten")
def test_scripts_are_loaded_again_after_the_server_lost_them(queue: OneQueue) -> None:
    worker = queue.worker()
    steps: tuple[Callable[[], bool], ...] = (
        lambda: queue.enqueue("a") == ["a"],
        lambda: worker.turn(want=1) == ["a"],
        lambda: queue.recovery().heartbeat(queue.name, 1000, []).evicted == [],
        lambda: queue.recover(worker) == 1,
        lambda: queue.producer.cancel("a"),
        lambda: queue.inspector.counts().waiting == 0,
    )
    for step in steps:
        queue.redis.function_flush()
        assert step()


@pytest.mark.one_server  # in a cluster the call goes through the link of a node, not through this one
@pytest.mark.fault("scripts forgotten")
def test_a_script_lost_right_after_loading_is_reported_as_not_run(
    queue: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = queue.link._call

    def forgetful(command: tuple[Any, ...]) -> Any:
        queue.redis.function_flush()
        return call(command)

    monkeypatch.setattr(queue.link, "_call", forgetful)
    with pytest.raises(RedisUnavailable, match="lacks a function"):
        queue.enqueue("a")
    monkeypatch.undo()
    assert queue.state() == State(jobs=set())
    assert queue.enqueue("a") == ["a"]


@pytest.mark.fault("payload corrupt, truncated or nested")
@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_invalid_record_is_claimed_so_that_it_can_fail(queue: OneQueue, garbage: bytes) -> None:
    queue.enqueue("a", "b")
    queue.redis.hset(queue.key("jobs"), "a", garbage)
    worker = queue.worker()
    assert worker.turn(want=2) == ["a", "b"]
    worker.turn(failed="a", keep=1)
    assert queue.state() == State(jobs={"b"}, active={"b": "w1"}, processing={"w1": ["b"]}, dead=["a"])
    assert queue.inspector.job("a")["state"] == "dead"
    assert [job["id"] for job in queue.inspector.jobs("dead").jobs] == ["a"]


@pytest.mark.fault("payload corrupt, truncated or nested")
@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_invalid_record_is_recovered_from_a_dead_worker(queue: OneQueue, garbage: bytes) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.redis.hset(queue.key("jobs"), "a", garbage)
    queue.recover(worker, 0, running=True)
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
    assert queue.worker("w2").turn(want=2) == ["a", "b"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_invalid_record_can_be_shown_counted_and_cancelled(queue: OneQueue, garbage: bytes) -> None:
    # If the priority cannot be read, the hint may be in any list.
    queue.enqueue("a", priority=5 if garbage[1:3] == b"5 " else 3)
    queue.enqueue("b")
    queue.redis.hset(queue.key("jobs"), "a", garbage)
    assert queue.inspector.counts().waiting == 2
    assert queue.inspector.job("a")["state"] == "waiting"
    assert [job["id"] for job in queue.inspector.jobs().jobs] == ["a", "b"]
    assert queue.producer.cancel("a") is True
    worker = queue.worker()
    assert worker.turn(want=9) == ["b"]
    worker.turn(done="b")
    queue.enqueue("a")
    assert worker.turn(want=9) == ["a"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_invalid_record_does_not_stop_the_purge(queue: OneQueue, garbage: bytes) -> None:
    queue.enqueue("a")
    queue.redis.hset(queue.key("jobs"), "a", garbage)
    queue.redis.hset(queue.key("dead:jobs"), "b@1", garbage)
    queue.redis.zadd(queue.key("dead"), {"b@1": 1})
    queue.registry.delete(queue.name, force=True)
    logged: list[Dropped] = []
    queue.registry.purge(queue.name, logged.extend)
    assert {job["id"] for job in logged} == {"a", "b"}
    assert orjson.dumps(logged)
    assert queue.registry.names() == {}


def test_a_hint_that_is_not_an_id_is_dropped_and_the_journal_stays_readable(queue: OneQueue) -> None:
    queue.redis.rpush(queue.key("pending"), b"\xff\n x", b"two words", b"plain")
    queue.enqueue("a")
    assert queue.worker().turn(want=9) == ["a"]
    assert queue.inspector.counts().dropped == 3
    assert [job for verb, job in queue.journal_events() if verb == "dropped"] == ["?", "?", "plain"]
