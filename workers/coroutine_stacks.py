"""The stacks of running coroutines, in the format of faulthandler. A dump of threads does not show coroutines that
wait: the thread of the event loop is in `select`."""

import asyncio
import os
from types import FrameType
from typing import Any

import forq
from forq.workers.event_loop import HANDLE_RUN, EventLoop, Run

MAX_FRAMES = 60
# Tasks that a coroutine awaits, and how deep.
MAX_TASKS = 20
MAX_DEPTH = 3

_FORQ = os.path.dirname(str(forq.__file__)) + os.sep
_TASK_GROUP_EXIT = getattr(asyncio.TaskGroup.__aexit__, "__code__", None)


def coroutine_stack(run: Run, event_loop: EventLoop) -> str:
    """The user's frames of a job's coroutine, innermost first. Called by any thread, while the loop goes on."""
    if event_loop.executing_run() is run:
        lines = _executing(event_loop.executing_frame())
        if not getattr(run.coroutine, "cr_running", False):
            # A task or callback that it started runs.
            lines += _waiting(run.coroutine, None, MAX_DEPTH)
    else:
        task = run.task
        lines = _waiting(run.coroutine, None if task is None else _waits_for(task), 0)
    return "\n".join(lines)


def _executing(frame: FrameType | None) -> list[str]:
    """From the innermost frame of the loop's thread out to the code of forq or asyncio that called the job."""
    frames: list[FrameType] = []
    while frame is not None and frame.f_code is not HANDLE_RUN:
        frames.append(frame)
        frame = frame.f_back
    return _lines(frames)


def _waiting(awaitable: Any, waits_for: Any, depth: int) -> list[str]:
    """The chain of awaits, and the tasks at its end."""
    frames: list[FrameType] = []
    while awaitable is not None and len(frames) < MAX_FRAMES:
        frame = _first(awaitable, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            break
        frames.append(frame)
        awaitable = _first(awaitable, "cr_await", "gi_yieldfrom", "ag_await")
    lines: list[str] = []
    if depth < MAX_DEPTH:
        for task in _awaited_tasks(frames, waits_for)[:MAX_TASKS]:
            lines.append(f"  in task {task.get_name()!r:.100}, which is awaited here:")
            lines += _waiting(task.get_coro(), _waits_for(task), depth + 1)
    return lines + _lines(frames[::-1])


def _awaited_tasks(frames: list[FrameType], waits_for: Any) -> list["asyncio.Task[Any]"]:
    if isinstance(waits_for, asyncio.Task):
        return [waits_for]
    found = getattr(waits_for, "_children", None)
    leaving = next((frame for frame in frames if frame.f_code is _TASK_GROUP_EXIT), None)
    if found is None and leaving is not None:
        found = getattr(leaving.f_locals.get("self"), "_tasks", None)
    return [each for each in found or () if isinstance(each, asyncio.Task) and not each.done()]


def _waits_for(task: "asyncio.Task[Any]") -> Any:
    return getattr(task, "_fut_waiter", None)


def _first(awaitable: Any, *names: str) -> Any:
    for name in names:
        found = getattr(awaitable, name, None)
        if found is not None:
            return found
    return None


def _lines(frames: list[FrameType]) -> list[str]:
    return [
        f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        for frame in frames
        if not frame.f_code.co_filename.startswith(_FORQ)
    ][:MAX_FRAMES]
