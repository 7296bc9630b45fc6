"""Waiting for what takes long: `status` is asked meanwhile, and what is waited for is said on stderr."""

from __future__ import annotations

import sys
import time

from forq.ctl.tables import printable, span
from forq.errors import ForqError, TimedOut
from forq.progress_line import ProgressLine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from forq.ctl.client import Client

POLL_SECONDS = 1.0
# What is over at once needs no look.
FIRST_POLL_SECONDS = 0.2
# Where no terminal is, a line is written after this time, and then more and more seldom.
FIRST_TOLD_SECONDS, LAST_TOLD_SECONDS = 1.0, 60.0
MOST_JOBS = 5


class Waiting:
    """Says what is waited for: on a terminal in one line that is drawn anew; elsewhere, if `lines`, now and then."""

    def __init__(self, *, lines: bool) -> None:
        self._line = ProgressLine()
        self._lines = lines
        self._pause_seconds = FIRST_TOLD_SECONDS
        self._next_told = time.monotonic() + FIRST_TOLD_SECONDS
        self._noted: str | None = None

    def say(self, text: str) -> None:
        if self._line.shown:
            self._line.say(text)
        elif self._lines and time.monotonic() >= self._next_told:
            print(f"forqctl: {text}", file=sys.stderr, flush=True)
            self._next_told = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, LAST_TOLD_SECONDS)

    def note(self, text: str | None) -> None:
        """What stays on the terminal, once: it does not pass by itself. None: there is nothing of the kind."""
        if text is not None and text != self._noted:
            self._line.clear()
            print(f"forqctl: {text}", file=sys.stderr, flush=True)
        self._noted = text

    def first_poll_seconds(self) -> float:
        return 0.0 if self._line.shown else FIRST_POLL_SECONDS

    def end(self) -> None:
        self._line.clear()


def wait_for(
    client: Client,
    wanted: int,
    asked: dict[str, Any],
    tell: Callable[[Waiting, Any], None],
    deadline: float | None,
    too_late: str,
    *,
    lines: bool,
) -> Any:
    """The answer to the request `wanted`. Until it comes, `tell` gets the answers to `status` with the params `asked`.
    TimedOut with `too_late` after the deadline, or if the supervisor does not answer that in time."""
    waiting = Waiting(lines=lines)
    polled = None
    # When to ask next; while an answer is awaited, when the supervisor is given up.
    next_step = time.monotonic() + waiting.first_poll_seconds()
    try:
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimedOut(too_late)
            if now >= next_step:
                if polled is not None:
                    raise client.too_late()
                polled, next_step = client.send("status", asked), now + client.timeout_seconds
            answer = _next_answer(client, next_step if deadline is None else min(deadline, next_step))
            if answer is None:
                continue
            answered, value = answer
            if answered == wanted:
                if isinstance(value, ForqError):
                    raise value
                return value
            if answered == polled:
                polled, next_step = None, time.monotonic() + POLL_SECONDS
                if not isinstance(value, ForqError):
                    tell(waiting, value)
    finally:
        waiting.end()


def _next_answer(client: Client, until: float) -> tuple[str | int | None, Any] | None:
    try:
        return client.receive(until)
    except TimedOut:
        return None


def running_jobs(queues: list[dict[str, Any]], *, with_queue: bool) -> str:
    """The jobs that run here, those that run longest first: some with id and time, and how many more."""
    found = [
        (seconds or 0.0, f"{queue['name']} {job}" if with_queue else str(job))
        for queue in queues
        for child in queue["children"]
        for job, seconds in zip(child.get("jobs", ()), child.get("jobs_seconds", ()), strict=False)
    ]
    found.sort(key=lambda job: -job[0])
    shown = [f"{printable(name)} ({span(seconds)})" for seconds, name in found[:MOST_JOBS]]
    more = len(found) - MOST_JOBS
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])
