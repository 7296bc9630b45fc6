"""Eviction in bounded steps: a processor with many workers is fenced at once and recovered over several calls."""

import pytest

from forq.broker.link import Link
from forq.broker.recovery import Heartbeat, Position
from forq.broker.scripts import script
from forq.errors import Fenced
from tests.support.drive.one_queue import EXPIRY_MS, OneQueue, State

PER_CALL = 16  # EVICTED_PER_CALL in lua/recovery.lua


def beat(queue: OneQueue, processor: str = "p1", *positions: Position) -> Heartbeat:
    return queue.recovery(processor).heartbeat(queue.name, EXPIRY_MS, list(positions))


def evict_once(queue: OneQueue, processor: str, cause: str = "supervisor_lost") -> list[int]:
    link: Link = queue.link
    return link.run(script("evict"), queue.base, processor, cause)[:3]


def start_workers(queue: OneQueue, workers: int, processor: str = "p2") -> list[str]:
    """Starts this many workers of a processor, each with a running job; returns the job ids."""
    ids = [f"j{number:02}" for number in range(workers)]
    if ids:
        queue.enqueue(*ids)
    positions = []
    for number, job_id in enumerate(ids):
        worker = queue.worker(f"w{number}", processor)
        assert worker.turn(want=1) == [job_id]
        positions.append(Position(worker.name, worker.number, 0, True))
    beat(queue, processor, *positions)
    return ids


def make_silent(queue: OneQueue, *processors: str) -> None:
    for processor in processors:
        queue.redis.zadd(queue.key("processors"), {processor: 1})
    queue.redis.hset(queue.key("counts"), "sweep_after_ms", 0)


def registered_workers(queue: OneQueue, processor: str = "p2") -> int:
    return int(queue.redis.hlen(queue.key(f"processor:{processor}:workers")))


def test_evict_recovers_a_bounded_number_of_workers_per_call(queue: OneQueue) -> None:
    ids = start_workers(queue, 40)
    assert evict_once(queue, "p2") == [1, 24, 16]
    assert (registered_workers(queue), queue.inspector.counts().waiting, queue.inspector.counts().in_flight) == (
        24,
        16,
        24,
    )
    assert queue.hash("evicting") == {"p2": "supervisor_lost"}
    assert queue.recovery().evict(queue.name, "p2", "supervisor_lost") == 24
    assert queue.state() == State(jobs=set(ids), waiting=queue.state().waiting)
    assert sorted(queue.pending()) == ids
    assert [queue.stall_count(job_id) for job_id in ids] == [1] * 40
    assert queue.hash("evicting") == {}
    assert queue.redis.keys("*processor:p2*") == []


@pytest.mark.spec("Q21")
def test_a_processor_is_fenced_from_the_first_step(queue: OneQueue) -> None:
    start_workers(queue, 20)
    evict_once(queue, "p2")
    with pytest.raises(Fenced):
        beat(queue, "p2")
    with pytest.raises(Fenced):
        queue.worker("late", "p2")
    assert registered_workers(queue) == 4


@pytest.mark.spec("Q18", "Q19")
def test_heartbeats_evict_a_silent_processor_and_report_if_more_is_left(queue: OneQueue) -> None:
    beat(queue)
    ids = start_workers(queue, 40)
    beat(queue)
    make_silent(queue, "p2")
    beats = [beat(queue) for _ in range(4)]
    assert [(one.evicted, one.more) for one in beats] == [(["p2"], True), ([], True), ([], False), ([], False)]
    assert sorted(queue.pending()) == ids
    assert {event.cause for event in queue.events() if event.verb == "stalled"} == {"host_lost"}


def test_any_heartbeat_continues_an_eviction_and_keeps_its_cause(queue: OneQueue) -> None:
    start_workers(queue, 20)
    evict_once(queue, "p2")
    assert beat(queue, "p3").more is False
    assert registered_workers(queue) == 0
    assert {event.cause for event in queue.events() if event.verb == "stalled"} == {"supervisor_lost"}


def test_an_eviction_is_finished_before_the_next_starts(queue: OneQueue) -> None:
    beat(queue)
    start_workers(queue, 20)
    beat(queue, "p3")
    beat(queue)
    make_silent(queue, "p2", "p3")
    assert [beat(queue).evicted for _ in range(4)] == [["p2"], [], ["p3"], []]


def test_a_heartbeat_that_may_not_sweep_yet_still_finishes_an_eviction(queue: OneQueue) -> None:
    start_workers(queue, 20)
    evict_once(queue, "p2")
    queue.redis.hset(queue.key("counts"), "sweep_after_ms", 10**15)
    beat(queue)
    assert registered_workers(queue) == 0


