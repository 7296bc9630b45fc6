"""No call reads more than 4 MiB of records, unless a single record is larger."""

from collections.abc import Iterator
from itertools import chain

import pytest

from forq import Client
from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Update, new_job
from forq.broker.keys import DEFAULT_PREFIX, fail_queue, queue_base
from forq.broker.schedules import Schedules
from forq.broker.scripts import script
from forq.errors import Exists
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, OneQueue, one_queue
from tests.support.drive.release_queue import gate

MB = 1_000_000
BUDGET = 4 * 2**20
SMALL = 8192


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, max_data=64 * MB) as queue:
        yield queue


def enqueue(queue: OneQueue, sizes: dict[str, int], *, priority: int = 5, run_at: float | None = None) -> None:
    for job_id, size in sizes.items():
        queue.producer.enqueue([new_job("x" * size, id=job_id, priority=priority, run_at=run_at)], Update("refuse"))


def claim(worker: HandWorker, want: int = 128) -> tuple[list[str], int]:
    """Takes a turn that settles the previous one; returns the claimed ids and the bytes of their records."""
    worker.number += 1
    done: list[bytes | str | int] = [part for job_id in worker.held() for part in (job_id, worker.fence, 7)]
    turn = worker.consumer.turn(worker.number, done, [], 0, want)
    worker.fence = turn.fence or worker.fence
    return [job_id.decode() for job_id in turn.jobs[::2]], sum(len(record) for record in turn.jobs[1::2])


def claim_all(worker: HandWorker) -> list[list[str]]:
    """Takes turns until nothing is left; each is within the budget or claims a single job."""
    turns: list[list[str]] = []
    while True:
        ids, size = claim(worker)
        if not ids:
            return turns
        assert size <= BUDGET or len(ids) == 1
        turns.append(ids)


def largest(queue: OneQueue) -> int:
    return int(queue.hash("options").get("largest_record", 0))


