"""A rate as people write it ("100/1m", "5/s", "off"), read and shown."""

import re
from dataclasses import dataclass

from forq.durations import parse_duration, show_duration
from forq.errors import UsageError
from forq.names import shown

OFF = "off"
ALLOWED = '"COUNT/DURATION", such as "50/1s", "100/1m", "5/s", or "off"'
MAX_COUNT = 1_000_000
MIN_SECONDS, MAX_SECONDS = 0.001, 30 * 86400.0

_RATE = re.compile(r"([0-9]{1,7})\s*/\s*(\S.*)", re.ASCII)
_UNITS = ("ms", "s", "m", "h", "d")


@dataclass(frozen=True)
class Rate:
    """So many in so long; a count of 0 means any number."""

    count: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.count}/{show_duration(self.seconds)}" if self.count else OFF


def parse_rate(value: object) -> Rate:
    if value in (OFF, "", 0) and not isinstance(value, bool):
        return Rate(0, 0.0)
    match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise UsageError(f"rate {shown(value)} is not allowed: {ALLOWED}")
    count = int(match[1])
    seconds = parse_duration(f"1{match[2]}" if match[2] in _UNITS else match[2])
    if not 1 <= count <= MAX_COUNT or not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise UsageError(f"rate {shown(value)} is not allowed: 1 to {MAX_COUNT} in 1ms to 30d")
    return Rate(count, seconds)