def test_workers_up_to_the_limit_are_recovered_in_one_call(queue: OneQueue) -> None:
    start_workers(queue, PER_CALL)
    assert evict_once(queue, "p2") == [1, 0, PER_CALL]
    assert queue.redis.exists(queue.key("evicting")) == 0


def test_a_worker_of_a_half_evicted_processor_continues_until_it_is_recovered(queue: OneQueue) -> None:
    ids = start_workers(queue, 17)
    evict_once(queue, "p2")
    [name] = [name.decode() for name in queue.redis.hkeys(queue.key("processor:p2:workers"))]
    worker = next(worker for worker in queue.workers if worker.name == name)
    [own] = worker.held()
    fence = queue.state().owners[own].partition(":")[2]
    worker.number += 1
    turn = worker.consumer.turn(worker.number, [own, fence, 7], [], 0, 2)
    assert turn.refused == []
    assert len(turn.jobs) == 4
    assert evict_once(queue, "p2") == [1, 0, 1]
    assert set(queue.state().jobs) == set(ids) - {own}
    assert sorted(queue.pending()) == sorted(set(ids) - {own}), "no job is lost or duplicated"
    assert all(queue.stall_count(job_id) == 1 for job_id in set(ids) - {own}), "the reported positions are outdated"
    with pytest.raises(Fenced):
        worker.turn(want=1)


def test_a_worker_that_leaves_meanwhile_ends_the_eviction_early(queue: OneQueue) -> None:
    start_workers(queue, 17)
    evict_once(queue, "p2")
    [name] = [name.decode() for name in queue.redis.hkeys(queue.key("processor:p2:workers"))]
    queue.recover(next(worker for worker in queue.workers if worker.name == name), running=True)
    assert beat(queue).more is False
    assert queue.hash("evicting") == {}
    assert queue.inspector.counts().waiting == 17


def test_lines_held_by_a_scribe_go_back_in_the_first_step(queue: OneQueue) -> None:
    start_workers(queue, 20)
    queue.redis.rpush(queue.key("outbox:p2"), "one", "two")
    queue.redis.rpush(queue.key("outbox"), "three")
    evict_once(queue, "p2")
    assert queue.redis.lrange(queue.key("outbox"), 0, -1) == [b"one", b"two", b"three"]


def test_a_queue_deleted_during_an_eviction_leaves_nothing_behind(queue: OneQueue) -> None:
    start_workers(queue, 20)
    evict_once(queue, "p2")
    queue.registry.delete(queue.name, force=True)
    while queue.registry.purge(queue.name, lambda jobs: None):
        pass
    left = {key.decode().rpartition("}")[2] for key in queue.redis.keys("*")}
    outlives = {":deleted", ":freed", ":graves", ":counts", ":events", "forq:queues:deleted"}
    assert left <= outlives, "the journal outlives the queue"
    graves = queue.redis.zrange(queue.key("graves"), 0, -1)
    assert len([grave for grave in graves if b" " in grave]) == 20, (
        "a BLMOVE of any of these workers may still be served"
    )


@pytest.mark.fault("server frozen")
def test_after_a_server_freeze_longer_than_the_expiry_no_processor_is_evicted_for_one_expiry(queue: OneQueue) -> None:
    three = ("p1", "p2", "p3")
    for processor in three:
        queue.worker(f"w-{processor}", processor)
        beat(queue, processor)
    queue.redis.hset(queue.key("counts"), "sweep_after_ms", 0)
    pass_time(queue, 3 * EXPIRY_MS)
    evicted = beat(queue, "p2").evicted
    for _ in range(3):
        pass_time(queue, EXPIRY_MS // 4)
        evicted += beat(queue, "p2").evicted
    assert evicted == [], "within one expiry after the freeze"
    assert queue.redis.zcard(queue.key("processors")) == 3
    pass_time(queue, EXPIRY_MS // 2)
    assert [beat(queue, "p2").evicted for _ in range(3)] in ([["p1"], ["p3"], []], [["p3"], ["p1"], []])


def pass_time(queue: OneQueue, ms: int) -> None:
    """Moves every stored time of the queue into the past."""
    for member, score in queue.redis.zrange(queue.key("processors"), 0, -1, withscores=True):
        queue.redis.zadd(queue.key("processors"), {member: score - ms})
    counts = queue.hash("counts")
    for name in ("last_beat_ms", "sweep_after_ms"):
        queue.redis.hset(queue.key("counts"), name, int(counts[name]) - ms)
