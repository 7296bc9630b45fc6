"""Delays before a dead child is restarted, and the number of queues that start at once. The clock is fake."""

import random
from collections.abc import Iterator

import pytest

from forq.procs.loop import Loop
from forq.supervisor.pacing import (
    FLAPPING_DEATHS,
    FREE_DEATHS,
    LONGEST_DELAY_SECONDS,
    LONGEST_START_SECONDS,
    SETTLED_SECONDS,
    Admission,
    Respawn,
)


class Middle(random.Random):
    """No jitter, so that delays can be compared."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


@pytest.fixture
def respawn() -> Respawn:
    return Respawn(Middle())


def test_a_child_that_settled_a_job_is_always_replaced_at_once(respawn: Respawn) -> None:
    assert [respawn.delay_after_death(0.1, progressed=True) for _ in range(50)] == [0.0] * 50
    assert not respawn.flapping


def test_the_delay_doubles_with_each_death_without_a_job(respawn: Respawn) -> None:
    delays = [respawn.delay_after_death(0.1) for _ in range(12)]
    assert delays[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert delays[-1] == LONGEST_DELAY_SECONDS


def test_a_job_that_kills_its_process_is_delayed_after_a_few_tries(respawn: Respawn) -> None:
    delays = [respawn.delay_after_death(0.1, began=True) for _ in range(FREE_DEATHS + 2)]
    assert delays == pytest.approx([0.0] * FREE_DEATHS + [0.1, 0.2])


def test_flapping_begins_after_several_deaths_and_ends_with_a_settled_job(respawn: Respawn) -> None:
    for _ in range(FLAPPING_DEATHS - 1):
        respawn.delay_after_death(0.1)
    assert not respawn.flapping
    respawn.delay_after_death(0.1)
    assert respawn.flapping
    respawn.delay_after_death(0.1, progressed=True)
    assert not respawn.flapping


def test_a_long_life_resets_earlier_deaths(respawn: Respawn) -> None:
    for _ in range(8):
        respawn.delay_after_death(0.1)
    assert respawn.delay_after_death(SETTLED_SECONDS) == 0.0
    assert respawn.delay_after_death(0.1) == pytest.approx(0.1)


def test_respawning_never_stops(respawn: Respawn) -> None:
    assert max(respawn.delay_after_death(0.0) for _ in range(10_000)) == LONGEST_DELAY_SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(clock: Clock) -> Iterator[Loop]:
    loop = Loop(clock)
    yield loop
    loop.close()


def request_start(admission: Admission, names: str, started: list[str]) -> None:
    for name in names:

        def start(name: str = name) -> None:
            admission.started(name)
            started.append(name)

        admission.submit(start)


def passes(loop: Loop, count: int = 10) -> None:
    for _ in range(count):
        loop.tick(0)


def test_one_queue_starts_per_pass_in_order_up_to_the_limit(loop: Loop) -> None:
    admission, started = Admission(loop, most=2), list[str]()
    request_start(admission, "abc", started)
    assert started == []
    loop.tick(0)
    assert started == ["a"]
    passes(loop)
    assert started == ["a", "b"]


def test_a_queue_that_is_ready_or_has_ended_frees_its_place_once(loop: Loop) -> None:
    admission, started = Admission(loop, most=1), list[str]()
    request_start(admission, "abc", started)
    passes(loop)
    admission.finished("a")
    admission.finished("a")
    passes(loop)
    assert started == ["a", "b"]


def test_a_queue_that_never_becomes_ready_does_not_delay_others_for_long(loop: Loop, clock: Clock) -> None:
    admission, started = Admission(loop, most=1), list[str]()
    request_start(admission, "ab", started)
    passes(loop)
    clock.now += LONGEST_START_SECONDS - 0.01
    passes(loop)
    assert started == ["a"]
    clock.now += 0.02
    passes(loop)
    assert started == ["a", "b"]


def test_a_failed_start_does_not_stop_the_others(loop: Loop) -> None:
    admission, started = Admission(loop, most=1), list[str]()

    def fail() -> None:
        raise OSError("no processes left")

    admission.submit(fail)
    request_start(admission, "a", started)
    passes(loop)
    assert started == ["a"]