def calls(queue: OneQueue, command: str) -> int:
    return int(queue.redis.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_a_claim_of_large_jobs_stays_within_the_budget_and_in_order(queue: OneQueue) -> None:
    ids = [f"j{n}" for n in range(20)]
    enqueue(queue, dict.fromkeys(ids, MB))
    turns = claim_all(queue.worker())
    assert list(chain(*turns)) == ids
    assert [len(turn) for turn in turns] == [4] * 5


def test_a_job_larger_than_the_budget_is_claimed_alone(queue: OneQueue) -> None:
    enqueue(queue, {"a": 10, "huge": 5 * MB, "huger": 6 * MB, "b": 10, "c": 10})
    assert claim_all(queue.worker()) == [["a"], ["huge"], ["huger"], ["b", "c"]]


def test_small_jobs_are_claimed_together_after_a_large_one_was_stored(queue: OneQueue) -> None:
    small = {f"s{n}": 10 for n in range(50)}
    enqueue(queue, small)
    enqueue(queue, {"large": 5 * MB})
    assert claim_all(queue.worker()) == [list(small), ["large"]]


def test_a_job_that_does_not_fit_is_not_overtaken_by_a_lower_priority(queue: OneQueue) -> None:
    enqueue(queue, {"a": 3 * MB, "b": 3 * MB}, priority=2)
    enqueue(queue, {"c": 10})
    assert claim_all(queue.worker()) == [["a"], ["b", "c"]]


def test_stale_hints_among_large_jobs_are_skipped(queue: OneQueue) -> None:
    ids = [f"j{n}" for n in range(9)]
    enqueue(queue, dict.fromkeys(ids, MB))
    for job_id in ids[1:8:2]:
        queue.producer.cancel(job_id)
    assert list(chain(*claim_all(queue.worker()))) == ids[::2]


def test_a_job_brought_by_blmove_counts_too(queue: OneQueue) -> None:
    ids = [f"j{n}" for n in range(12)]
    enqueue(queue, dict.fromkeys(ids, MB))
    worker = queue.worker()
    for _ in range(6):
        worker.block()
    worker.number += 1
    turn = worker.consumer.turn(worker.number, [], [], 0, 128)
    assert [job_id.decode() for job_id in turn.jobs[::2]] == ids[:4]
    worker.fence = turn.fence
    assert list(chain(*claim_all(worker))) == ids[4:]


def test_a_queue_of_small_jobs_is_read_in_one_call(queue: OneQueue) -> None:
    enqueue(queue, {f"s{n}": 100 for n in range(128)})
    queue.redis.config_resetstat()
    assert len(claim(queue.worker())[0]) == 128
    assert (calls(queue, "lpop"), calls(queue, "hstrlen"), calls(queue, "lindex")) == (1, 0, 0)


def test_every_way_to_store_a_record_notes_its_size(queue: OneQueue) -> None:
    assert largest(queue) == SMALL
    enqueue(queue, {"a": 7600})
    assert largest(queue) == SMALL
    enqueue(queue, {"b": 8192})
    assert largest(queue) == 2 * SMALL
    version = queue.hash("options")["version"]
    enqueue(queue, {"c": 8192})
    assert queue.hash("options")["version"] == version
    queue.producer.enqueue([new_job(1, id="d"), new_job("x" * 20_000, id="e"), new_job(1, id="f")])
    assert largest(queue) == 4 * SMALL
    queue.producer.enqueue([new_job("x" * 40_000, id="a")], Update("update"))
    assert largest(queue) == 8 * SMALL, "an update"
    assert queue.hash("options")["version"] > version, "the options are read again"
    worker = queue.worker()
    claim(worker, want=1)
    queue.producer.enqueue([new_job("x" * 80_000, id="a")], Update("update"))
    assert largest(queue) == 16 * SMALL, "a blocked record, which becomes a job of its own"


def test_a_refused_enqueue_notes_no_size(queue: OneQueue) -> None:
    queue.enqueue("a")
    version = queue.hash("options")["version"]
    with pytest.raises(Exists):
        enqueue(queue, {"a": 8192})
    assert (largest(queue), queue.hash("options")["version"]) == (SMALL, version)


def test_reviving_a_large_job_notes_its_size(queue: OneQueue) -> None:
    enqueue(queue, {"a": MB})
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(failed="a")
    queue.recovery().heartbeat(queue.name, EXPIRY_MS, [])
    assert largest(queue) == SMALL
    [member] = queue.redis.zrange(queue.key("dead"), 0, -1)
    DeadJobs(queue.link, DEFAULT_PREFIX, queue.name).retry(member.decode())
    assert largest(queue) == 2**20


def test_the_fail_queue_notes_the_size_of_its_own_jobs(queue: OneQueue) -> None:
    queue.registry.create(queue.name, "work", 100, {}, {"fail_handler": 1}, fail_options={"max_data": 2**40})
    enqueue(queue, {"a": MB})
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(failed="a")
    base = queue_base(DEFAULT_PREFIX, fail_queue(queue.name))
    assert int(queue.redis.hget(f"{base}:options", "largest_record")) == 2**20


def test_a_heartbeat_resets_the_noted_size_of_an_empty_queue(queue: OneQueue) -> None:
    enqueue(queue, {"a": MB})
    queue.recovery().heartbeat(queue.name, EXPIRY_MS, [])
    assert largest(queue) == 2**20
    claim_all(queue.worker())
    assert largest(queue) == 2**20
    queue.recovery().heartbeat(queue.name, EXPIRY_MS, [])
    assert largest(queue) == SMALL
    version = queue.hash("options")["version"]
    queue.recovery().heartbeat(queue.name, EXPIRY_MS, [])
    assert queue.hash("options")["version"] == version


def test_small_jobs_are_claimed_in_one_call_again_after_the_queue_was_empty(queue: OneQueue) -> None:
    enqueue(queue, {"a": 5 * MB})
    worker = queue.worker()
    claim_all(worker)
    queue.recovery().heartbeat(queue.name, EXPIRY_MS, [])
    enqueue(queue, {f"s{n}": 100 for n in range(20)})
    queue.redis.config_resetstat()
    assert len(claim(worker)[0]) == 20
    assert calls(queue, "lpop") <= 2


def test_the_size_of_a_job_from_a_schedule_is_noted(queue: OneQueue) -> None:
    Client(queue.url).queue(queue.name).schedule("s", data="x" * 20_000, every=3600)
    Schedules(queue.link, DEFAULT_PREFIX, queue.name).trigger("s")
    assert largest(queue) == 4 * SMALL


def test_a_due_job_larger_than_the_budget_is_promoted(queue: OneQueue) -> None:
    enqueue(queue, {"a": 5 * MB}, run_at=2_000_000_000)
    queue.set_due({"a": 1})
    queue.recovery().promote(queue.name)
    assert queue.pending() == ["a"]


def test_large_expired_items_are_buried_in_several_calls(redis_url: str) -> None:
    with gate(redis_url, "on_request", item_timeout_ms=3_600_000, max_data=64 * MB) as items:
        enqueue(items, {"huge": 5 * MB})
        items.make_due("expiries", "huge")
        items.promote()
        assert items.state().dead == ["huge"]
        items.recovery().heartbeat(items.name, EXPIRY_MS, [])
        ids = [f"j{n}" for n in range(6)]
        enqueue(items, dict.fromkeys(ids, MB))
        items.make_due("expiries", *ids)
        items.promote()
        assert len(items.state().dead) == 5
        items.promote()
        assert len(items.state().dead) == 7


def test_large_items_with_lapsed_leases_go_back_in_several_calls_in_order(redis_url: str) -> None:
    with gate(redis_url, "on_request", max_data=64 * MB) as items:
        ids = [f"j{n}" for n in range(8)]
        enqueue(items, dict.fromkeys(ids, MB))
        assert [items.got(name) for name in "abcdefgh"] == ids
        items.make_due("leases", *ids)
        items.promote()
        assert 0 < len(items.pending()) < 8
        items.promote()
        assert items.pending() == ids


def test_without_a_noted_size_every_record_may_be_large(queue: OneQueue) -> None:
    ids = [f"j{n}" for n in range(6)]
    enqueue(queue, dict.fromkeys(ids, MB))
    queue.redis.hdel(queue.key("options"), "largest_record")
    queue.options_changed()
    enqueue(queue, {"last": 2 * MB})
    assert largest(queue) == 0
    assert [len(turn) for turn in claim_all(queue.worker())] == [4, 3]
    queue.recovery().heartbeat(queue.name, EXPIRY_MS, [])
    assert largest(queue) == SMALL


def test_large_jobs_due_together_are_promoted_in_several_calls(queue: OneQueue) -> None:
    ids = [f"j{n}" for n in range(9)]
    enqueue(queue, dict.fromkeys(ids, MB), run_at=2_000_000_000)
    for n, job_id in enumerate(ids):
        queue.set_due({job_id: n + 1})
    for waiting in (4, 8, 9):
        due_ms = queue.recovery().promote(queue.name)
        assert queue.pending() == ids[:waiting]
        assert due_ms == (0 if waiting < 9 else None)


def test_an_enqueue_does_not_read_large_records_to_check_that_they_exist(queue: OneQueue) -> None:
    ids = [f"j{n}" for n in range(10)]
    enqueue(queue, dict.fromkeys(ids, MB))
    queue.redis.config_resetstat()
    stored = queue.producer.enqueue([new_job(1, id=job_id) for job_id in [*ids, "new"]], Update("skip"))
    assert stored == [*ids, "new"]
    assert calls(queue, "hexists") == 11
    assert set(queue.pending()) == {*ids, "new"}


def test_an_eviction_returns_large_jobs_in_several_calls(queue: OneQueue) -> None:
    ids = [f"j{n}" for n in range(12)]
    enqueue(queue, dict.fromkeys(ids, MB))
    workers = [queue.worker(f"w{n}", "p2") for n in range(4)]
    for worker in workers:
        assert len(claim(worker, want=3)[0]) == 3
    left = [queue.link.run(script("evict"), queue.base, "p2", "supervisor_lost")[1:3] for _ in range(3)]
    assert left == [[2, 2], [0, 2], [0, 0]]
    assert set(queue.pending()) == set(ids)


def test_counts_read_few_large_jobs(queue: OneQueue) -> None:
    enqueue(queue, {f"j{n}": MB for n in range(16)})
    queue.producer.cancel("j0")
    queue.redis.config_resetstat()
    counts = queue.inspector.counts()
    assert (counts.waiting, counts.oldest_waiting_seconds is None) == (15, False)
    assert calls(queue, "hget") == 3, "the record of the stale hint, a live one, a count"


def replies_of(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the size of each reply from now on."""
    sizes: list[int] = []
    call = queue.link.call

    def measured(*command: object) -> object:
        reply = call(*command)
        flat = reply[1] if command[0] == "HSCAN" else reply
        sizes.append(sum(len(part) for part in flat if isinstance(part, bytes)) if isinstance(flat, list) else 0)
        return reply

    monkeypatch.setattr(queue.link, "call", measured)
    return sizes


@pytest.mark.one_server  # in a cluster the call goes through the link of a node, not through this one
def test_no_call_for_a_page_reads_more_than_the_budget(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list("abcdefghijkl")
    enqueue(queue, dict.fromkeys(ids, MB))
    worker = queue.worker()
    for job_id in ids[:6]:
        assert worker.turn(want=1) == [job_id]
        worker.turn(failed=job_id, kind="permanent")
    dead = DeadJobs(queue.link, DEFAULT_PREFIX, queue.name)
    sizes = replies_of(queue, monkeypatch)
    assert [job["id"] for job in queue.inspector.jobs("waiting").jobs] == ids[6:]
    assert [job["id"] for job in queue.inspector.jobs("dead").jobs] == ids[:6]
    assert [job["id"] for job in dead.page().jobs] == ids[5::-1]
    assert MB < max(sizes) <= BUDGET
    assert sum(sizes) > 18 * MB


@pytest.mark.one_server
def test_no_call_of_a_purge_reads_much_more_than_the_budget(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {f"j{number}" for number in range(40)}
    enqueue(queue, dict.fromkeys(ids, MB))
    queue.registry.delete(queue.name, force=True)
    sizes, dropped = replies_of(queue, monkeypatch), list[str]()
    while queue.registry.purge(queue.name, lambda jobs: dropped.extend(str(job["id"]) for job in jobs)):
        pass
    assert set(dropped) == ids
    # HSCAN treats COUNT as a hint: it reads whole buckets.
    assert max(sizes) <= 5 * BUDGET
