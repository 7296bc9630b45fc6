"""The charts of a queue's last hour: attempts per minute, and waits. Times are UTC."""

import time
from collections.abc import Sequence
from typing import Protocol

from forq.charts.labels import duration, legend, short
from forq.charts.plots import Column, Series, log_lines, stacked_areas

TICK_MINUTES = 10


class MinuteFigures(Protocol):
    """What ended in one minute (forq.procs.minutes.Minute). The waits are None if no job had one."""

    @property
    def ended(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def wait_p50_us(self) -> int | None: ...
    @property
    def wait_p99_us(self) -> int | None: ...


Minutes = Sequence[MinuteFigures | None]


def minutes_chart(minutes: Minutes, newest: int, *, title: str = "attempts per minute, last hour") -> str:
    """Attempts that succeeded and failed, stacked. `newest`: the last minute, since the epoch. None is a gap."""
    done = Series("done", "done", [None if one is None else one.ended - one.failed for one in minutes], short)
    failed = Series("failed", "failed", [None if one is None else one.failed for one in minutes], short)
    columns, ticks = _time_axis(len(minutes), newest)
    # Failures at the bottom: a few of them would be invisible on top of a changing area.
    chart = stacked_areas(columns, [failed, done], [], ticks, title=title, whole=True, last="now", corner="UTC")
    entries = [(one.name, one.tone, short(sum(value or 0 for value in one.values))) for one in (done, failed)]
    return chart + legend(entries)


def waits_chart(minutes: Minutes, newest: int, *, title: str = "wait, last hour") -> str:
    """Median and 99th percentile on a logarithmic scale. A minute without jobs is a gap."""
    p99 = Series("p99", "p2", [None if one is None else one.wait_p99_us for one in minutes], duration)
    p50 = Series("p50", "p0", [None if one is None else one.wait_p50_us for one in minutes], duration)
    known = [value for line in (p50, p99) for value in line.values if value is not None]
    columns, ticks = _time_axis(len(minutes), newest)
    bounds = min(known, default=1000), max(known, default=1_000_000)
    chart = log_lines(columns, [p99, p50], ticks, bounds, title=title, last="now", corner="UTC")
    return chart + legend([(line.name, line.tone, _highest(line)) for line in (p50, p99)])


def _highest(line: Series) -> str:
    highest = max((value for value in line.values if value is not None), default=None)
    return "" if highest is None else f"up to {line.text(highest)}"


def _time_axis(number: int, newest: int) -> tuple[list[Column], list[tuple[float, str]]]:
    """A column per minute, and ticks at round times. Without any minute (newest 0), the axis has no times."""
    first = newest - number + 1
    columns = [Column(at / number, (at + 1) / number, f"{_clock(first + at)} UTC") for at in range(number)]
    ticks = [(at / number, _clock(first + at)) for at in range(number) if (first + at) % TICK_MINUTES == 0]
    return columns, ticks if newest else [(0.0, "")]


def _clock(minute: int) -> str:
    return time.strftime("%H:%M", time.gmtime(60 * max(0, minute)))
