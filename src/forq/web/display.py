"""How the pages show values: numbers, times, durations, sizes, states. Filters of the templates."""

import math
import time
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from forq.charts import sparkline
from forq.log_format import printable, without_controls

# The shades of the states in the stylesheet.
TONES = {
    **dict.fromkeys(("running", "busy", "done", "idle", "active", "work"), "good"),
    **dict.fromkeys(
        ("paused", "draining", "starting", "importing", "imported", "stopping", "scheduled", "held"), "calm"
    ),
    **dict.fromkeys(("retry", "blocked", "backoff", "unserved", "flapping", "stalled", "timed_out"), "warn"),
    **dict.fromkeys(("config_error", "dead", "failed", "stopped", "unresponsive"), "bad"),
}
DASH = "\N{EN DASH}"


def number(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def rate(per_second: float | None) -> str:
    """At most four digits."""
    if per_second is None:
        return DASH
    if per_second == 0:
        return "0/s"
    if per_second < 0.1:
        return f"{per_second * 60:.1f}/min"
    return f"{per_second:.1f}/s" if per_second < 100 else f"{per_second:,.0f}/s"


def duration(seconds: float | None) -> str:
    """At most two units."""
    if seconds is None:
        return DASH
    # Of two clocks, one may be behind.
    seconds = max(0.0, seconds)
    if seconds < 1:
        micros = round(seconds * 1e6)
        return "0 s" if seconds == 0 else f"{micros} µs" if micros < 1000 else f"{micros / 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, unit, small, smaller in ((60, "min", 1, "s"), (3600, "h", 60, "min"), (86400, "d", 3600, "h")):
        if whole < size * (60 if unit != "h" else 24) or unit == "d":
            rest = whole % size // small
            return f"{whole // size:,} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError


def size(size_bytes: int | None) -> str:
    return DASH if size_bytes is None else f"{size_bytes} B" if size_bytes < 1024 else _binary(size_bytes)


def _binary(size_bytes: float) -> str:
    power = min(4, int(math.log(size_bytes, 1024)))
    value = size_bytes / 1024**power
    return f"{value:.1f} {' KMGT'[power]}B" if value < 100 else f"{value:,.0f} {' KMGT'[power]}B"


def iso(epoch_seconds: float) -> str:
    try:
        at = datetime.fromtimestamp(epoch_seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{epoch_seconds:g}"
    return at.strftime("%Y-%m-%dT%H:%M:%S") + f".{at.microsecond // 1000:03}Z"


def moment(epoch_seconds: float | None) -> Markup:
    """A time relative to now, with the ISO time on hover. Coarse, so that live pages change only when it matters."""
    if epoch_seconds is None:
        return Markup(DASH)
    left = epoch_seconds - time.time()
    text = _coarse(abs(left))
    text = "now" if not text else f"in {text}" if left > 0 else f"{text} ago"
    return Markup('<time datetime="{0}" title="{0}">{1}</time>').format(iso(epoch_seconds), text)


def so_far(seconds: float | None) -> str:
    """How long something has taken until now. Coarse for the same reason."""
    return DASH if seconds is None else _coarse(seconds) or "less than 5 s"


def _coarse(seconds: float) -> str:
    """Steps of 5 s, then minutes; empty for less than 5 s."""
    if seconds < 60:
        return f"{int(seconds) // 5 * 5} s" if seconds >= 5 else ""
    return duration(seconds - seconds % 60) if seconds < 86400 else duration(seconds - seconds % 3600)


def state(name: str | None) -> Markup:
    shown = name or "unknown"
    return Markup('<span class="state {}">{}</span>').format(TONES.get(shown, "plain"), shown)


def text(value: Any) -> str:
    """Text of others, without control characters and direction marks."""
    return printable("" if value is None else str(value))


def lines(value: Any) -> str:
    """The same for several lines, without the indentation of the log."""
    return without_controls("" if value is None else str(value))


def prose(value: Any) -> Markup:
    """A message of forq, with code in backticks."""
    parts = text(value).split("`")
    if len(parts) % 2 == 0:
        return escape("`".join(parts))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part) for number, part in enumerate(parts)
    )


def throughput(minutes: Any) -> Markup:
    """A sparkline of the jobs that ended in each minute of the last hour."""
    values = [None if minute is None else float(minute.ended) for minute in minutes]
    return Markup(sparkline(values, "attempts per minute, last hour", "done"))


def failures(minutes: Any) -> Markup:
    values = [None if minute is None else float(minute.failed) for minute in minutes]
    return Markup(sparkline(values, "failures per minute, last hour", "failed"))


def percent(fraction: float | None) -> str:
    # 100 % only at the end.
    return DASH if fraction is None else f"{int(100 * fraction)} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


FILTERS = {
    "number": number,
    "rate": rate,
    "duration": duration,
    "size": size,
    "iso": iso,
    "moment": moment,
    "so_far": so_far,
    "state": state,
    "text": text,
    "lines": lines,
    "prose": prose,
    "throughput": throughput,
    "failures": failures,
    "percent": percent,
    "plural": plural,
}
GLOBALS = {"dash": DASH}
