"""Numbers, times and verbs in the words of a report."""

from forq.pipeline.report_span import DAY, HOUR, MINUTE, SECOND, moment

MISSING = "\u2013"

# What the verbs of the journal mean to an operator.
VERB_WORDS = {
    "retried": "failed, tried again",
    "dead": "failed for good",
    "timed_out": "ran past its deadline",
    "stalled": "its process died",
    "suspected": "its process died, several ran",
    "interrupted": "stopped while it ran",
    "cancelled": "removed while it ran",
    "deleted": "its queue was deleted",
    "done": "done",
    "released": "released",
}
# What the journal says of a cause that nobody knows.
UNKNOWN_CAUSE = "-"


def number(value: int) -> str:
    return f"{value:,}"


def duration(micros: float) -> str:
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"), (1000, "ms")):
        if micros >= size:
            return f"{short(micros / size)} {unit}"
    return f"{short(micros)} µs"


def time(micros: int | None) -> str:
    return MISSING if micros is None else duration(micros)


def short(value: float) -> str:
    """Three digits: nobody reads more."""
    if value >= 100 or value == int(value):
        return f"{round(value):,}"
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.{1 if value >= 10 else 2}f}".rstrip("0").rstrip(".")


def percent(part: int, whole: int) -> str:
    if not whole:
        return MISSING
    # Never 100 % while something is missing.
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.99):.2f} %" if share > 99 else f"{share:.1f} %"


def rate_unit(per_second: float) -> tuple[int, str, str]:
    """By what to multiply a rate so that it is a number people can read, the unit's sign and its name."""
    if per_second >= 1:
        return 1, "/s", "per second"
    return (60, "/min", "per minute") if per_second * 60 >= 1 else (3600, "/h", "per hour")


def clock(micros: int) -> str:
    return moment(micros).strftime("%Y-%m-%d %H:%M:%S")
