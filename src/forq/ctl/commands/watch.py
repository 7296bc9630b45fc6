"""watch: one job until it has ended, a line per change, at last its result; on a terminal its progress is a bar.

logs: what a queue's processes have written, and what they write. top: the queues as they are now, again and again.
"""

from __future__ import annotations

import os
import sys
import time

from forq.ctl.client import ControlClient, connect
from forq.ctl.command import ID, NAME, WAIT, Argument, Command, duration
from forq.ctl.output import as_json, iso_time, print_json, printable, use_colour
from forq.errors import RedisUnavailable, TimedOut, UsageError
from forq.progress import show_progress
from forq.progress_line import ProgressLine, bar_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

# How long one question waits for a change, or for new lines.
POLL_SECONDS = 5.0
RETRY_SECONDS = 0.5
DEFAULT_COLUMNS = 80
DEAD = 1
DEFAULT_LINES = 100
MIN_INTERVAL_SECONDS = 0.1


@Command(
    "watch",
    "follow a job until it leaves the queue; exits with 1 if it failed for good",
    NAME,
    ID,
    WAIT,
    examples=["watch mails 01JD0Z --wait 5m"],
    json="the result of `watch` without `seen`, one object per line, at each change",
    exits={
        1: "the job failed for good, or refused",
        4: "no such queue or job",
        6: "it is still there after --wait, or no answer in time",
    },
)
def watch(args: Namespace) -> int:
    until = None if args.wait_seconds is None else time.monotonic() + args.wait_seconds
    output = _JobOutput(args.json)
    client, seen = connect(args), None
    while True:
        job = _poll(client, {"name": args.name, "id": args.id, "seen": seen}, until)
        if job is not None and job["seen"] != seen:
            seen = job.pop("seen")
            output.show(job)
            if job["state"] in ("dead", "done", "gone"):
                return DEAD if job["state"] == "dead" else 0
        if until is not None and time.monotonic() >= until:
            output.end()
            raise TimedOut(f"job {args.id} is still in queue {args.name}")


def _poll(client: ControlClient, params: dict[str, Any], until: float | None) -> dict[str, Any] | None:
    """What is new of the job. None while Redis is away: then it is asked for again, unless that is the first answer."""
    left_seconds = POLL_SECONDS if until is None else max(0.0, until - time.monotonic())
    wait_seconds = min(left_seconds, POLL_SECONDS)
    try:
        job: dict[str, Any] = client.call("watch", {**params, "wait": wait_seconds}, wait_seconds=wait_seconds)
    except RedisUnavailable:
        if params["seen"] is None:
            raise
        time.sleep(min(RETRY_SECONDS, left_seconds))
        return None
    return job


class _JobOutput:
    def __init__(self, json: bool) -> None:
        self._json = json
        self._line = ProgressLine()
        self._bars = self._line.on_terminal and sys.stdout.isatty() and not json

    def show(self, job: dict[str, Any]) -> None:
        if self._json:
            print_json(job)
            return
        progress = job.get("progress")
        if self._bars and progress is not None:
            self._line.update(_progress_bar(progress["fraction"], progress["text"]))
            return
        self.end()
        print(_job_text(job), flush=True)

    def end(self) -> None:
        """What is printed next begins on a line of its own."""
        if self._bars:
            self._line.clear()


def _progress_bar(fraction: float, text: str) -> str:
    line = f"{bar_text(fraction, 1)} {printable(show_progress(fraction, text))}"
    # A line that is wrapped could not be drawn over. Some terminals do not say how wide they are.
    return line[: (os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS) - 1]


def _job_text(job: dict[str, Any]) -> str:
    state, progress, error = job["state"], job.get("progress"), job.get("error")
    if state == "gone":
        return "gone: it is done, released or cancelled"
    if state == "done":
        return f"done: {_result_text(job)}"
    if progress is not None:
        return f"{state} {printable(show_progress(progress['fraction'], progress['text']))}"
    if isinstance(error, dict):
        return printable(f"{state}: {error.get('name')}: {error.get('message')}")
    return f"{state} until {iso_time(job['run_at'])}" if job.get("run_at") else str(state)


