"""The time that a report covers, cut into buckets for its charts and into cells for its heat map. All of it in UTC."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from forq.errors import UsageError
from forq.values import parse_duration, shown

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

MAX_BUCKETS = 144
MAX_TICKS = 10
_STEPS = (
    *(n * SECOND // 10 for n in (1, 2, 5)),
    *(n * SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 28, 91, 182, 364)),
)


@dataclass(frozen=True, slots=True)
class Span:
    """From the first to the last event, in microseconds; `to_us` itself is no part of it."""

    from_us: int
    to_us: int

    @property
    def length_us(self) -> int:
        return self.to_us - self.from_us

    @property
    def step_us(self) -> int:
        """The width of a bucket."""
        return _least_step(self.length_us, MAX_BUCKETS)

    @property
    def origin_us(self) -> int:
        """Where bucket 0 begins: at or before `from_us`."""
        return self.from_us - self.from_us % self.step_us

    @property
    def buckets(self) -> int:
        return (self.to_us - 1 - self.origin_us) // self.step_us + 1

    def edges(self, bucket: int) -> tuple[int, int]:
        """What of the span lies in this bucket."""
        begin = self.origin_us + bucket * self.step_us
        return max(begin, self.from_us), min(begin + self.step_us, self.to_us)

    def seconds_in(self, bucket: int) -> float:
        """What a bucket's count is divided by. The first and the last may be slivers, whose rates would be noise."""
        begin, end = self.edges(bucket)
        return max(end - begin, self.step_us // 2) / SECOND

    def ticks(self) -> list[tuple[float, str]]:
        """Where on a time axis (0 to 1) which label stands."""
        step = _least_step(self.length_us, MAX_TICKS)
        first = -(-self.from_us // step) * step
        return [((at - self.from_us) / self.length_us, tick_label(at, step)) for at in range(first, self.to_us, step)]


@dataclass(frozen=True, slots=True)
class Heat:
    """The heat map: rows of `row_us`, each of cells of `cell_us`; or, of long spans, a weekday per row."""

    row_us: int
    cell_us: int
    by_weekday: bool

    @property
    def columns(self) -> int:
        return self.row_us // self.cell_us

    def rows(self, span: Span) -> list[tuple[int, str]]:
        """Each row's number, as figures count them, and its label."""
        if self.by_weekday:
            return list(enumerate(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")))
        first, last = span.from_us // self.row_us, (span.to_us - 1) // self.row_us
        form = "%a %d %b" if self.row_us == DAY else "%d %b %H:%M"
        return [(row, moment(row * self.row_us).strftime(form)) for row in range(first, last + 1)]

    def times(self, span: Span) -> Iterator[tuple[int, int]]:
        """How often each (row, cell) of a weekday occurs in the span is the number of times it is yielded here."""
        for hour in range(span.from_us // HOUR, (span.to_us - 1) // HOUR + 1):
            # Day 0 of the epoch was a Thursday.
            yield (hour // 24 + 3) % 7, hour % 24


def heat_of(span: Span) -> Heat:
    for longest, row_us, cell_us in (
        (12 * MINUTE, MINUTE, SECOND),
        (12 * HOUR, HOUR, MINUTE),
        (2 * DAY, 6 * HOUR, 10 * MINUTE),
        (35 * DAY, DAY, HOUR),
    ):
        if span.length_us <= longest:
            return Heat(row_us, cell_us, by_weekday=False)
    return Heat(DAY, HOUR, by_weekday=True)


def moment(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def tick_label(at_us: int, step_us: int) -> str:
    at = moment(at_us)
    if step_us >= 28 * DAY:
        return at.strftime("%b %Y")
    if step_us >= DAY or at_us % DAY == 0:
        return at.strftime("%d %b")
    if step_us < SECOND:
        return at.strftime("%H:%M:%S.%f")[:-5]
    return at.strftime("%H:%M:%S" if step_us < MINUTE else "%H:%M")


def parse_moment(text: str, option: str, now_us: int) -> int:
    """A date, a time (UTC unless it has a zone), or a duration before now."""
    try:
        return now_us - round(parse_duration(text) * SECOND)
    except UsageError:
        pass
    try:
        given = datetime.fromisoformat(text)
    except ValueError as exc:
        allowed = "2026-11-16, 2026-11-16T08:00, 2026-11-16T08:00+01:00, or a time ago such as 24h or 7d"
        raise UsageError(f"{option} {shown(text)} is not allowed: {allowed}") from exc
    at = given if given.tzinfo else given.replace(tzinfo=UTC)
    return (at - moment(0)) // timedelta(microseconds=1)


def _least_step(length_us: int, most: int) -> int:
    # One less than `most`: a span that begins and ends between steps touches one more.
    for step in _STEPS:
        if length_us <= step * (most - 1):
            return step
    return -(-length_us // (most - 1) // DAY) * DAY
