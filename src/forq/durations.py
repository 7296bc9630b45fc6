"""Durations as people write them ("250ms", "10s", "5m", "2h", "7d", a number of seconds), read and shown; and times."""

import re

from forq.errors import UsageError
from forq.names import shown

_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?", re.ASCII)
_ALLOWED = 'allowed are seconds (10, 0.5) or text such as "250ms", "10s", "5m", "2h", "7d"'

# A hundred years: whatever is added to a clock afterwards still fits into every integer and date.
_LONGEST_SECONDS = 36525 * 86400.0


def parse_duration(value: str | int | float) -> float:
    """Seconds. Refuses what is negative, endless, not a number, or a boolean."""
    seconds = _seconds_in(value)
    # "not (0 <= x)" is true for NaN as well.
    if seconds is None or not 0 <= seconds <= _LONGEST_SECONDS:
        raise UsageError(f"duration {shown(value)} is not allowed: {_ALLOWED}, from 0 to 36525d")
    return seconds


def show_duration(seconds: float) -> str:
    """The shortest exact text that parse_duration reads back."""
    milliseconds = round(seconds * 1000, 3)
    if milliseconds % 1000:
        return f"{milliseconds:.3f}".rstrip("0").rstrip(".") + "ms"
    whole = int(milliseconds // 1000)
    for unit in ("d", "h", "m"):
        if whole and whole % _UNIT_SECONDS[unit] == 0:
            return f"{whole // int(_UNIT_SECONDS[unit])}{unit}"
    return f"{whole}s"


def show_time(epoch_seconds: float, precision: str = "seconds") -> str:
    """ISO 8601 in UTC; to the second in sentences."""
    from datetime import UTC, datetime  # forqctl starts faster without it

    try:
        return datetime.fromtimestamp(epoch_seconds, UTC).isoformat(timespec=precision).replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        # Beyond the year 9999, which a job's time may be.
        return f"{epoch_seconds:.0f} s after 1970"


def _seconds_in(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        # An int beyond the range of a float would raise OverflowError in float().
        return float(value) if not isinstance(value, int) or abs(value) <= _LONGEST_SECONDS else None
    if not isinstance(value, str):
        return None
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        return None
    number, unit = match.groups()
    if unit == "ms":
        return float(number) / 1000
    return float(number) * _UNIT_SECONDS[unit or "s"]
