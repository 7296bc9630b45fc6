"""heartbeat and evict: which processors count as silent, and what happens to their jobs."""

import time

import pytest

from forq.broker.recovery import Position, QueueGone
from forq.errors import Fenced
from tests.support.drive.one_queue import EXPIRY_MS, OneQueue, State


def beat(queue: OneQueue, processor: str = "p1", *positions: Position) -> list[str]:
    return queue.recovery(processor).heartbeat(queue.name, EXPIRY_MS, list(positions)).evicted


def pass_time(queue: OneQueue, ms: int) -> None:
    """Moves every stored time of the queue into the past."""
    for name in ("processors", "graves"):
        for member, score in queue.redis.zrange(queue.key(name), 0, -1, withscores=True):
            queue.redis.zadd(queue.key(name), {member: score - ms})
    counts = queue.hash("counts")
    for name in {"last_beat_ms", "sweep_after_ms"} & set(counts):
        queue.redis.hset(queue.key("counts"), name, int(counts[name]) - ms)


def beat_for(queue: OneQueue, ms: int, *processors: str) -> list[str]:
    """Sends heartbeats of these processors for `ms`, a third of the expiry apart; returns the evicted processors."""
    evicted: list[str] = []
    for _ in range(0, ms, EXPIRY_MS // 3):
        pass_time(queue, EXPIRY_MS // 3)
        for processor in processors:
            evicted += beat(queue, processor)
    return evicted


def test_a_heartbeat_renews_its_processor(queue: OneQueue) -> None:
    queue.worker()
    pass_time(queue, EXPIRY_MS - 1000)
    beat(queue)
    left = queue.redis.zscore(queue.key("processors"), "p1") - time.time() * 1000
    assert left == pytest.approx(EXPIRY_MS, abs=2000)


def test_a_silent_processor_is_evicted_by_a_live_one(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    silent = queue.worker("w2", "p2")
    silent.turn(want=3)
    beat(queue, "p1")
    beat_for(queue, EXPIRY_MS, "p1", "p2")
    beat(queue, "p2", Position("w2", silent.number, 1, True))
    assert beat_for(queue, EXPIRY_MS * 2 // 3, "p1") == []
    assert beat_for(queue, EXPIRY_MS * 2 // 3, "p1") == ["p2"]
    assert queue.state() == State(jobs={"b", "c"}, waiting={5: ["b", "c"]})
    assert [queue.stall_count(job_id) for job_id in "bc"] == [1, 0]
    assert ("stalled", "b") in queue.journal_events()


@pytest.mark.fault("zombie")
def test_an_evicted_processor_is_fenced_in_every_call(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker("w2", "p2")
    worker.turn(want=1)
    assert queue.recovery().evict(queue.name, "p2", "supervisor_lost") == 1
    with pytest.raises(Fenced):
        beat(queue, "p2")
    with pytest.raises(Fenced):
        worker.turn(done="a")
    with pytest.raises(Fenced):
        queue.worker("w3", "p2")
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_evict_uses_the_positions_of_the_last_heartbeat_only_if_no_turn_followed(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c", "d")
    worker = queue.worker("w2", "p2")
    worker.turn(want=2)
    beat(queue, "p2", Position("w2", worker.number, 1, True))
    worker.turn(done="ab", want=2)
    queue.recovery().evict(queue.name, "p2", "supervisor_lost")
    assert queue.state() == State(jobs={"c", "d"}, waiting={5: ["c", "d"]})
    assert [queue.stall_count(job_id) for job_id in "cd"] == [0, 0]


@pytest.mark.spec("Q19")
def test_evict_without_a_heartbeat_counts_a_single_held_job_but_none_of_several(
    queue: OneQueue,
) -> None:
    queue.enqueue("a", "b", "c")
    for name, processor in (("w1", "p2"), ("w2", "p2"), ("w3", "p3")):
        queue.worker(name, processor).turn(want=0)
    queue.workers[0].turn(want=1)
    queue.workers[1].turn(want=2)
    assert queue.recovery().evict(queue.name, "p2", "supervisor_lost") == 2
    assert set(queue.state().waiting[5]) == {"a", "b", "c"}
    assert [queue.stall_count(job_id) for job_id in "abc"] == [1, 0, 0]
    assert queue.redis.zrange(queue.key("processors"), 0, -1) == [b"p3"]


@pytest.fixture
def two_live_processors(queue: OneQueue) -> OneQueue:
    """p1 and p2 have sent heartbeats long enough to evict others."""
    for processor in ("p1", "p2"):
        queue.worker(f"w-{processor}", processor)
        beat(queue, processor)
    assert beat_for(queue, 2 * EXPIRY_MS, "p1", "p2") == []
    return queue


@pytest.mark.fault("server frozen")
def test_after_a_server_freeze_no_processor_is_evicted_before_all_could_send_heartbeats(
    two_live_processors: OneQueue,
) -> None:
    pass_time(two_live_processors, 10 * EXPIRY_MS)
    assert beat(two_live_processors, "p1") == []
    assert beat_for(two_live_processors, EXPIRY_MS * 2 // 3, "p1") == []
    beat(two_live_processors, "p2")


def test_a_processor_that_stays_silent_after_a_server_freeze_is_evicted(two_live_processors: OneQueue) -> None:
    pass_time(two_live_processors, 10 * EXPIRY_MS)
    assert beat_for(two_live_processors, 2 * EXPIRY_MS, "p1") == ["p2"]


def test_a_new_processor_after_a_server_freeze_evicts_nobody(two_live_processors: OneQueue) -> None:
    pass_time(two_live_processors, 2 * EXPIRY_MS)
    two_live_processors.worker("w3", "p3")
    assert [beat(two_live_processors, "p3") for _ in range(3)] == [[], [], []]
    beat(two_live_processors, "p1")
    beat(two_live_processors, "p2")


def test_a_server_freeze_shorter_than_the_expiry_evicts_nobody(two_live_processors: OneQueue) -> None:
    pass_time(two_live_processors, EXPIRY_MS // 3 - 500)
    beat(two_live_processors, "p1")
    pass_time(two_live_processors, EXPIRY_MS * 3 // 4)
    assert beat(two_live_processors, "p1") == []
    beat(two_live_processors, "p2")


@pytest.mark.fault("clock of the server jumps")
def test_one_heartbeat_evicts_one_processor_at_most(queue: OneQueue) -> None:
    beat(queue, "p1")
    for processor in ("p2", "p3", "p4"):
        beat(queue, processor)
    beat_for(queue, 2 * EXPIRY_MS, "p1", "p2", "p3", "p4")
    for processor in ("p2", "p3", "p4"):
        queue.redis.zadd(queue.key("processors"), {processor: 1})
    assert [len(beat(queue, "p1")) for _ in range(4)] == [1, 1, 1, 0]


@pytest.mark.fault("clock of the server jumps")
def test_a_clock_set_back_does_not_stop_evictions_for_long(queue: OneQueue) -> None:
    beat(queue, "p1")
    pass_time(queue, -100 * EXPIRY_MS)
    beat(queue, "p2")
    assert "p2" in beat_for(queue, 3 * EXPIRY_MS, "p1")


def test_graves_are_drained_and_forgotten(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.recover(worker)
    queue.enqueue("a")
    worker.block()
    beat(queue)
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
    assert queue.redis.zcard(queue.key("graves")) == 1
    pass_time(queue, 25 * 3600 * 1000)
    beat(queue)
    assert queue.redis.zcard(queue.key("graves")) == 0


def graves(queue: OneQueue) -> set[str]:
    return {grave.decode() for grave in queue.redis.zrange(queue.key("graves"), 0, -1)}


def add_graves(queue: OneQueue, number: int, *, ms: int) -> list[str]:
    """Adds graves of workers that expire after `ms`, one millisecond apart."""
    seconds, _ = queue.redis.time()
    workers = [f"old{n}" for n in range(number)]
    queue.redis.zadd(queue.key("graves"), {f"p9 {worker}": seconds * 1000 + ms + n for n, worker in enumerate(workers)})
    return workers


def test_a_workers_grave_expires_after_an_hour_and_a_processors_after_a_day(queue: OneQueue) -> None:
    queue.recover(queue.worker())
    queue.worker("w2", "p2")
    queue.recovery().evict(queue.name, "p2", "supervisor_lost")
    assert graves(queue) == {"p1 w1", "p2", "p2 w2"}
    pass_time(queue, 3600 * 1000 - 10_000)
    beat(queue)
    assert graves(queue) == {"p1 w1", "p2", "p2 w2"}
    pass_time(queue, 20_000)
    beat(queue)
    assert graves(queue) == {"p2"}
    pass_time(queue, 23 * 3600 * 1000 - 20_000)
    with pytest.raises(Fenced):
        beat(queue, "p2")
    pass_time(queue, 20_000)
    beat(queue)
    assert graves(queue) == set()


def test_a_grave_is_drained_before_it_is_forgotten(queue: OneQueue) -> None:
    """The queue was not served for hours after a late BLMOVE."""
    worker = queue.worker()
    queue.recover(worker)
    queue.enqueue("a")
    worker.block()
    pass_time(queue, 25 * 3600 * 1000)
    beat(queue)
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
    assert graves(queue) == set()


def test_only_the_newest_graves_of_workers_are_kept(queue: OneQueue) -> None:
    add_graves(queue, 4095, ms=60_000)
    # It was evicted 23 hours ago.
    queue.redis.zadd(queue.key("graves"), {"p2": queue.redis.time()[0] * 1000 + 30_000})
    queue.enqueue("a", "b")
    for n, job_id in enumerate("ab"):
        queue.redis.lmove(queue.key("pending"), queue.key(f"processor:p9:worker:old{n}:processing"), "LEFT", "RIGHT")
        queue.recover(queue.worker(f"w{n}"))
        assert queue.redis.zcard(queue.key("graves")) <= 4097, job_id
    assert queue.redis.zscore(queue.key("graves"), "p2")
    assert {"p1 w0", "p1 w1", "p9 old4094"} <= graves(queue)
    assert "p9 old0" not in graves(queue)
    assert "a" in queue.pending(), "its grave was drained before it was forgotten"


def test_many_graves_are_drained_in_rotation(queue: OneQueue) -> None:
    workers = add_graves(queue, 4000, ms=3_000_000)
    ids = [f"j{n}" for n in range(40)]
    queue.enqueue(*ids)
    for worker in workers[::100]:
        queue.redis.lmove(queue.key("pending"), queue.key(f"processor:p9:worker:{worker}:processing"), "LEFT", "RIGHT")
    assert queue.pending() == []
    for _ in range(4000 // 200 + 1):
        beat(queue)
    assert set(queue.pending()) == set(ids)


def test_a_deleted_queue_and_a_lost_one_are_reported_differently(queue: OneQueue) -> None:
    queue.registry.delete(queue.name, force=True)
    with pytest.raises(QueueGone) as deleted:
        beat(queue)
    assert deleted.value.deleted
    queue.redis.flushall()
    with pytest.raises(QueueGone) as lost:
        beat(queue)
    assert not lost.value.deleted


def test_evict_of_a_deleted_queue_does_nothing(queue: OneQueue) -> None:
    queue.registry.delete(queue.name, force=True)
    assert queue.recovery().evict(queue.name, "p2", "supervisor_lost") == 0
