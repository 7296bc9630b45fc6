"""The stacks of coroutines that wait or run on the event loop."""

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from forq.workers.coroutine_stacks import MAX_FRAMES, coroutine_stack
from forq.workers.event_loop import Cancelled, EventLoop, Run
from tests.support.drive.wait import wait_until


@pytest.fixture
def event_loop() -> Iterator[EventLoop]:
    event_loop = EventLoop()
    yield event_loop
    event_loop.close()


def names(stack: str) -> list[str]:
    """Of the functions, innermost first, without asyncio's."""
    lines = [line for line in stack.splitlines() if "/asyncio/" not in line]
    return [re.sub(r"^.* line \d+ in ", "", line) for line in lines]


def stack_when(event_loop: EventLoop, coroutine: Coroutine[Any, Any, Any], inner: str) -> str:
    """The stack of the coroutine once this function is in it."""
    run = Run(coroutine, "j1")
    chain = event_loop.begin(run)
    try:
        wait_until(lambda: f"in {inner}" in coroutine_stack(run, event_loop), what=inner)
        # It waits from now on.
        return coroutine_stack(run, event_loop)
    finally:
        event_loop.cancel(run, Cancelled.RETURNED)
        event_loop.finish(chain)
        with pytest.raises(asyncio.CancelledError):
            run.outcome()


async def sleeps() -> None:
    await asyncio.sleep(60)


async def outer(inner: Any) -> None:
    await inner


async def gathers() -> None:
    await asyncio.gather(sleeps(), asyncio.sleep(0), outer(sleeps()))


async def awaits_a_task() -> None:
    await asyncio.create_task(sleeps(), name="other")


async def groups() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(sleeps())


def test_the_chain_of_awaits_is_shown_innermost_first(event_loop: EventLoop) -> None:
    stack = stack_when(event_loop, outer(sleeps()), "sleeps")
    assert names(stack) == ["sleeps", "outer"]
    assert re.search(r'^  File ".*tasks.py", line \d+ in sleep$', stack.splitlines()[0])


@pytest.mark.parametrize(
    ("coroutine", "expected"),
    [
        (gathers, ["sleeps", "sleeps", "outer", "gathers"]),
        (awaits_a_task, ["  in task 'other', which is awaited here:", "sleeps", "awaits_a_task"]),
        (groups, ["sleeps", "groups"]),
    ],
)
def test_tasks_that_it_awaits_are_shown(event_loop: EventLoop, coroutine: Any, expected: list[str]) -> None:
    found = names(stack_when(event_loop, coroutine(), "sleeps"))
    shown = [name for name in found if not name.startswith("  in task 'Task-")]
    assert shown == expected


def test_code_that_blocks_the_loop_is_shown_where_it_is(event_loop: EventLoop) -> None:
    unblock = threading.Event()

    def blocks() -> None:
        unblock.wait(30)

    async def handle() -> None:
        await asyncio.sleep(0)
        blocks()

    run, other = Run(handle(), "j1"), Run(sleeps(), "j2")
    chain = event_loop.begin(run)
    event_loop.begin(other)
    wait_until(lambda: "in blocks" in coroutine_stack(run, event_loop), what="it blocks")
    assert names(coroutine_stack(run, event_loop))[-2:] == ["blocks", "handle"]
    assert "in blocks" not in coroutine_stack(other, event_loop)
    unblock.set()
    event_loop.finish(chain)


def test_a_deep_stack_is_cut(event_loop: EventLoop) -> None:
    async def deep(levels: int) -> None:
        await (deep(levels - 1) if levels else asyncio.sleep(60))

    stack = stack_when(event_loop, deep(100), "deep")
    assert len(stack.splitlines()) <= MAX_FRAMES
