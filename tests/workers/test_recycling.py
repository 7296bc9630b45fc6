"""When a process is replaced: after max_jobs, at max_age or max_memory."""

import mmap

import pytest

from forq.procs.cgroups import pss_bytes
from forq.procs.scoreboard import Scoreboard, Slot
from forq.settings import defaults
from forq.workers import recycling
from forq.workers.recycling import Recycling


@pytest.fixture
def slots() -> list[Slot]:
    board = Scoreboard.create(4)
    return [board.slot(board.take()) for _ in range(2)]


def make(slots: list[Slot], now: float = 0.0, **options: float) -> tuple[Recycling, list[str], list[float]]:
    reasons: list[str] = []
    clock = [now]
    return Recycling({**defaults(), **options}, slots, reasons.append, now=lambda: clock[0]), reasons, clock


def test_without_options_a_process_is_never_replaced(slots: list[Slot]) -> None:
    endless, reasons, clock = make(slots)
    slots[0].done = 10**9
    clock[0] = 1e9
    endless.check()
    assert endless.claimable(128, 128) == 128
    assert reasons == []


def test_max_jobs_counts_settled_and_unsettled_jobs_of_all_workers(slots: list[Slot]) -> None:
    limited, reasons, _ = make(slots, max_jobs=10)
    assert limited.claimable(128, 0) == 5, "the other worker may run as many"
    slots[0].done, slots[1].done = 4, 4
    assert limited.claimable(128, 1) == 1
    assert reasons == []
    assert limited.claimable(128, 2) == 0
    assert limited.claimable(128, 2) == 0
    assert reasons == ["max_jobs = 10"]


def test_max_age_is_reported_once(slots: list[Slot]) -> None:
    limited, reasons, clock = make(slots, max_age=60.0)
    clock[0] = 60.0
    limited.check()
    assert reasons == []
    clock[0] = 60.1
    limited.check()
    limited.check()
    assert reasons == ["max_age = 60s"]


def test_max_memory_is_compared_with_the_pss_of_the_process(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    limited, reasons, _ = make(slots, max_memory=1000)
    monkeypatch.setattr(recycling, "pss_bytes", lambda: 1000)
    limited.check()
    assert reasons == []
    monkeypatch.setattr(recycling, "pss_bytes", lambda: 1001)
    limited.check()
    assert reasons == ["max_memory = 1000, used 1001"]


def test_process_memory_is_read_and_is_0_for_an_unknown_pid() -> None:
    before = pss_bytes()
    # New pages: memory that the heap already has would not change the size.
    with mmap.mmap(-1, 50_000_000) as ballast:
        ballast.write(b"x" * 50_000_000)
        assert pss_bytes() - before > 40_000_000
    assert pss_bytes(2**22 + 1) == 0
