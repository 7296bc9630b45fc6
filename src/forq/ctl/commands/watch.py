"""The commands watch (one job until its end), logs (the output of a queue) and top (all queues, refreshed)."""

from __future__ import annotations

import os
import sys
import time

from forq.ctl.client import ControlClient, connect
from forq.ctl.command import ID, NAME, ON, WAIT, Argument, Command, duration, elsewhere
from forq.ctl.output import as_json, iso_time, print_json, printable, use_colour
from forq.errors import RedisUnavailable, TimedOut, UsageError
from forq.progress_line import ProgressLine, bar_text
from forq.values import show_progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

# How long one request waits for a change, or for new lines.
POLL_SECONDS = 5.0
RETRY_SECONDS = 0.5
DEFAULT_COLUMNS = 80
DEAD = 1
DEFAULT_LINES = 100
MIN_INTERVAL_SECONDS = 0.1


@Command(
    "watch",
    "follow a job until it has ended; exits with 1 if it failed for good",
    NAME,
    ID,
    WAIT,
    examples=["watch mails 01JD0Z --wait 5m"],
    json="the result of `watch` without `seen`: one object per change, one per line",
    exits={
        1: "the job failed for good, or the request was refused",
        4: "no such queue or job",
        6: "not ended within --wait, or no answer in time",
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
            raise TimedOut(f"job {args.id} of queue {args.name} has not ended yet")


def _poll(client: ControlClient, params: dict[str, Any], until: float | None) -> dict[str, Any] | None:
    """The job after its next change; None if Redis is unavailable, except at the first request, which fails."""
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
        """The next output starts on its own line."""
        if self._bars:
            self._line.clear()


def _progress_bar(fraction: float, text: str) -> str:
    line = f"{bar_text(fraction, 1)} {printable(show_progress(fraction, text))}"
    # A wrapped line could not be redrawn. Some terminals report a width of 0.
    return line[: (os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS) - 1]


def _job_text(job: dict[str, Any]) -> str:
    state, progress, error = job["state"], job.get("progress"), job.get("error")
    if state == "gone":
        return "gone: done, released or cancelled"
    if state == "done":
        return f"done: {_result_text(job)}"
    if progress is not None:
        return f"{state} {printable(show_progress(progress['fraction'], progress['text']))}"
    if isinstance(error, dict):
        return printable(f"{state}: {error.get('name')}: {error.get('message')}")
    # A held job may have a time, too, but its dependencies may end later.
    return f"{state} until {iso_time(job['run_at'])}" if state == "scheduled" and job.get("run_at") else str(state)


def _result_text(job: dict[str, Any]) -> str:
    if "result_error" in job:
        return printable(f"no result: {job['result_error']}")
    return as_json(job["result"])


@Command(
    "logs",
    "show the output and log messages of a queue's handlers",
    NAME,
    Argument("--follow", "-f", action="store_true", help="keep printing new lines, until Ctrl-C"),
    Argument("--job", metavar="ID", help="only lines of this job"),
    Argument(
        "--lines",
        "-n",
        type=int,
        default=DEFAULT_LINES,
        metavar="N",
        help=f"number of lines to start with (default: {DEFAULT_LINES})",
    ),
    ON,
    more="Older output is deleted when the files are rotated (log_max). Lines dropped because of too much output are "
    "reported. The output of a queue is on the host that ran its jobs: --on reads it there, without --follow.",
    examples=[
        "logs mails -n 20",
        "logs mails -f --job 01JD0Z  # follow one job",
        "logs mails --on web-2  # of the supervisor on another host",
    ],
    json="the `records` of `logs`, one object per line",
    exits={4: "no such supervisor, or no output of a queue with that name"},
)
def logs(args: Namespace) -> int:
    from collections import deque

    if args.lines < 0:
        raise UsageError(f"--lines {args.lines} is not allowed: it must be 0 or more")
    if args.follow and args.on is not None:
        raise UsageError("--follow cannot be used with --on: run it on that host")
    client, output = connect(args), _LogOutput(args.json)
    params: dict[str, Any] = {"name": args.name, "job": args.job, "lines": args.lines, **elsewhere(args)}
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
        print("forqctl: output was written faster than it could be read; some lines are missing", file=sys.stderr)
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
    "show all queues, refreshed every second, with keys to pause and resume them",
    duration("--interval", "refresh interval (default: 1s)", default=1.0),
    Argument("--plain", action="store_true", help="print a block of text each time, even on a terminal"),
    Argument("--count", type=int, metavar="N", help="exit after this many blocks (plain or JSON)"),
    more="On a terminal it is a full screen: arrows or j and k move, enter shows one queue, p pauses, r resumes, s "
    "sorts, q or escape goes back or quits. It needs rich (pip install 'forq[top]'). Without a terminal, or with "
    "--plain or TERM=dumb, it prints a block of text each time; with --json one object per line. Rates are differences "
    "between two answers, so the first block has none.",
    examples=["top  # full screen", "top --json --count 2 --interval 5s  # a sample for a script"],
    json="one object per line: `at`, `reachable`, `supervisor`, `capacity` and `queues` with their rates; `error` if "
    "the supervisor is not reachable",
    exits={7: "no supervisor running at the start (later it reconnects)"},
)
def top(args: Namespace) -> int:
    if args.interval_seconds < MIN_INTERVAL_SECONDS:
        raise UsageError(f"--interval must be at least {MIN_INTERVAL_SECONDS:g} s")
    if args.count is not None and args.count < 1:
        raise UsageError("--count must be at least 1")
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
