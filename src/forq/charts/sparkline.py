"""A small chart in a line of text: an area and a line, and the last value as a dot."""

import math
from collections.abc import Sequence
from html import escape

from forq.charts.axes import Text
from forq.charts.labels import short, tone_class

WIDTH_PX, HEIGHT_PX = 100, 24
_DOT_PX = 2.2
# Room for the dot and the line.
_EDGE_PX = 3.0


def sparkline(values: Sequence[float | None], label: str, tone: str, text: Text = short) -> str:
    """The scale begins at 0. None is a gap; a value between two gaps is a dash."""
    known = [value if value is not None and math.isfinite(value) else None for value in values]
    present = [value for value in known if value is not None]
    if not present:
        shapes = f'<path class="none" d="M{_EDGE_PX} {HEIGHT_PX - _EDGE_PX}H{WIDTH_PX - _EDGE_PX}"/>'
        return _svg(shapes, f"{label}: no data", tone)
    highest = max(present)
    now = "unknown" if known[-1] is None else text(known[-1])
    points = _points(known, highest)
    areas, lines = [], []
    for run in _runs(points):
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
        if len(run) == 1:
            line = f"{run[0][0] - 1:.1f} {run[0][1]:.1f}h2"
        else:
            areas.append(f"M{run[0][0]:.1f} {HEIGHT_PX}L{line}L{run[-1][0]:.1f} {HEIGHT_PX}Z")
        lines.append(f"M{line}")
    x, y = next(point for point in reversed(points) if point is not None)
    shapes = (
        f'<path class="area" d="{"".join(areas)}"/><path class="line" d="{"".join(lines)}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_DOT_PX}"/>'
    )
    return _svg(shapes, f"{label}: now {now}, highest {text(highest)}", tone)


def _points(values: Sequence[float | None], highest: float) -> list[tuple[float, float] | None]:
    """The last value is at the right edge, where a single one is, too."""
    wide, tall = WIDTH_PX - 2 * _EDGE_PX, HEIGHT_PX - 2 * _EDGE_PX
    steps = max(1, len(values) - 1)
    first = steps - (len(values) - 1)
    return [
        None
        if value is None
        else (
            _EDGE_PX + wide * (first + at) / steps,
            HEIGHT_PX - _EDGE_PX - (tall * (max(0.0, value) / highest) if highest > 0 else 0.0),
        )
        for at, value in enumerate(values)
    ]


def _runs(points: Sequence[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is not None:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _svg(shapes: str, summary: str, tone: str) -> str:
    return (
        f'<svg class="spark {tone_class(tone)}" width="{WIDTH_PX}" height="{HEIGHT_PX}" '
        f'viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" role="img" aria-label="{escape(summary)}">'
        f"<title>{escape(summary)}</title>{shapes}</svg>"
    )
