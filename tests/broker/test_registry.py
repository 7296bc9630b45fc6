"""The registry: create, delete, purge and pause queues."""

from typing import Any

import pytest
from redis.exceptions import ResponseError

from forq.broker.enqueue import new_job
from forq.broker.keys import DEFAULT_PREFIX, deleted_queues_key, registry_key
from forq.broker.link import Link
from forq.broker.registry import Dropped, Registry
from forq.broker.scripts import script
from forq.errors import (
    IncompatibleProtocol,
    InvalidName,
    QueueExists,
    QueueFull,
    QueueNotEmpty,
    RedisUnavailable,
    TooManyQueues,
    UnknownQueue,
)
from forq.settings import stored_defaults
from tests.support.drive.one_queue import OneQueue, State, one_queue


def create(registry: Registry, name: str, mode: str = "work", max_queues: int = 3) -> bool:
    return registry.create(name, mode, max_queues, stored_defaults(), {})


def create_gate(registry: Registry, name: str = "gate", mode: str = "auto_release", **options: int) -> bool:
    return registry.create(name, mode, 9, stored_defaults(mode), options)


def purge(queue: OneQueue) -> list[Dropped]:
    logged: list[Dropped] = []
    while queue.registry.purge(queue.name, logged.extend):
        pass
    return logged


@pytest.mark.spec("N1", "N10")
def test_queues_are_created_on_demand_and_are_independent(redis_url: str) -> None:
    with one_queue(redis_url, "one") as one, one_queue(redis_url, "two") as two:
        one.enqueue("a")
        two.enqueue("a", "b")
        assert two.worker().turn(want=1) == ["a"]
        assert one.state() == State(jobs={"a"}, waiting={5: ["a"]})
        assert one.registry.names() == {"one": "work", "two": "work"}


@pytest.mark.spec("N2")
def test_a_queue_beyond_max_queues_is_refused_and_leaves_no_keys(redis_url: str) -> None:
    registry = Registry(Link(redis_url), DEFAULT_PREFIX)
    for name in ("a", "b", "c"):
        assert create(registry, name) is True
    with pytest.raises(TooManyQueues, match="max_queues"):
        create(registry, "d")
    assert set(registry.names()) == {"a", "b", "c"}
    assert create(registry, "c") is False


