"""What forqctl prints: JSON; for people aligned tables, with colour on a terminal, times and durations.

While it waits for something, it says on stderr what for.
"""

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

# What is over at once needs no look.
FIRST_POLL_SECONDS = 0.2
# Where no terminal is, a line is written after this time, and then more and more seldom.
FIRST_LINE_SECONDS, MAX_LINE_SECONDS = 1.0, 60.0
MAX_JOBS_SHOWN = 5
# Of a state, by name: rich calls them the same.
COLOURS = {
    **dict.fromkeys(("running", "busy"), "green"),
    **dict.fromkeys(("paused", "draining", "starting", "stopping", "limited", "unserved"), "yellow"),
    **dict.fromkeys(("flapping", "config_error", "stopped", "backoff", "dead"), "red"),
}
_SEQUENCES = {"green": "32", "yellow": "33", "red": "31"}


def print_result(args: Namespace, result: object, text: str) -> int:
    """The result of a command that says one thing: as JSON if that is wanted, else the text. Exit code 0."""
    if args.json:
        print_json(result)
    else:
        print(text, flush=True)
    return 0


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """None becomes "-", numbers are aligned to the right, the last column is not padded."""
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


def print_next_page(command: str, args: Namespace, cursor: object) -> None:
    """The command that shows the next page: on stderr, so that stdout has rows only."""
    from shlex import join

    given = [("--socket", args.socket), ("--state", getattr(args, "state", None)), ("--limit", args.limit)]
    flags = [word for flag, value in [*given, ("--after", cursor)] if value is not None for word in (flag, str(value))]
    sys.stdout.flush()
    print(f"more: {printable(join(['forqctl', *command.split(), args.name, *flags]))}", file=sys.stderr)


def print_stack(attempts: Sequence[dict[str, object]]) -> None:
    """Where the last attempt that had to be ended was at that moment."""
    stacks = [attempt["stack"] for attempt in attempts if attempt.get("stack")]
    if stacks:
        print("\nstack of the last attempt that was ended:")
        for line in str(stacks[-1]).splitlines():
            print(printable(line))


def dead_error(job: dict[str, Any]) -> str:
    """`KeyError: 'to'` of a dead job, as listed."""
    return ": ".join(str(part) for part in (job["error"], job["message"]) if part)


def print_json(value: object) -> None:
    from forq.procs.jsonrpc import encode

    sys.stdout.flush()
    sys.stdout.buffer.write(encode(value) + b"\n")
    sys.stdout.buffer.flush()


def field_text(key: str, value: Any) -> str:
    """The value of a job's field `key`: a time, a text, or JSON."""
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
    """Without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def use_colour(stream: object) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())  # type: ignore[attr-defined]


def short_duration(seconds: float | None) -> str | None:
    """A duration for people: two units at most, rounded down."""
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
    """Says what is waited for: on a terminal in one line that is drawn anew; elsewhere, if `lines`, now and then."""

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
        """What stays on the terminal, once: it does not pass by itself. None: there is nothing of the kind."""
        if text is not None and text != self._warned:
            self._line.clear()
            print(f"forqctl: {text}", file=sys.stderr, flush=True)
        self._warned = text

    def first_poll_seconds(self) -> float:
        return 0.0 if self._line.on_terminal else FIRST_POLL_SECONDS

    def end(self) -> None:
        self._line.clear()


def running_jobs_text(queues: list[dict[str, Any]], *, with_queue: bool) -> str:
    """The jobs that run here, those that run longest first: some with id and time, and how many more."""
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
