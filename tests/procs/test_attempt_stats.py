"""AttemptStats: other processes read what workers count; counts outlive the worker and are dropped with the queue."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forq.errors import ForqError
from forq.procs.scoreboard import BUCKETS, AttemptStats, WorkerStats, cumulated

CLAIMED_US = 1_763_000_000_500_000


def record(enqueued_us: int = 1_763_000_000_000_000, flag: str = "p") -> tuple[bytes, bytes]:
    return b"id", f"{flag}5 {enqueued_us}\n[null,null,1]".encode()


def count(
    entry: WorkerStats, micros: list[int], failed: int = 0, batch: list[tuple[bytes, bytes]] | None = None
) -> None:
    entry.count(CLAIMED_US, batch or [record()] * len(micros), micros, failed, 7)


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=50))
def test_every_duration_is_in_its_bucket(micros: list[int]) -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    count(stats.of_slot(0), micros)
    found = stats.read()["q"]
    assert found.run_micros == sum(micros)
    assert found.run == [sum(min(it.bit_length(), BUCKETS - 1) == b for it in micros) for b in range(BUCKETS)]
    bounds = (4, 10, 25)
    assert cumulated(found.run, bounds) == [sum(it < 2**bound for it in micros) for bound in bounds]


def test_a_wait_is_the_time_from_enqueue_to_claim_of_plain_records_only() -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    batch = [record(), record(flag="d"), record(1_763_000_000_499_999), (b"x", b"c5 1763000000000000 1 0 0 0\n[]")]
    count(stats.of_slot(0), [1, 1, 1, 1], batch=batch)
    found = stats.read()["q"]
    assert (sum(found.wait), found.wait_micros) == (2, 500_000 + 1_000)
    assert (sum(found.run), found.last_ns) == (4, 7)


def test_jobs_of_the_batch_that_did_not_run_are_not_counted() -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    count(stats.of_slot(0), [5, 5], failed=1, batch=[record()] * 9)
    found = stats.read()["q"]
    assert (sum(found.run), sum(found.wait), found.failed) == (2, 2, 1)


@pytest.mark.parametrize("broken", [b"", b"p", b"p5 x\n", b"p5 1\n[null,null,1]", b"rubbish"])
def test_an_invalid_record_has_no_wait_and_does_not_shift_the_others(broken: bytes) -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    count(stats.of_slot(0), [5], batch=[(b"a", broken)])
    count(stats.of_slot(0), [5, 5], batch=[(b"a", broken), record()])
    found = stats.read()["q"]
    assert (sum(found.run), sum(found.wait)) == (3, 1)


def test_a_clock_set_back_gives_a_wait_of_zero() -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    count(stats.of_slot(0), [5], batch=[record(1_763_000_999_999_000)])
    found = stats.read()["q"]
    assert (found.wait[0], found.wait_micros) == (1, 0)


def test_jobs_with_an_enqueue_time_in_1970_do_not_crash_the_worker() -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    ancient = [(b"a", b"p5 0000000000001000\n[null,null,1]")] * 128
    for _ in range(100):
        count(stats.of_slot(0), [5] * 128, batch=ancient)
    assert sum(stats.read()["q"].wait) == 12_800


def test_another_process_reads_what_a_worker_counted() -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    pid = os.fork()
    if pid == 0:
        count(stats.of_slot(0), [5])
        os._exit(0)
    os.waitpid(pid, 0)
    assert sum(stats.read()["q"].run) == 1


def test_the_next_worker_of_a_queue_continues_its_counts_and_another_queue_starts_at_zero() -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    count(stats.of_slot(0), [5, 5])
    stats.give_back(0)
    # The slot is reused for another queue.
    stats.take(0, "other")
    count(stats.of_slot(0), [5])
    assert {name: sum(found.run) for name, found in stats.read().items()} == {"q": 2, "other": 1}
    stats.take(1, "q")
    count(stats.of_slot(1), [5])
    assert sum(stats.read()["q"].run) == 3


def test_counts_of_two_workers_of_a_queue_are_summed() -> None:
    stats = AttemptStats(4)
    for slot in (0, 1):
        stats.take(slot, "q")
        count(stats.of_slot(slot), [5] * (slot + 1), failed=slot)
    assert stats.of_slot(0).words is not stats.of_slot(1).words
    found = stats.read()["q"]
    assert (sum(found.run), found.failed) == (3, 1)


def test_tallies_of_a_removed_queue_are_cleared_for_reuse() -> None:
    stats = AttemptStats(1)
    stats.take(0, "q")
    count(stats.of_slot(0), [5])
    stats.give_back(0)
    with pytest.raises(ForqError, match="all 1 entries"):
        stats.take(1, "other")
    stats.forget("q")
    assert stats.read() == {}
    stats.take(1, "other")
    assert sum(stats.read()["other"].run) == 0


def test_tallies_still_in_use_are_not_cleared() -> None:
    stats = AttemptStats(4)
    stats.take(0, "q")
    count(stats.of_slot(0), [5])
    stats.forget("q")
    assert sum(stats.read()["q"].run) == 1
