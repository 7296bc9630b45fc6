"""Draws stacked areas, lines, bars of ranges and heat maps.

A plot is an SVG of 1000 by 1000 that stretches to its container; its labels are beside it (axes.py). Tooltips are in
the attributes `data-tips` and `data-grid` of the plot; charts.js shows them. Screen readers read a summary.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from forq.charts import axes
from forq.charts.axes import Text, Ticks
from forq.charts.labels import tone_class

BOX = 1000
NO_DATA = "no data"
MISSING = "\u2013"
# The summary of a chart with more series names the highest of them.
SUMMARIZED = 4

# Sums and steps of larger values would be infinite.
LARGEST = 1e301

Value = float | None


@dataclass(frozen=True, slots=True)
class Column:
    """Start and end (0 to 1) of a bucket on the time axis, and its label in tooltips."""

    begin: float
    end: float
    label: str

    @property
    def middle(self) -> float:
        return (self.begin + self.end) / 2


@dataclass(frozen=True, slots=True)
class Series:
    """A line or an area. `tone` is a colour of charts.css; `text` formats a value."""

    name: str
    tone: str
    values: Sequence[Value]
    text: Text


def stacked_areas(
    columns: Sequence[Column],
    areas: Sequence[Series],
    lines: Sequence[Series],
    x: Ticks,
    *,
    title: str,
    whole: bool = False,
    last: str = "last",
    corner: str = "",
) -> str:
    """Stacked areas, the first at the bottom, with lines on the same scale.

    None counts as 0, but a column without any value is a gap. `whole`: values are counts. `last`: what the summary
    calls the last column. `corner`: text beside the x axis, such as its time zone.
    """
    areas, lines = _finite(areas), _finite(lines)
    sums = [sum(area.values[at] or 0 for area in areas) for at in range(len(columns))]
    highest = max([*sums, *(value or 0 for line in lines for value in line.values)], default=0)
    text = next((one.text for one in (*areas, *lines)), str)
    top, y = axes.linear_ticks(highest, text, whole=whole)
    known = [any(area.values[at] is not None for area in areas) for at in range(len(columns))]
    below = [0.0] * len(columns)
    shapes = []
    for area in areas:
        above = [low + (value or 0) for low, value in zip(below, area.values, strict=True)]
        if any(area.values):
            bands = "".join(_band(columns, below, above, top, run) for run in _runs(known))
            shapes.append(f'<path class="area {tone_class(area.tone)}" d="{bands}"/>')
        below = above
    shapes += [_line(columns, line, lambda value: value / top) for line in lines]
    tips = _tips(columns, [*reversed(areas), *lines], leave_out_zero=len(areas) > 4)
    return _plot(shapes, x, y, tips, _summary(title, [*areas, *lines], last), corner)


def log_lines(
    columns: Sequence[Column],
    lines: Sequence[Series],
    x: Ticks,
    bounds: tuple[float, float],
    labels: int = 6,
    *,
    title: str,
    last: str = "last",
    corner: str = "",
) -> str:
    """Lines of times on a logarithmic scale that includes these bounds."""
    lines = _finite(lines)
    marks = axes.round_times(bounds)
    place = axes.log_place(marks)
    text = next((line.text for line in lines), str)
    y = [(place(mark), text(mark)) for mark in axes.at_most(marks, labels)]
    shapes = [_line(columns, line, place) for line in lines]
    tips = _tips(columns, lines, leave_out_zero=False)
    return _plot(shapes, x, y, tips, _summary(title, lines, last), corner)


def range_bars(rows: Sequence[tuple[str, str, Sequence[Value]]], text: Text, *, title: str) -> str:
    """One bar per row (label, tone, three times) from its first to its last value, on a common logarithmic scale.

    The texts beside the bars say the same, so screen readers skip the bars.
    """
    known = [value for _, _, values in rows for value in values if value is not None]
    marks = axes.round_times((min(known, default=1), max(known, default=1)))
    place = axes.log_place(marks)
    lines = []
    for label, tone, values in rows:
        places = [None if value is None else 100 * place(value) for value in values]
        dots = "".join(
            f'<circle class="m{number}" cx="{at:.2f}%" cy="7" r="{(5, 3.75, 3.5)[number % 3]}"/>'
            for number, at in enumerate(places)
            if at is not None
        )
        ends = [at for at in places if at is not None]
        numbers = " · ".join(MISSING if value is None else escape(text(value)) for value in values)
        lines.append(
            f'<div class="range {tone_class(tone)}"><b title="{escape(label)}">{escape(label)}</b>'
            f'<svg class="track" width="100%" height="14" aria-hidden="true">'
            f'<line class="rail" x2="100%" y1="7" y2="7"/>'
            f"{_bar(ends)}{dots}</svg><small>{numbers}</small></div>"
        )
    ticks = [(place(mark), text(mark)) for mark in axes.at_most(marks, 7)]
    axis = f'<div class="range axis" aria-hidden="true"><b></b>{axes.x_labels(ticks)}<small></small></div>'
    body = "".join(lines) + axis if rows else f'<p class="nodata">{NO_DATA}</p>'
    return f'<div class="ranges" role="group" aria-label="{escape(title)}"><div>{body}</div></div>'


def heat_cells(
    rows: Sequence[str], columns: Sequence[str], values: dict[tuple[int, int], tuple[float, str]], *, title: str
) -> str:
    """One cell per (row, column) in seven shades. The scale is not linear: a few cells are far above the others."""
    if not rows or not columns:
        return f'<div class="heat" role="img" aria-label="{escape(title)}: {NO_DATA}">{_no_data()}</div>'
    highest = max((value for value, _ in values.values()), default=0) or 1
    width, height = BOX / len(columns), BOX / len(rows)
    cells = [
        f'<rect class="h{max(0, min(7, math.ceil(7 * (value / highest) ** 0.7)))}" x="{column * width:.1f}" '
        f'y="{row * height:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        for (row, column), (value, _) in sorted(values.items())
    ]
    tips = [
        [[f"{name}, {column}", values[row, at][1]] if (row, at) in values else [] for at, column in enumerate(columns)]
        for row, name in enumerate(rows)
    ]
    row_px = round(min(26, max(12, 320 / len(rows))))
    names = [(1 - (at + 0.5) / len(rows), name) for at, name in enumerate(rows)]
    # Low rows have room for every second name.
    names = names[:: 1 if row_px >= 14 else 2]
    every = max(1, len(columns) // 12)
    x = [((at + 0.5) / len(columns), column) for at, column in enumerate(columns) if at % every == 0]
    summary = NO_DATA
    if values:
        row, column = max(values, key=lambda cell: values[cell][0])
        summary = f"highest at {rows[row]}, {columns[column]}: {values[row, column][1]}"
    return (
        f'<div class="heat" role="img" aria-label="{escape(f"{title}: {summary}")}">'
        f'{axes.y_labels(names, height_px=len(rows) * row_px)}<div class="plot" data-grid="{_attribute(tips)}">'
        f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" height="{len(rows) * row_px}" aria-hidden="true">'
        f"{''.join(cells)}</svg>{'' if values else _no_data()}</div>{axes.x_labels(x)}</div>"
    )


def _finite(series: Sequence[Series]) -> list[Series]:
    """Without values that no scale has."""
    return [
        replace(one, values=[value if value is not None and abs(value) < LARGEST else None for value in one.values])
        for one in series
    ]


def _runs(known: Sequence[bool]) -> Iterator[range]:
    """The longest ranges of columns that are known."""
    begin = None
    for at, one in enumerate([*known, False]):
        if one and begin is None:
            begin = at
        elif not one and begin is not None:
            yield range(begin, at)
            begin = None


def _band(columns: Sequence[Column], low: Sequence[float], high: Sequence[float], top: float, run: range) -> str:
    over = _points([columns[at] for at in run], [high[at] / top for at in run])
    under = _points([columns[at] for at in run], [low[at] / top for at in run])
    return "M" + "L".join([*over, *reversed(under)]) + "Z"


def _points(columns: Sequence[Column], shares: Sequence[float]) -> list[str]:
    """Points through the middle of each column, with flat ends."""
    x = [columns[0].begin, *(column.middle for column in columns), columns[-1].end]
    y = [shares[0], *shares, shares[-1]]
    return [f"{BOX * across:.1f} {BOX * (1 - up):.1f}" for across, up in zip(x, y, strict=True)]


def _line(columns: Sequence[Column], line: Series, place: Callable[[float], float]) -> str:
    """A missing value is a gap in the line; a value between two gaps is a dash as wide as its column."""
    steps = []
    for run in _runs([value is not None for value in line.values]):
        up = {at: f"{BOX * (1 - place(line.values[at] or 0)):.1f}" for at in run}
        if len(run) == 1:
            only = columns[run[0]]
            steps.append(f"M{BOX * only.begin:.1f} {up[run[0]]}H{BOX * only.end:.1f}")
        else:
            steps.append("M" + "L".join(f"{BOX * columns[at].middle:.1f} {up[at]}" for at in run))
    return f'<path class="line {tone_class(line.tone)}" d="{"".join(steps)}"/>' if steps else ""


def _bar(ends: Sequence[float]) -> str:
    if not ends:
        return ""
    low, high = min(ends), max(ends)
    return f'<rect class="bar" x="{low:.2f}%" y="5" width="{high - low:.2f}%" height="4" rx="2"/>'


def _tips(columns: Sequence[Column], series: Sequence[Series], *, leave_out_zero: bool) -> str:
    tips = []
    for at, column in enumerate(columns):
        values = [(one, one.values[at]) for one in series]
        known = [(one, value) for one, value in values if value is not None]
        lines = [
            [one.name, tone_class(one.tone), one.text(value)] for one, value in known if value or not leave_out_zero
        ]
        tips.append([round(column.end, 5), column.label, lines or [[known[0][0].text(0) if known else NO_DATA]]])
    return _attribute(tips)


def _summary(title: str, series: Sequence[Series], last: str) -> str:
    known = [one for one in series if any(value is not None for value in one.values)]
    if not known:
        return f"{title}: {NO_DATA}"
    if len(known) > SUMMARIZED:
        high = sorted(known, key=lambda one: -(one.values[-1] or 0))[:3]
        listed = ", ".join(f"{one.name} {_text(one, one.values[-1])}" for one in high)
        return f"{title}: {len(known)} series, {last} {listed}"
    parts = [
        f"{one.name + ' ' if len(series) > 1 else ''}{last} {_text(one, one.values[-1])}, "
        f"highest {_text(one, max(value for value in one.values if value is not None))}"
        for one in known
    ]
    return f"{title}: {'; '.join(parts)}"


def _text(one: Series, value: Value) -> str:
    return "unknown" if value is None else one.text(value)


def _plot(shapes: Sequence[str], x: Ticks, y: Ticks, tips: str, summary: str, corner: str) -> str:
    grid = "".join(f'<path class="grid" d="M0 {BOX * (1 - at):.1f}H{BOX}"/>' for at, _ in y)
    empty = "" if any(shapes) or not summary.endswith(NO_DATA) else _no_data()
    below = f"{axes.corner_label(corner)}{axes.x_labels(x, left_px=0 if corner else axes.LEFT_PX)}" if x else ""
    return (
        f'<div class="chart{"" if x else " bare"}" role="img" aria-label="{escape(summary)}">{axes.y_labels(y)}'
        f'<div class="plot" data-tips="{tips}"><svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" '
        f'aria-hidden="true">{grid}{"".join(shapes)}</svg><i class="cursor"></i>{empty}</div>{below}</div>'
    )


def _no_data() -> str:
    return f'<span class="nodata">{NO_DATA}</span>'


def _attribute(value: object) -> str:
    return escape(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
