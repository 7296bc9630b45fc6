"""Draws charts as SVG. The SVG stretches to its container; labels are HTML beside it, so that text keeps its size.

Shapes are drawn in a box of 1000 by 1000. Tooltips are in the attributes `data-tips` and `data-grid` of the plot;
report.js shows them.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

BOX = 1000

Value = float | None

# Maximum width of a character of a label (report.css: 11.5 px), and the gap between labels.
CHARACTER_PX = 7
GAP_PX = 8
# report.css hides labels of class wN in axes narrower than N px. These are the values of N.
_WIDTHS = range(100, 1250, 50)

# Round times in microseconds: 1 µs to 100 ms, 1 s, 10 s, 1 min, 10 min, 1 h, 10 h, 1 d, 10 d, 100 d and 1,000 d.
_ROUND_TIMES = (*(10**power for power in range(8)), 6e7, 6e8, 3.6e9, 3.6e10, 8.64e10, 8.64e11, 8.64e12, 8.64e13)


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
    """A line or an area. `tone` is a class of report.css; `text` formats a value."""

    name: str
    tone: str
    values: Sequence[Value]
    text: Callable[[float], str]


Ticks = Sequence[tuple[float, str]]


def stacked_areas(columns: Sequence[Column], areas: Sequence[Series], lines: Sequence[Series], x: Ticks) -> str:
    """Stacked areas, the first at the bottom, with lines on the same scale."""
    sums = [sum(area.values[at] or 0 for area in areas) for at in range(len(columns))]
    highest = max([*sums, *(value or 0 for line in lines for value in line.values)], default=0)
    top, y = _linear_ticks(highest, (areas or lines)[0].text)
    below = [0.0] * len(columns)
    shapes = []
    for area in areas:
        above = [low + (value or 0) for low, value in zip(below, area.values, strict=True)]
        if any(area.values):
            shapes.append(f'<path class="area {area.tone}" d="{_band(columns, below, above, top)}"/>')
        below = above
    shapes += [_line(columns, line, lambda value: value / top) for line in lines]
    return _plot(shapes, x, y, _tips(columns, [*reversed(areas), *lines], leave_out_zero=len(areas) > 4))


def log_lines(
    columns: Sequence[Column], lines: Sequence[Series], x: Ticks, bounds: tuple[float, float], labels: int = 6
) -> str:
    """Lines of times on a logarithmic scale that includes these bounds."""
    marks = _round_times(bounds)
    place = _log_place(marks)
    y = [(place(mark), lines[0].text(mark)) for mark in _at_most(marks, labels)]
    shapes = [_line(columns, line, place) for line in lines]
    return _plot(shapes, x, y, _tips(columns, lines, leave_out_zero=False))


def range_bars(rows: Sequence[tuple[str, str, Sequence[Value]]], text: Callable[[float], str]) -> str:
    """One bar per row (label, tone, three times) from its first to its last value, on a common logarithmic scale."""
    known = [value for _, _, values in rows for value in values if value is not None]
    marks = _round_times((min(known, default=1), max(known, default=1)))
    place = _log_place(marks)
    lines = []
    for label, tone, values in rows:
        dots = "".join(
            f'<i class="mark m{number}" style="left:{100 * place(value):.2f}%" title="{escape(text(value))}"></i>'
            for number, value in enumerate(values)
            if value is not None
        )
        ends = [100 * place(value) for value in values if value is not None]
        bar = f'<i class="bar" style="left:{ends[0]:.2f}%;width:{ends[-1] - ends[0]:.2f}%"></i>' if ends else ""
        numbers = " · ".join("\u2013" if value is None else escape(text(value)) for value in values)
        lines.append(
            f'<div class="range {tone}"><b title="{escape(label)}">{escape(label)}</b>'
            f'<span class="track">{bar}{dots}</span><small>{numbers}</small></div>'
        )
    ticks = [(place(mark), text(mark)) for mark in _at_most(marks, 7)]
    axis = f'<div class="range axis"><b></b><span class="track">{_x_labels(ticks)}</span><small></small></div>'
    return f'<div class="ranges">{"".join(lines)}{axis}</div>'


def heat_cells(rows: Sequence[str], columns: Sequence[str], values: dict[tuple[int, int], tuple[float, str]]) -> str:
    """One cell per (row, column) in seven shades. The scale is not linear: a few cells are far above the others."""
    highest = max((value for value, _ in values.values()), default=0) or 1
    width, height = BOX / len(columns), BOX / len(rows)
    cells = [
        f'<rect class="h{min(7, math.ceil(7 * (value / highest) ** 0.7))}" x="{column * width:.1f}" '
        f'y="{row * height:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        for (row, column), (value, _) in sorted(values.items())
    ]
    tips = [
        [[f"{name}, {column}", values[row, at][1]] if (row, at) in values else [] for at, column in enumerate(columns)]
        for row, name in enumerate(rows)
    ]
    names = "".join(f"<b>{escape(name)}</b>" for name in rows)
    every = max(1, len(columns) // 12)
    x = [((at + 0.5) / len(columns), column) for at, column in enumerate(columns) if at % every == 0]
    return (
        f'<div class="heat" style="--rows:{len(rows)}"><div class="names">{names}</div>'
        f'<div class="plot" data-grid="{_attribute(tips)}">{_svg(cells)}</div>'
        f'<div class="x">{_x_labels(x)}</div></div>'
    )


def _round_times(bounds: tuple[float, float]) -> Sequence[float]:
    """The round times around the bounds, at least two."""
    low = max(at for at, mark in enumerate(_ROUND_TIMES) if mark <= max(1, bounds[0]))
    high = next((at for at, mark in enumerate(_ROUND_TIMES) if mark >= bounds[1]), len(_ROUND_TIMES) - 1)
    low = min(low, len(_ROUND_TIMES) - 2)
    return _ROUND_TIMES[low : max(high, low + 1) + 1]


def _log_place(marks: Sequence[float]) -> Callable[[float], float]:
    low, high = math.log10(marks[0]), math.log10(marks[-1])
    return lambda value: min(1.0, max(0.0, (math.log10(max(1.0, value)) - low) / (high - low)))


def _linear_ticks(highest: float, text: Callable[[float], str]) -> tuple[float, Ticks]:
    """The top of the scale, and its ticks at round numbers."""
    if highest <= 0:
        return 1.0, [(0.0, text(0.0))]
    size = 10.0 ** math.floor(math.log10(highest))
    step = next(size * part for part in (0.2, 0.25, 0.5, 1, 2, 2.5) if size * part * 5 >= highest)
    count = math.ceil(highest / step - 1e-9)
    return step * count, [(at / count, text(step * at)) for at in range(count + 1)]


def _at_most(marks: Sequence[float], most: int) -> Sequence[float]:
    return marks[:: -(-len(marks) // most)]


def _band(columns: Sequence[Column], low: Sequence[float], high: Sequence[float], top: float) -> str:
    over = _points(columns, [value / top for value in high])
    under = _points(columns, [value / top for value in low])
    return "M" + "L".join([*over, *reversed(under)]) + "Z"


def _points(columns: Sequence[Column], shares: Sequence[float]) -> list[str]:
    """Points through the middle of each column, with flat ends."""
    x = [columns[0].begin, *(column.middle for column in columns), columns[-1].end]
    y = [shares[0], *shares, shares[-1]]
    return [f"{BOX * across:.1f} {BOX * (1 - up):.1f}" for across, up in zip(x, y, strict=True)]


def _line(columns: Sequence[Column], line: Series, place: Callable[[float], float]) -> str:
    """A missing value is a gap in the line; a value between two gaps is a dot."""
    steps, drawing = [], False
    for column, value in zip(columns, line.values, strict=True):
        if value is None:
            drawing = False
            continue
        at = f"{BOX * column.middle:.1f} {BOX * (1 - place(value)):.1f}"
        steps.append(f"L{at}" if drawing else f"M{at}h0")
        drawing = True
    return f'<path class="line {line.tone}" d="{"".join(steps)}"/>'


def _tips(columns: Sequence[Column], series: Sequence[Series], *, leave_out_zero: bool) -> str:
    tips = []
    for at, column in enumerate(columns):
        values = [(one.name, one.tone, one.values[at], one.text) for one in series]
        lines = [
            [name, tone, text(value)]
            for name, tone, value, text in values
            if value is not None and (value or not leave_out_zero)
        ]
        tips.append([round(column.end, 5), column.label, lines])
    return _attribute(tips)


def _plot(shapes: Sequence[str], x: Ticks, y: Ticks, tips: str) -> str:
    grid = [f'<path class="grid" d="M0 {BOX * (1 - at):.1f}H{BOX}"/>' for at, _ in y]
    labels = "".join(f'<span style="bottom:{100 * at:.2f}%">{escape(text)}</span>' for at, text in y)
    return (
        f'<div class="chart"><div class="y">{labels}</div><div class="plot" data-tips="{tips}">'
        f'{_svg([*grid, *shapes])}<i class="cursor"></i></div><div class="x">{_x_labels(x)}</div></div>'
    )


def _svg(shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'


def _x_labels(ticks: Ticks) -> str:
    """Labels of an axis. Classes hide every second, then every fourth … label in narrow axes."""
    kinds = [""] * len(ticks)
    every = 1
    while every < len(ticks):
        needed = _needed_px(ticks[::every])
        width = next((width for width in _WIDTHS if width >= needed), _WIDTHS[-1] + 50)
        for at in range(every, len(ticks), 2 * every):
            kinds[at] = f' class="w{width}"'
        every *= 2
    return "".join(
        f'<span{kind} style="left:{100 * place:.2f}%">{escape(text)}</span>'
        for (place, text), kind in zip(ticks, kinds, strict=True)
    )


def _needed_px(ticks: Ticks) -> float:
    """Width of an axis at which none of these labels touches the next one."""
    return max(
        (((len(left) + len(right)) / 2 * CHARACTER_PX + GAP_PX) / (there - here))
        for (here, left), (there, right) in pairwise(ticks)
    )


def _attribute(value: object) -> str:
    return escape(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