def _result_text(job: dict[str, Any]) -> str:
    if "result_error" in job:
        return printable(f"no result: {job['result_error']}")
    return as_json(job["result"])


@Command(
    "logs",
    "show what the handlers of a queue print and log",
    NAME,
    Argument("--follow", "-f", action="store_true", help="go on with what they write from now on, until Ctrl-C"),
    Argument("--job", metavar="ID", help="only of this job"),
    Argument(
        "--lines",
        "-n",
        type=int,
        default=DEFAULT_LINES,
        metavar="N",
        help=f"the last so many lines (default: {DEFAULT_LINES})",
    ),
    more="What was written before the files were rotated twice (log_max) is gone; what was left out of a flood is "
    "said.",
    examples=["logs mails -n 20", "logs mails -f --job 01JD0Z  # follow one job"],
    json="the `records` of `logs`, one object per line",
    exits={4: "nothing was ever kept of a queue of that name"},
)
def logs(args: Namespace) -> int:
    from collections import deque

    if args.lines < 0:
        raise UsageError(f"--lines {args.lines} is not allowed: 0 or more")
    client, output = connect(args), _LogOutput(args.json)
    params: dict[str, Any] = {"name": args.name, "job": args.job, "lines": args.lines}
    last: deque[dict[str, Any]] = deque(maxlen=args.lines)
    cursor = None
    while True:
        answer = client.call("logs", {**params, "cursor": cursor})
        last.extend(answer["records"])
        cursor = answer["cursor"]
        if not answer["more"]:
            break
    output.show(last)
    while args.follow:
        cursor = _follow(client, {**params, "cursor": cursor}, output)
    return 0


def _follow(client: ControlClient, params: dict[str, Any], output: _LogOutput) -> str:
    answer = client.call("logs", {**params, "wait": POLL_SECONDS}, wait_seconds=POLL_SECONDS)
    if answer["skipped"]:
        print("forqctl: more was written than could be read: some lines are missing", file=sys.stderr)
    output.show(answer["records"])
    return str(answer["cursor"])


class _LogOutput:
    def __init__(self, json: bool) -> None:
        from forq.log_format import LogFormat

        self._json = json
        self._format = LogFormat(json=False, colour=use_colour(sys.stdout), date=not sys.stdout.isatty())

    def show(self, records: Any) -> None:
        for record in records:
            if self._json:
                print_json(record)
            else:
                print(self._format.render(record))
        sys.stdout.flush()


@Command(
    "top",
    "show the queues as they are now, again and again, with keys to pause and resume them",
    duration("--interval", "how often (default: 1s)", default=1.0),
    Argument("--plain", action="store_true", help="a block of text each time, also on a terminal"),
    Argument("--count", type=int, metavar="N", help="end after so many blocks (plain or JSON)"),
    more="On a terminal it is a screen: arrows or j and k move, enter shows one queue, p pauses, r resumes, s sorts, q "
    "or escape goes back or quits. It needs rich (pip install 'forq[top]'). Anywhere else, with --plain or TERM=dumb, "
    "it is a block of text each time; with --json an object per line. Rates are differences between two answers, so "
    "the first block has none.",
    examples=["top  # a screen", "top --json --count 2 --interval 5s  # a sample for a script"],
    json="one object per line: `at`, `reachable`, `supervisor`, `capacity` and `queues` with their rates; `error` if "
    "the supervisor is not reachable",
    exits={7: "no supervisor there at the start (later it is tried again)"},
)
def top(args: Namespace) -> int:
    if args.interval_seconds < MIN_INTERVAL_SECONDS:
        raise UsageError(f"--interval is at least {MIN_INTERVAL_SECONDS:g} s")
    if args.count is not None and args.count < 1:
        raise UsageError("--count is at least 1")
    if args.json or args.plain or args.count is not None or not _has_screen():
        from forq.ctl.top import print_blocks

        return print_blocks(args)
    try:
        from forq.ctl.screen import run_screen
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "rich":
            raise
        raise UsageError("the screen of top needs rich: pip install 'forq[top]', or use --plain") from exc
    return run_screen(args)


def _has_screen() -> bool:
    return os.environ.get("TERM", "dumb") != "dumb" and sys.stdin.isatty() and sys.stdout.isatty()
