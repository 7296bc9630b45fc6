"""MinuteRings: one minute holds what ended in it, or nothing. A writer that dies anywhere leaves at most a gap."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forq.procs.minutes import ENTRY_BYTES, MINUTES, LastHour, Minute, MinuteRings, seconds_to_boundary
from forq.procs.scoreboard import BUCKETS, QueueStats, wait_quantile

# A boundary.
BEGIN = 29_000_000 * 60.0
NONE = [0] * BUCKETS


def stats(ended: int = 0, failed: int = 0, waits: int = 0, run_micros: int | None = None) -> QueueStats:
    """Totals: run times of 100 µs, and waits of 1 to 2 ms."""
    run, wait = list(NONE), list(NONE)
    run[7], wait[11] = ended, waits
    micros = 100 * ended if run_micros is None else run_micros
    return QueueStats(run=run, run_micros=micros, wait=wait, wait_micros=1500 * waits, failed=failed, last_ns=0)


class Clocks:
    """The rings with both clocks."""

    def __init__(self, number: int = 8) -> None:
        self.wall, self.steady = BEGIN, 1000.0
        self.rings = MinuteRings(number, lambda: self.steady)

    def write(self, after: float = 60.0, /, **queues: QueueStats) -> None:
        self.wall += after
        self.steady += after
        self.rings.write(queues, self.wall)

    def replace_writer(self) -> None:
        """A new web process, forked from a supervisor that never wrote."""
        self.rings._places, self.rings._free, self.rings._seen_at = {}, None, {}

    def ended(self, name: str = "q", last: int = 4) -> list[int | None]:
        return [None if one is None else one.ended for one in self.rings.read(name).minutes[-last:]]


def minute_of(at: float) -> int:
    return int(at // 60)


def test_a_minute_is_the_difference_between_two_boundaries() -> None:
    clocks = Clocks()
    clocks.write(q=stats(100, 7, 50))
    clocks.write(q=stats(130, 9, 60))
    clocks.write(q=stats(130, 9, 60))
    hour = clocks.rings.read("q")
    assert hour.newest == clocks.rings.newest == minute_of(BEGIN) + 2
    assert hour.minutes[-3:] == (None, Minute(30, 2, 3000, 10, 1536, 2038), Minute(0, 0, 0, 0, None, None))
    assert hour.minutes[-2] is not None
    assert hour.minutes[-2].done == 28
    assert clocks.rings.read_all() == {"q": hour}
    assert clocks.rings.read("other") == LastHour(hour.newest, (None,) * MINUTES)


def test_before_the_first_boundary_nothing_is_known() -> None:
    rings = MinuteRings(4)
    assert (rings.newest, rings.read("q"), rings.read_all()) == (0, LastHour(0, (None,) * MINUTES), {})


def test_an_hour_is_kept() -> None:
    clocks = Clocks()
    for number in range(100):
        clocks.write(q=stats(number * (number + 1) // 2))
    assert clocks.ended(last=MINUTES) == list(range(40, 100))


def test_a_queue_that_was_created_since_the_last_boundary_began_at_zero() -> None:
    clocks = Clocks()
    clocks.write()
    clocks.write(q=stats(5))
    assert clocks.ended(last=2) == [None, 5]


def test_a_queue_that_was_dropped_and_created_again_begins_at_zero() -> None:
    clocks = Clocks()
    clocks.write(q=stats(1000))
    clocks.write(q=stats(1001))
    clocks.write(q=stats(3))
    clocks.write(q=stats(5))
    assert clocks.ended(last=3) == [1, 3, 2]


def test_a_queue_that_was_created_again_with_more_jobs_is_recognized_by_its_histograms() -> None:
    clocks = Clocks()
    clocks.write(q=stats(10))
    shorter = stats(20)
    clocks.write(q=replace(shorter, run=[*shorter.run[1:], 0]))
    assert clocks.ended(last=1) == [20]


def test_a_missed_boundary_is_a_gap_and_no_spike() -> None:
    clocks = Clocks()
    for total in (0, 10):
        clocks.write(q=stats(total))
    clocks.write(120, q=stats(1000))
    clocks.write(q=stats(1010))
    assert clocks.ended() == [10, None, None, 10]


@pytest.mark.parametrize("late", [-9.0, 9.0, 30.0, 49.0])
def test_a_late_write_is_a_gap_and_a_slightly_late_one_is_not(late: float) -> None:
    clocks = Clocks()
    for total in (0, 10):
        clocks.write(q=stats(total))
    clocks.write(60 + late, q=stats(30))
    clocks.write(60 - late, q=stats(40))
    clocks.write(q=stats(50))
    assert clocks.ended() == ([10, 20, 10, 10] if abs(late) < 10 else [10, None, None, 10])


def test_a_second_write_at_a_boundary_changes_nothing() -> None:
    """A timer may end a little early, and again at the boundary."""
    clocks = Clocks()
    clocks.write(q=stats(10))
    clocks.write(59.998, q=stats(20))
    clocks.write(0.002, q=stats(21), new=stats(4))
    clocks.write(60, q=stats(30), new=stats(9))
    assert (clocks.ended(last=2), clocks.ended("new", 2)) == ([10, 10], [None, 5])


@pytest.mark.parametrize("jump", [-86_400.0, -3600.0, -60.0, -30.0, -11.0, 11.0, 30.0, 60.0, 3600.0, 86_400.0])
def test_a_clock_that_was_set_leaves_a_gap(jump: float) -> None:
    clocks = Clocks()
    for total in (0, 10, 20):
        clocks.write(q=stats(total))
    clocks.wall += jump
    wait = seconds_to_boundary(clocks.wall)
    clocks.write(wait, q=stats(50))
    for total in (60, 70):
        clocks.write(q=stats(total))
    assert clocks.rings.newest == minute_of(clocks.wall) - 1
    found = clocks.ended(last=MINUTES)
    assert found[-2:] == [10, 10]
    assert set(found) <= {10, None}


def test_minutes_of_a_clock_that_was_ahead_are_not_shown_when_their_time_comes() -> None:
    clocks = Clocks()
    for total in range(0, 200, 10):
        clocks.write(q=stats(total))
    clocks.wall -= 600
    clocks.write(q=stats(1000))
    clocks.write(480, q=stats(2000))
    # 8 minutes later: the 12 minutes before the clock was set back, and none of the future.
    assert clocks.ended(last=9) == [10] + [None] * 8


def test_a_suspended_machine_leaves_a_gap() -> None:
    """The steady clock stands still meanwhile."""
    clocks = Clocks()
    for total in (0, 10):
        clocks.write(q=stats(total))
    clocks.wall += 120
    clocks.write(60, q=stats(15))
    clocks.write(q=stats(25))
    assert clocks.ended() == [None, None, None, 10]
    assert clocks.ended(last=5)[0] == 10


def test_a_clock_in_1970_raises_nothing() -> None:
    rings = MinuteRings(2)
    for now in (0.0, 5.0, 60.0, 120.0):
        rings.write({"q": stats(1)}, now)
    rings.read("q")


def test_failures_read_before_their_attempts_belong_to_the_next_minute() -> None:
    clocks = Clocks()
    clocks.write(q=stats(10, 0))
    clocks.write(q=stats(11, 3))
    clocks.write(q=stats(15, 3))
    found = [(one.ended, one.failed) for one in clocks.rings.read("q").minutes[-2:] if one]
    assert found == [(1, 1), (4, 2)]


def test_the_next_writer_continues() -> None:
    clocks = Clocks()
    clocks.write(a=stats(1), b=stats(1))
    clocks.write(a=stats(2), b=stats(3))
    clocks.replace_writer()
    clocks.write(a=stats(4), b=stats(7))
    assert (clocks.ended("a", 2), clocks.ended("b", 2)) == ([1, 2], [2, 4])


def test_a_process_forked_later_reads_what_another_wrote() -> None:
    clocks = Clocks()
    pid = os.fork()
    if pid == 0:
        clocks.write(q=stats(1))
        clocks.write(q=stats(5))
        os._exit(0)
    os.waitpid(pid, 0)
    assert clocks.ended(last=1) == [4]


def test_a_queue_that_is_gone_for_an_hour_is_forgotten_and_its_entry_is_reused() -> None:
    clocks = Clocks(2)
    for total in (0, 5):
        clocks.write(gone=stats(total), stays=stats(total))
    for _ in range(59):
        clocks.write(stays=stats(5))
        assert set(clocks.rings.read_all()) == {"gone", "stays"}
    clocks.write(stays=stats(5))
    assert set(clocks.rings.read_all()) == {"stays"}
    clocks.write(stays=stats(5), new=stats(3))
    assert clocks.ended("new", MINUTES) == [None] * 59 + [3]


def test_if_all_entries_are_taken_the_queue_that_is_gone_for_longest_makes_room() -> None:
    clocks = Clocks(2)
    clocks.write(a=stats(), b=stats())
    clocks.write(b=stats())
    clocks.write(c=stats(1))
    assert set(clocks.rings.read_all()) == {"b", "c"}
    clocks.write(c=stats(1), d=stats(2), e=stats(3), f=stats(4))
    clocks.write(c=stats(2), d=stats(4), e=stats(3), f=stats(4))
    assert len(clocks.rings.read_all()) == 2
    assert clocks.ended("c", 1) == [1]


def test_a_reader_finds_a_queue_whose_entry_moved() -> None:
    clocks = Clocks(1)
    clocks.write(a=stats())
    clocks.write(a=stats(1))
    assert clocks.ended("a", 1) == [1]
    clocks.write(b=stats(2))
    assert clocks.rings.read("a").minutes == (None,) * MINUTES
    assert clocks.ended("b", 1) == [2]


class Death(BaseException):
    pass


class DyingWords:
    """Shared words whose writer dies after a number of written words, perhaps in the middle of a slice."""

    def __init__(self, words: Any, left: int) -> None:
        self._words, self._left = words, left

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        cells = range(at.start, at.stop) if isinstance(at, slice) else (at,)
        values = value if isinstance(at, slice) else (value,)
        if len(cells) <= self._left:
            self._left -= len(cells)
            self._words[at] = value
            return
        for cell, one in zip(cells[: self._left], values, strict=False):
            self._words[cell] = one
        raise Death


# What each queue did in each minute, and whether it is dropped: "old" ends, "new" begins in the minute of the death.
SCRIPT: tuple[dict[str, QueueStats], ...] = (
    {"a": stats(0), "b": stats(0), "old": stats(0)},
    {"a": stats(10, 1, 4), "b": stats(20, 2, 8), "old": stats(5)},
    {"a": stats(20, 2, 8), "b": stats(7, 1, 2), "new": stats(3)},
    {"a": stats(30, 3, 12), "b": stats(14, 2, 4), "new": stats(6)},
    {"a": stats(40, 4, 16), "b": stats(21, 3, 6), "new": stats(9)},
)
RIGHT: dict[str, list[int | None]] = {
    "a": [10, 10, 10, 10],
    "b": [20, 7, 7, 7],
    "new": [None, 3, 3, 3],
    "old": [5, None, None, None],
}


def check(clocks: Clocks, dying: int, *, healthy: int) -> None:
    """No minute is wrong, and those that no death concerns are known. `healthy`: minutes after the death."""
    found = clocks.rings.read_all()
    assert set(found) <= set(RIGHT)
    for name, hour in found.items():
        begin = minute_of(BEGIN) + 1
        for at, minute in enumerate(hour.minutes):
            epoch = hour.newest - MINUTES + 1 + at
            right = RIGHT[name][epoch - begin] if 0 <= epoch - begin < 4 else None
            if minute is None:
                continue
            assert minute.ended == right, (dying, name, epoch - begin)
            assert minute.failed <= minute.ended
            assert minute.run_micros == 100 * minute.ended
            assert (minute.wait_p50_us is None) == (minute.waits == 0)
        if healthy > 1 and name in ("a", "b", "new"):
            assert hour.minutes[-1] is not None, (dying, name)


@pytest.mark.parametrize("number", [3, 8])
def test_a_writer_may_die_after_any_word(number: int) -> None:
    """With 3 entries, the new queue takes the entry of the old one in the same write."""
    died, dying = True, 0
    while died:
        died = False
        clocks = Clocks(number)
        for queues in SCRIPT[:2]:
            clocks.write(**queues)
        shared = clocks.rings._words
        clocks.rings._words = DyingWords(shared, dying)  # type: ignore[assignment]
        try:
            clocks.write(**SCRIPT[2])
        except Death:
            died = True
        clocks.rings._words = shared
        check(clocks, dying, healthy=0)
        clocks.replace_writer()
        check(clocks, dying, healthy=0)
        for healthy, queues in enumerate(SCRIPT[3:], 1):
            clocks.write(**queues)
            check(clocks, dying, healthy=healthy)
        dying += 1
    assert dying > 200


@given(st.lists(st.integers(0, 2**38 - 1), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(micros: list[int], share: float) -> None:
    buckets = list(NONE)
    for one in micros:
        buckets[one.bit_length()] += 1
    exact = next(one for at, one in enumerate(sorted(micros), 1) if at >= share * len(micros))
    found = wait_quantile(buckets, share)
    assert found is not None
    assert 1 << exact.bit_length() >> 1 <= found <= 1 << exact.bit_length()


def test_a_quantile_of_nothing_is_none_and_the_last_bucket_gives_its_lower_bound() -> None:
    assert wait_quantile(NONE, 0.5) is None
    assert wait_quantile([*NONE[1:], 3], 0.99) == 2**38
    assert wait_quantile([4, *NONE[1:]], 0.99) == 0


@pytest.mark.parametrize(("now", "seconds"), [(0.0, 60.0), (59.5, 0.5), (60.0, 60.0), (61.25, 58.75)])
def test_the_next_boundary(now: float, seconds: float) -> None:
    assert seconds_to_boundary(now) == seconds


def test_a_thousand_queues_are_written_in_time() -> None:
    clocks = Clocks(1000)
    best = 1.0
    for number in range(1, 7):
        queues = {f"queue-{at}": stats(number * at, number, number * at) for at in range(1000)}
        began = time.thread_time()
        clocks.write(**queues)
        best = min(best, time.thread_time() - began)
    # 20 ms, and room for a slow machine.
    assert best < 0.1
    assert len(clocks.rings.read_all()) == 1000


def test_memory_is_small_and_only_used_for_entries_that_are_written() -> None:
    assert ENTRY_BYTES < 4600
    before = shared_kib()
    clocks = Clocks(10_000)
    assert shared_kib() - before < 100
    clocks.write(**{f"q{at}": stats() for at in range(100)})
    assert 400 <= shared_kib() - before < 700


def shared_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))


def test_the_import_is_cheap() -> None:
    code = (
        "import forq.procs.minutes, sys; print([name for name in ('numpy', 'redis', 'orjson') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
