"""watch: one job until it has ended, a line per change, at last its result; on a terminal its progress is a bar."""

from __future__ import annotations

import os
import sys
import time

from forq.ctl.client import Client, connect
from forq.ctl.tables import moment, printable, show_json
from forq.errors import RedisUnavailable, TimedOut
from forq.progress import show_progress
from forq.progress_line import ProgressLine, drawn_bar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

# How long one question waits for a change.
QUESTION_SECONDS = 5.0
ASK_AGAIN_SECONDS = 0.5
DEFAULT_COLUMNS = 80
DEAD = 1


def watch(args: Namespace) -> int:
    from forq.values import parse_duration

    until = None if args.wait is None else time.monotonic() + parse_duration(args.wait)
    screen = _Screen(args.json)
    client, seen = connect(args), None
    while True:
        job = _ask(client, {"name": args.name, "id": args.id, "seen": seen}, until)
        if job is not None and job["seen"] != seen:
            seen = job.pop("seen")
            screen.show(job)
            if job["state"] in ("dead", "done", "gone"):
                return DEAD if job["state"] == "dead" else 0
        if until is not None and time.monotonic() >= until:
            screen.end()
            raise TimedOut(f"job {args.id} is still in queue {args.name}")


def _ask(client: Client, params: dict[str, Any], until: float | None) -> dict[str, Any] | None:
    """What is new of the job. None while Redis is away: then it is asked for again, unless that is the first answer."""
    left_seconds = QUESTION_SECONDS if until is None else max(0.0, until - time.monotonic())
    wait_seconds = min(left_seconds, QUESTION_SECONDS)
    try:
        job: dict[str, Any] = client.call("watch", {**params, "wait": wait_seconds}, wait_seconds=wait_seconds)
    except RedisUnavailable:
        if params["seen"] is None:
            raise
        time.sleep(min(ASK_AGAIN_SECONDS, left_seconds))
        return None
    return job


class _Screen:
    def __init__(self, json: bool) -> None:
        self._json = json
        self._line = ProgressLine()
        self._bars = self._line.shown and sys.stdout.isatty() and not json

    def show(self, job: dict[str, Any]) -> None:
        if self._json:
            show_json(job)
            return
        progress = job.get("progress")
        if self._bars and progress is not None:
            self._line.say(_bar(progress["fraction"], progress["text"]))
            return
        self.end()
        print(_described(job), flush=True)

    def end(self) -> None:
        """What is printed next begins on a line of its own."""
        if self._bars:
            self._line.clear()


def _bar(fraction: float, text: str) -> str:
    line = f"{drawn_bar(fraction, 1)} {printable(show_progress(fraction, text))}"
    # A line that is wrapped could not be drawn over. Some terminals do not say how wide they are.
    return line[: (os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS) - 1]


def _described(job: dict[str, Any]) -> str:
    state, progress, error = job["state"], job.get("progress"), job.get("error")
    if state == "gone":
        return "gone: it is done, released or cancelled"
    if state == "done":
        return f"done: {_result(job)}"
    if progress is not None:
        return f"{state} {printable(show_progress(progress['fraction'], progress['text']))}"
    if isinstance(error, dict):
        return printable(f"{state}: {error.get('name')}: {error.get('message')}")
    return f"{state} until {moment(job['run_at'])}" if job.get("run_at") else str(state)


def _result(job: dict[str, Any]) -> str:
    if "result_error" in job:
        return printable(f"no result: {job['result_error']}")
    from forq.procs.wire import encode

    return printable(encode(job["result"]).decode())
