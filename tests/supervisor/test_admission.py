"""Queues start a few at a time: order, room, and processes that never become ready. The clock is the test's."""

from collections.abc import Iterator

import pytest

from forq.procs.loop import Loop
from forq.supervisor.pacing import LONGEST_START_SECONDS, Admission


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


def ask_for(admission: Admission, names: str, started: list[str]) -> None:
    for name in names:

        def start(name: str = name) -> None:
            admission.started(name)
            started.append(name)

        admission.submit(start)


def passes(loop: Loop, count: int = 10) -> None:
    for _ in range(count):
        loop.tick(0)


def test_one_starts_per_pass_in_the_order_of_asking_until_there_is_no_room(loop: Loop) -> None:
    admission, started = Admission(loop, most=2), list[str]()
    ask_for(admission, "abc", started)
    assert started == []
    loop.tick(0)
    assert started == ["a"]
    passes(loop)
    assert started == ["a", "b"]


def test_one_that_is_ready_or_has_ended_makes_room_once(loop: Loop) -> None:
    admission, started = Admission(loop, most=1), list[str]()
    ask_for(admission, "abc", started)
    passes(loop)
    admission.finished("a")
    admission.finished("a")
    passes(loop)
    assert started == ["a", "b"]


def test_one_that_never_becomes_ready_holds_nobody_up_for_long(loop: Loop, clock: Clock) -> None:
    admission, started = Admission(loop, most=1), list[str]()
    ask_for(admission, "ab", started)
    passes(loop)
    clock.now += LONGEST_START_SECONDS - 0.01
    passes(loop)
    assert started == ["a"]
    clock.now += 0.02
    passes(loop)
    assert started == ["a", "b"]


def test_a_start_that_fails_does_not_end_the_line(loop: Loop) -> None:
    admission, started = Admission(loop, most=1), list[str]()

    def fail() -> None:
        raise OSError("no processes left")

    admission.submit(fail)
    ask_for(admission, "a", started)
    passes(loop)
    assert started == ["a"]
