"""Lifespans of apps: entered and left in one task, in order, within their limit."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from forq.workers import lifespan as lifespan_module
from forq.workers.event_loop import EventLoop
from forq.workers.lifespan import LifespanFailed, Lifespans

SEEN: list[Any] = []


@pytest.fixture
def event_loop() -> Iterator[EventLoop]:
    SEEN.clear()
    event_loop = EventLoop()
    yield event_loop
    event_loop.close()


def sync_one() -> Iterator[None]:
    SEEN.append(("sync enters", threading.get_ident()))
    yield
    SEEN.append(("sync leaves", threading.get_ident()))


async def async_one() -> AsyncIterator[None]:
    SEEN.append(("async enters", asyncio.current_task()))
    async with asyncio.timeout(60):
        yield
    SEEN.append(("async leaves", asyncio.current_task()))


def lifespans(event_loop: EventLoop, *hooks: Callable[[], Any], limit_seconds: float = 30) -> Lifespans:
    given = [(f"the lifespan {each.__name__}", each, "async" in each.__name__) for each in hooks]
    return Lifespans(given, event_loop, GIVEN_UP.append, limit_seconds)


GIVEN_UP: list[LifespanFailed] = []


def test_they_are_left_in_reverse_order_by_the_thread_or_task_that_entered_them(event_loop: EventLoop) -> None:
    both = lifespans(event_loop, sync_one, async_one)
    both.enter()
    assert [each for each, _ in SEEN] == ["sync enters", "async enters"]
    both.leave()
    assert [each for each, _ in SEEN] == ["sync enters", "async enters", "async leaves", "sync leaves"]
    assert SEEN[0][1] == SEEN[3][1] == threading.get_ident()
    assert SEEN[1][1] is SEEN[2][1]


def fails() -> Iterator[None]:
    raise SystemExit("no database")
    yield


async def async_fails() -> AsyncIterator[None]:
    await asyncio.sleep(0)
    raise ConnectionError("no database")
    yield


def yields_nothing() -> Iterator[None]:
    yield from ()


async def async_yields_nothing() -> AsyncIterator[None]:
    if SEEN is None:
        yield


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (fails, "the lifespan fails failed: SystemExit: no database"),
        (async_fails, "the lifespan async_fails failed: ConnectionError: no database"),
        (yields_nothing, "the lifespan yields_nothing failed: RuntimeError: it did not yield"),
        (async_yields_nothing, "the lifespan async_yields_nothing failed: RuntimeError: it did not yield"),
    ],
)
def test_a_failure_names_the_lifespan_and_leaves_those_entered_before(
    event_loop: EventLoop, hook: Callable[[], Any], message: str
) -> None:
    both = lifespans(event_loop, async_one, hook)
    with pytest.raises(LifespanFailed) as caught:
        both.enter()
    assert str(caught.value).startswith(message)
    if "database" in message:
        assert caught.value.traceback is not None
        assert f"in {hook.__name__}" in caught.value.traceback
        assert "lifespan.py" not in caught.value.traceback.replace("test_lifespan.py", "")
    assert [each for each, _ in SEEN] == ["async enters", "async leaves"]


def yields_twice() -> Iterator[None]:
    yield
    yield


async def async_fails_at_its_end() -> AsyncIterator[None]:
    yield
    raise ValueError("not closed")


def test_failures_at_the_end_are_logged_and_the_others_left(
    event_loop: EventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    several = lifespans(event_loop, sync_one, yields_twice, async_fails_at_its_end)
    several.enter()
    several.leave()
    messages = [record.getMessage().partition("\n")[0] for record in caplog.records]
    assert messages[0].startswith("the lifespan async_fails_at_its_end failed at its end: ValueError: not closed")
    assert messages[1].startswith("the lifespan yields_twice failed at its end: RuntimeError: it yielded twice")
    assert SEEN[-1][0] == "sync leaves"


async def async_hangs() -> AsyncIterator[None]:
    await asyncio.sleep(3600)
    yield


def test_an_async_lifespan_that_hangs_is_cancelled_at_its_limit(event_loop: EventLoop) -> None:
    hanging = lifespans(event_loop, async_hangs, limit_seconds=0.05)
    with pytest.raises(LifespanFailed, match=r"TimeoutError: it did not yield within 0.05 s") as caught:
        hanging.enter()
    assert "await asyncio.sleep(3600)" in str(caught.value.traceback)


def hangs() -> Iterator[None]:
    until = time.monotonic() + 30
    while not GIVEN_UP and time.monotonic() < until:
        time.sleep(0.01)
    yield


def test_a_sync_lifespan_that_hangs_ends_the_process(event_loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    GIVEN_UP.clear()
    monkeypatch.setattr(lifespan_module, "GRACE_SECONDS", 0.0)
    lifespans(event_loop, hangs, limit_seconds=0.05).enter()
    assert str(GIVEN_UP[0]) == "the lifespan hangs did not yield within 0.05 s"
    assert "in hangs" in str(GIVEN_UP[0].traceback)


def ends_slowly() -> Iterator[None]:
    yield
    time.sleep(0.8)


def test_a_lifespan_that_hangs_leaves_the_others_their_own_time(
    event_loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    GIVEN_UP.clear()
    monkeypatch.setattr(lifespan_module, "GRACE_SECONDS", 0.5)
    with pytest.raises(LifespanFailed, match="async_hangs"):
        lifespans(event_loop, ends_slowly, async_hangs, limit_seconds=1).enter()
    assert GIVEN_UP == []
