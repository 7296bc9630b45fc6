"""How forqctl shows things to people: aligned tables, colour on a terminal, times and durations; and JSON."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

_COLOURS = {
    "running": "32",
    "busy": "32",
    "paused": "33",
    "draining": "33",
    "starting": "33",
    "stopping": "33",
    "unserved": "33",
    "flapping": "31",
    "config_error": "31",
    "stopped": "31",
    "backoff": "31",
    "dead": "31",
}


def show_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """None becomes "-", numbers are aligned to the right, the last column is not padded."""
    body = [list(row) for row in rows]
    cells = [[cell(value) for value in row] for row in body]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [_is_numeric([row[index] for row in body]) for index in range(len(header))]
    colour = coloured(sys.stdout)
    for texts in [list(header), *cells]:
        padded = [
            _paint(text, text.rjust(width) if to_right else text.ljust(width), colour)
            for text, width, to_right in zip(texts, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


def show_more(command: str, args: Namespace, cursor: object) -> None:
    """The command that shows the next page: on stderr, so that stdout has rows only."""
    from shlex import join

    given = [("--socket", args.socket), ("--state", getattr(args, "state", None)), ("--limit", args.limit)]
    flags = [word for flag, value in [*given, ("--after", cursor)] if value is not None for word in (flag, str(value))]
    sys.stdout.flush()
    print(f"more: {printable(join(['forqctl', *command.split(), args.name, *flags]))}", file=sys.stderr)


def show_stack(attempts: Sequence[dict[str, object]]) -> None:
    """Where the last attempt that had to be ended was at that moment."""
    stacks = [attempt["stack"] for attempt in attempts if attempt.get("stack")]
    if stacks:
        print("\nstack of the last attempt that was ended:")
        for line in str(stacks[-1]).splitlines():
            print(printable(line))


def show_json(value: object) -> None:
    from forq.procs.wire import encode

    sys.stdout.flush()
    sys.stdout.buffer.write(encode(value) + b"\n")
    sys.stdout.buffer.flush()


def cell(value: object) -> str:
    return "-" if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """Without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def coloured(stream: object) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())  # type: ignore[attr-defined]


def span(seconds: float | None) -> str | None:
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


def moment(epoch_seconds: float | None) -> str | None:
    """ISO 8601, in UTC."""
    if epoch_seconds is None:
        return None
    from forq.values import show_time

    return show_time(epoch_seconds, "milliseconds")


def _is_numeric(column: list[object]) -> bool:
    present = [value for value in column if value is not None]
    return bool(present) and all(isinstance(value, int | float) for value in present)


def _paint(text: str, padded: str, colour: bool) -> str:
    code = _COLOURS.get(text) if colour else None
    return f"\x1b[{code}m{padded}\x1b[0m" if code else padded