def test_queues_are_created_joined_and_deleted_on_a_server_that_is_out_of_memory(
    queue: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis then refuses commands in a transaction; Valkey 9 accepts them."""
    exchange = Link._exchange

    def as_redis(link: Link, commands: list[tuple[Any, ...]], lost: type[RedisUnavailable]) -> list[Any]:
        if commands[0] != ("MULTI",):
            return exchange(link, commands, lost)
        refused = [ResponseError("OOM command not allowed when used memory > 'maxmemory'.")] * (len(commands) - 2)
        return [b"OK", *refused, ResponseError("EXECABORT Transaction discarded because of previous errors.")]

    monkeypatch.setattr(Link, "_exchange", as_redis)
    queue.enqueue("a")
    options, of_fail_queue = stored_defaults(), stored_defaults()
    queue.redis.config_set("maxmemory", 1)
    assert queue.registry.create("q", "work", 9, options, {}, fail_options=of_fail_queue) is False
    assert queue.registry.create("r", "work", 9, options, {}, fail_options=of_fail_queue) is True
    assert queue.redis.exists("forq:queue:{q}:fail:options") == 1
    assert "r" in queue.registry.names()
    assert queue.registry.delete("q", force=True) == 1
    assert [dropped["id"] for dropped in purge(queue)] == ["a"]
    assert queue.registry.names() == {"r": "work"}
    assert queue.redis.exists("forq:queue:{q}:fail:options") == 0


def test_create_joins_and_sets_the_options_given(queue: OneQueue) -> None:
    queue.enqueue("a")
    before = queue.hash("options")
    assert queue.create(max_items=7) is False
    assert queue.hash("options") == before | {"max_items": "7", "version": "2"}
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_a_queue_created_again_has_its_own_options(redis_url: str) -> None:
    with one_queue(redis_url, max_items=1) as queue:
        queue.enqueue("a")
        with pytest.raises(QueueFull):
            queue.enqueue("b")
        version = queue.hash("options")["version"]
        queue.registry.delete(queue.name, force=True)
        purge(queue)
        queue.create(max_items=2)
        assert queue.hash("options")["version"] == version
        queue.enqueue("a", "b")
        queue.set_options(max_items=3)
        queue.enqueue("c")


def test_a_queue_created_again_on_another_server_has_its_own_options(queue: OneQueue) -> None:
    """This server was the master before and is again; it has seen neither the deletion nor the creation."""
    queue.enqueue("a")
    assert queue.summary().options == f"{queue.hash('options')['epoch']} 1"
    queue.redis.hset(queue.key("options"), mapping={"epoch": 1, "max_items": 1})
    queue.change_summary(options="1 1")
    with pytest.raises(QueueFull):
        queue.enqueue("b")


def test_options_of_a_lost_version_are_read_again(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.hset(queue.key("options"), "max_items", 1)
    queue.redis.delete(queue.key("summary"))
    with pytest.raises(QueueFull):
        queue.enqueue("b")


@pytest.mark.one_server
def test_another_mode_or_protocol_is_refused(queue: OneQueue) -> None:
    with pytest.raises(QueueExists, match="'work'"):
        create(queue.registry, queue.name, mode="on_request")
    queue.redis.hset(registry_key(DEFAULT_PREFIX), queue.name, "on_request")
    with pytest.raises(QueueExists, match="'work'"):
        create(queue.registry, queue.name, mode="on_request")
    queue.redis.hset(registry_key(DEFAULT_PREFIX), queue.name, "work")
    queue.set_options(protocol=99)
    with pytest.raises(IncompatibleProtocol):
        queue.create()


@pytest.mark.parametrize("name", ["", "a b", "{q}", "q\r\nDEL x", "../x", "..", "x" * 65])
def test_hostile_names_are_refused(redis_url: str, name: str) -> None:
    registry = Registry(Link(redis_url), DEFAULT_PREFIX)
    with pytest.raises(InvalidName):
        create(registry, name)
    with pytest.raises(InvalidName):
        registry.delete(name, force=True)


def test_a_create_that_crashed_half_way_is_completed_by_the_next_create(redis_url: str) -> None:
    link = Link(redis_url)
    registry = Registry(link, DEFAULT_PREFIX)
    link.run(script("reserve"), registry_key(DEFAULT_PREFIX), "q", "work", 1)
    with pytest.raises(TooManyQueues):
        create(registry, "other", max_queues=1)
    assert create(registry, "q", max_queues=1) is True


@pytest.mark.spec("N7")
def test_delete_needs_force_while_there_are_jobs(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    before = queue.state()
    with pytest.raises(QueueNotEmpty, match="2 jobs"):
        queue.registry.delete(queue.name, force=False)
    assert queue.state() == before
    assert queue.registry.delete(queue.name, force=True) == 2
    with pytest.raises(UnknownQueue):
        queue.enqueue("c")


def test_a_blocked_job_of_a_deleted_queue_is_logged_with_its_enqueue_time(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.worker().turn(want=1)
    ((_, identity),) = queue.producer.enqueue_identified([new_job("behind", id="a")])
    assert identity is not None
    queue.registry.delete(queue.name, force=True)
    assert [job["enqueued_at"] for job in purge(queue) if job["data"] == "behind"] == [int(identity.enqueued_us) / 1e6]


@pytest.mark.spec("N7")
def test_jobs_of_a_deleted_queue_are_logged_and_then_removed(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job({"x": 1}, id="a", identifier="Ann", type="mail")])
    queue.enqueue("b", priority=2)
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(failed="b", want=1)
    assert queue.registry.delete(queue.name, force=True) == 2

    logged = {str(job["id"]): job for job in purge(queue)}
    assert logged.keys() == {"a", "b"}
    enqueued_at = logged["a"].pop("enqueued_at")
    assert enqueued_at == pytest.approx(float(queue.redis.time()[0]), abs=5)
    assert logged["a"] == {
        "queue": "q",
        "id": "a",
        "identifier": "Ann",
        "cause": "deleted",
        "priority": 5,
        "type": "mail",
        "data": {"x": 1},
    }
    assert logged["b"]["error"] == {"message": "no"}
    assert queue.registry.names() == {}
    left = {key.decode() for key in queue.redis.keys("*")}
    of_queue = {queue.key(name) for name in ("graves", "deleted", "freed", "counts", "events")}
    assert left == {"forq:queues:deleted", *of_queue}
    assert all(queue.redis.ttl(key) > 0 for key in left), "every remaining key expires"
    assert purge(queue) == []


def test_a_failing_log_keeps_unwritten_jobs(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.registry.delete(queue.name, force=True)

    def full(jobs: list[Dropped]) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        queue.registry.purge(queue.name, full)
    with pytest.raises(QueueExists, match="deleted"):
        queue.create()
    assert [job["id"] for job in purge(queue)] == ["a"]
    assert queue.create() is True


def test_a_crash_between_delete_and_registry_loses_nothing(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.link.run(script("delete"), queue.base, queue.hash("options")["epoch"], 1)
    assert queue.registry.names() == {"q": "work"}
    assert queue.registry.delete(queue.name, force=False) == 0
    assert [job["id"] for job in purge(queue)] == ["a"]
    assert queue.registry.names() == {}
    with pytest.raises(UnknownQueue):
        queue.registry.delete(queue.name, force=True)


@pytest.mark.one_server
def test_a_queue_created_again_before_its_entry_was_marked_stays_registered(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.link.run(script("delete"), queue.base, queue.hash("options")["epoch"], 1)
    queue.create()
    queue.enqueue("b")
    queue.redis.hset(registry_key(DEFAULT_PREFIX), queue.name, "deleting 1")
    assert [job["id"] for job in purge(queue)] == ["a"]
    assert queue.registry.names() == {"q": "work"}
    assert queue.state() == State(jobs={"b"}, waiting={5: ["b"]})


def test_a_job_moved_by_a_frozen_worker_of_the_old_queue_comes_back(queue: OneQueue) -> None:
    frozen = queue.worker()
    queue.registry.delete(queue.name, force=True)
    purge(queue)
    queue.create()
    queue.enqueue("a")
    assert frozen.block() == "a"
    queue.recovery("p9").heartbeat(queue.name, 1000, [])
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
    assert queue.redis.pttl(queue.key("graves")) == -1  # the graves now belong to the new queue and do not expire


def test_a_queue_created_again_starts_empty(queue: OneQueue) -> None:
    queue.enqueue("a", token="t")
    queue.enqueue("c", priority=1)
    worker = queue.worker()
    worker.turn(want=2)
    worker.turn(done="c", failed="a")
    first = queue.hash("options")["epoch"]
    queue.registry.pause(queue.name, paused=True)
    queue.registry.delete(queue.name, force=True)
    purge(queue)
    queue.create()
    assert queue.hash("options")["epoch"] > first
    counts = queue.inspector.counts()
    assert (counts.done, counts.failed, counts.dead, counts.paused) == (0, 0, 0, False)
    assert queue.enqueue("b", token="t") == ["b"]
    with pytest.raises(UnknownQueue):
        worker.turn(want=1)


def test_a_deleted_queue_is_not_reopened(queue: OneQueue) -> None:
    def reopen() -> bool:
        return queue.registry.create(queue.name, "work", 9, stored_defaults(), {}, reopening=True)

    assert reopen() is False
    queue.registry.delete(queue.name, force=True)
    purge(queue)
    with pytest.raises(UnknownQueue, match="was deleted"):
        reopen()
    assert queue.registry.names() == {}
    queue.redis.flushall()
    assert reopen() is True


def test_a_large_queue_is_purged_in_slices(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forq.broker.registry.MOST_PURGED", 10)
    monkeypatch.setattr("forq.broker.registry.PURGE_CHUNKS", 2)
    queue.redis.config_set("hash-max-listpack-entries", 1)
    try:
        queue.enqueue(*(f"n{number}" for number in range(200)))
        queue.registry.delete(queue.name, force=True)
        logged: list[Dropped] = []
        assert queue.registry.purge(queue.name, logged.extend) is True
        assert queue.registry.names() == {"q": "deleting"}
        logged += purge(queue)
    finally:
        queue.redis.config_set("hash-max-listpack-entries", 512)
    assert {job["id"] for job in logged} == {f"n{number}" for number in range(200)}
    assert queue.registry.names() == {}


def test_pause_and_resume_report_a_change_once(queue: OneQueue) -> None:
    for paused in (True, True, False, False):
        queue.registry.pause(queue.name, paused=paused)
        assert queue.inspector.counts().paused is paused
    assert queue.journal_events() == [("paused", None), ("resumed", None)]
    queue.registry.delete(queue.name, force=True)
    with pytest.raises(UnknownQueue):
        queue.registry.pause(queue.name, paused=True)


@pytest.mark.spec("N24")
@pytest.mark.one_server
def test_a_different_fixed_option_is_refused_and_changes_nothing(queue: OneQueue) -> None:
    assert create_gate(queue.registry, release_interval_ms=250, max_items=5) is True
    before = queue.redis.hgetall("forq:queue:{gate}:options")
    assert (before[b"release_interval_ms"], before[b"retry_lane_retries"], before[b"lease_ms"]) == (
        b"250",
        b"3",
        b"10000",
    )
    with pytest.raises(
        QueueExists, match="'gate' exists with release_interval = 250ms; it is fixed while the queue exists"
    ):
        create_gate(queue.registry, release_interval_ms=300, max_items=7)
    with pytest.raises(QueueExists, match="'gate' exists with release_retries = 10; it is fixed"):
        create_gate(queue.registry, release_interval_ms=250, release_retries=9)
    with pytest.raises(QueueExists, match="mode 'auto_release'; a queue's mode never changes"):
        create_gate(queue.registry, mode="on_request")
    assert queue.redis.hgetall("forq:queue:{gate}:options") == before


@pytest.mark.one_server
def test_joining_keeps_fixed_options_that_are_not_given(queue: OneQueue) -> None:
    create_gate(queue.registry, release_interval_ms=250, retry_lane_retries=0)
    assert create_gate(queue.registry, release_interval_ms=250, max_items=7) is False
    options = queue.redis.hgetall("forq:queue:{gate}:options")
    assert (options[b"release_interval_ms"], options[b"retry_lane_retries"], options[b"max_items"]) == (
        b"250",
        b"0",
        b"7",
    )


def test_the_retry_lane_of_a_work_queue_is_not_fixed(queue: OneQueue) -> None:
    assert queue.create(retry_lane_retries=4) is False
    assert queue.hash("options")["retry_lane_retries"] == "4"


def test_a_new_release_queue_is_published_once_and_a_work_queue_is_not(queue: OneQueue) -> None:
    with queue.redis.pubsub() as subscription:
        subscription.psubscribe("forq:queue:*:due")
        assert subscription.get_message(timeout=5)["type"] == "psubscribe"
        create(queue.registry, "works")
        create_gate(queue.registry)
        create_gate(queue.registry)
        create_gate(queue.registry, "other", "on_request")
        messages = [subscription.get_message(timeout=5) for _ in range(2)]
        assert [(each["channel"], each["data"]) for each in messages] == [
            (b"forq:queue:{gate}@0:due", b"new"),
            (b"forq:queue:{other}@0:due", b"new"),
        ]
        assert subscription.get_message(timeout=0.05) is None


@pytest.mark.spec("N10")
@pytest.mark.one_server
def test_release_queues_are_listed_until_they_are_served_or_deleted(queue: OneQueue) -> None:
    create_gate(queue.registry)
    create_gate(queue.registry, "other", "on_request")
    assert queue.registry.unserved([]) == {"gate": "auto_release", "other": "on_request"}
    assert queue.registry.unserved(["other"]) == {"gate": "auto_release"}
    # A process died after it created the entry, or between deleting the queue and its entry.
    queue.redis.delete("forq:queue:{gate}:options")
    assert queue.registry.unserved(["other"]) == {}


def test_a_join_creates_no_queue(queue: OneQueue) -> None:
    with pytest.raises(UnknownQueue, match="no queue 'gate'"):
        queue.registry.create("gate", "on_request", 9, stored_defaults("on_request"), {}, joining=True)
    assert "gate" not in queue.registry.names()
    create_gate(queue.registry, mode="on_request")
    assert not queue.registry.create("gate", "on_request", 9, stored_defaults("on_request"), {}, joining=True)


def test_names_of_deleted_queues_are_kept_one_day_longer_than_their_journals(queue: OneQueue) -> None:
    names, day_ms = deleted_queues_key(DEFAULT_PREFIX), 24 * 3600 * 1000
    now_ms = queue.redis.time()[0] * 1000
    queue.redis.zadd(names, {"long-gone": now_ms - 9 * day_ms, "gone": now_ms - 7 * day_ms})
    queue.registry.delete(queue.name, force=True)
    assert queue.registry.deleted() == ["gone", queue.name]
    assert 7 * day_ms < queue.redis.pttl(names) <= 8 * day_ms
