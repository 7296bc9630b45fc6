"""The output of forqctl: JSON, aligned tables with colour on a terminal, times and durations; and wait messages."""

from __future__ import annotations

import os
import sys
import time

from forq.progress_line import ProgressLine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence
    from typing import Any

# Commands that finish within this time show no message.
FIRST_POLL_SECONDS = 0.2
# Without a terminal, a line is printed after the first interval, which doubles up to the second.
FIRST_LINE_SECONDS, MAX_LINE_SECONDS = 1.0, 60.0
MAX_JOBS_SHOWN = 5
# Colours of states; rich uses the same names.
COLOURS = {
    **dict.fromkeys(("running", "busy"), "green"),
    **dict.fromkeys(("paused", "draining", "starting", "stopping", "limited", "unserved"), "yellow"),
    **dict.fromkeys(("flapping", "config_error", "stopped", "backoff", "dead"), "red"),
}
_SEQUENCES = {"green": "32", "yellow": "33", "red": "31"}


def print_result(args: Namespace, result: object, text: str) -> int:
    """Prints the result as JSON with --json, else the text. Returns exit code 0."""
    if args.json:
        print_json(result)
    else:
        print(text, flush=True)
    return 0


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """None is shown as "-", numbers are right-aligned, the last column is not padded."""
    body = [list(row) for row in rows]
    cells = [[cell_text(value) for value in row] for row in body]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [_is_numeric([row[index] for row in body]) for index in range(len(header))]
    colour = use_colour(sys.stdout)
    for texts in [list(header), *cells]:
        padded = [
            _paint(text, text.rjust(width) if to_right else text.ljust(width), colour)
            for text, width, to_right in zip(texts, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


def print_next_page(command: str, args: Namespace, cursor: object, flags: dict[str, object] | None = None) -> None:
    """Prints the command for the next page, on stderr so that stdout has only rows. `flags`: further ones to repeat."""
    from shlex import join

    given = [("--socket", args.socket), ("--state", getattr(args, "state", None)), ("--limit", args.limit)]
    pairs = [*given, *(flags or {}).items(), ("--after", cursor)]
    words = [word for flag, value in pairs if value is not None for word in (flag, str(value))]
    sys.stdout.flush()
    print(f"more: {printable(join(['forqctl', *command.split(), args.name, *words]))}", file=sys.stderr)


def print_stack(attempts: Sequence[dict[str, object]]) -> None:
    """Prints the stack of the last attempt that was killed."""
    stacks = [attempt["stack"] for attempt in attempts if attempt.get("stack")]
    if stacks:
        print("\nstack of the last attempt that was killed:")
        for line in str(stacks[-1]).splitlines():
            print(printable(line))


def dead_error(job: dict[str, Any]) -> str:
    """`KeyError: 'to'`."""
    return ": ".join(str(part) for part in (job["error"], job["message"]) if part)


def print_json(value: object) -> None:
    from forq.procs.jsonrpc import encode

    sys.stdout.flush()
    sys.stdout.buffer.write(encode(value) + b"\n")
    sys.stdout.buffer.flush()


def field_text(key: str, value: Any) -> str:
    """The value of a job's field: a time, text, or JSON."""
    if value is None:
        return "-"
    if key.endswith("_at") and isinstance(value, int | float):
        return iso_time(value) or "-"
    if isinstance(value, str) and key not in ("data", "result"):
        return printable(value)
    return as_json(value)


def as_json(value: object) -> str:
    from forq.procs.jsonrpc import encode

    return printable(encode(value).decode())


def cell_text(value: object) -> str:
    return "-" if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """Escapes control characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def use_colour(stream: object) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())  # type: ignore[attr-defined]


def short_duration(seconds: float | None) -> str | None:
    """`1m05s`: at most two units, rounded down."""
    if seconds is None:
        return None
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def iso_time(epoch_seconds: float | None) -> str | None:
    """ISO 8601, in UTC."""
    if epoch_seconds is None:
        return None
    from forq.values import show_time

    return show_time(epoch_seconds, "milliseconds")


def _is_numeric(column: list[object]) -> bool:
    present = [value for value in column if value is not None]
    return bool(present) and all(isinstance(value, int | float) for value in present)


def _paint(text: str, padded: str, colour: bool) -> str:
    return f"\x1b[{_SEQUENCES[COLOURS[text]]}m{padded}\x1b[0m" if colour and text in COLOURS else padded


class WaitReport:
    """Shows what a command waits for: on a terminal one redrawn line; elsewhere, if `lines`, occasional lines."""

    def __init__(self, *, lines: bool) -> None:
        self._line = ProgressLine()
        self._lines = lines
        self._pause_seconds = FIRST_LINE_SECONDS
        self._next_line = time.monotonic() + FIRST_LINE_SECONDS
        self._warned: str | None = None

    def update(self, text: str) -> None:
        if self._line.on_terminal:
            self._line.update(text)
        elif self._lines and time.monotonic() >= self._next_line:
            print(f"forqctl: {text}", file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, MAX_LINE_SECONDS)

    def warn_once(self, text: str | None) -> None:
        """Prints a problem that needs action, once, on its own line. None: there is no problem."""
        if text is not None and text != self._warned:
            self._line.clear()
            print(f"forqctl: {text}", file=sys.stderr, flush=True)
        self._warned = text

    def first_poll_seconds(self) -> float:
        return 0.0 if self._line.on_terminal else FIRST_POLL_SECONDS

    def end(self) -> None:
        self._line.clear()


def role_text(child: dict[str, Any], children: list[dict[str, Any]]) -> str:
    """`main`, or `main 2/4` if the queue has several main processes."""
    # Retiring processes have the numbers of their successors.
    count = max((each.get("number", 1) for each in children if each["role"] == "main"), default=1)
    several = child["role"] == "main" and count > 1
    return f"{child['role']} {child['number']}/{count}" if several else str(child["role"])


def running_jobs_text(queues: list[dict[str, Any]], *, with_queue: bool) -> str:
    """The running jobs, longest first: the first few with id and time, and the number of others."""
    found = [
        (seconds or 0.0, f"{queue['name']} {job}" if with_queue else str(job))
        for queue in queues
        for child in queue["children"]
        for job, seconds in zip(child.get("jobs", ()), child.get("jobs_seconds", ()), strict=False)
    ]
    found.sort(key=lambda job: -job[0])
    shown = [f"{printable(name)} ({short_duration(seconds)})" for seconds, name in found[:MAX_JOBS_SHOWN]]
    more = len(found) - MAX_JOBS_SHOWN
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])
