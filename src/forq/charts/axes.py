"""Scales and axes: where values and round numbers are, and labels that never touch each other.

A chart stretches to its container, but its labels keep their size. So they are SVG text placed by percentages, beside
the plot. Python does not know the width of the container: each label gets a class with the minimum width at which it
has room, and charts.css hides it in narrower axes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

Ticks = Sequence[tuple[float, str]]
Text = Callable[[float], str]

# Maximum width of a character of a label (charts.css: 11.5 px), and the gap between labels.
CHARACTER_PX = 7
GAP_PX = 8
# Labels of the y axis end here before the plot.
_Y_GAP_PX = 8
_MAX_Y_CHARACTERS = 16
X_HEIGHT_PX = 26
# Below the lowest label of the y axis, whose descenders reach 7 px below the plot.
_X_BASELINE_PX = 20
# Left of an axis there is this room for half of a label, at the right end of a chart none.
LEFT_PX = 40
# A label that fits into an axis of this width is hidden in narrower ones. Closer to the end, it ends at its place.
_CENTERED_PX = 400
# A single label is never hidden, so it fits into the narrowest axis.
_NARROWEST_PX = 150
# charts.css hides labels of class wN in axes narrower than N px. These are the values of N.
WIDTHS = range(100, 1300, 50)

# Round times in microseconds: 1 µs to 100 ms, 1 s, 10 s, 1 min, 10 min, 1 h, 10 h, 1 d, 10 d, 100 d and 1,000 d.
_ROUND_TIMES = (*(10**power for power in range(8)), 6e7, 6e8, 3.6e9, 3.6e10, 8.64e10, 8.64e11, 8.64e12, 8.64e13)


def round_times(bounds: tuple[float, float]) -> Sequence[float]:
    """The round times around the bounds, at least two."""
    low = max(at for at, mark in enumerate(_ROUND_TIMES) if mark <= max(1, bounds[0]))
    high = next((at for at, mark in enumerate(_ROUND_TIMES) if mark >= bounds[1]), len(_ROUND_TIMES) - 1)
    low = min(low, len(_ROUND_TIMES) - 2)
    return _ROUND_TIMES[low : max(high, low + 1) + 1]


def log_place(marks: Sequence[float]) -> Callable[[float], float]:
    """Where a value is on a logarithmic scale from the first to the last mark, 0 to 1."""
    low, high = math.log10(marks[0]), math.log10(marks[-1])
    return lambda value: min(1.0, max(0.0, (math.log10(max(1.0, value)) - low) / (high - low)))


def linear_ticks(highest: float, text: Text, *, whole: bool = False) -> tuple[float, Ticks]:
    """The top of the scale, and its ticks at round numbers. `whole`: values are counts."""
    # Smaller values than the smallest normal number cannot be divided into steps.
    if highest <= 1e-300:
        return 1.0, [(0.0, text(0.0))]
    size = 10.0 ** math.floor(math.log10(highest))
    steps = [size * part for part in (0.2, 0.25, 0.5, 1, 2, 2.5) if not whole or (size * part).is_integer()]
    step = next((step for step in steps if step * 5 >= highest), size * 5)
    number = math.ceil(highest / step - 1e-9)
    return step * number, [(at / number, text(step * at)) for at in range(number + 1)]


def at_most(marks: Sequence[float], most: int) -> Sequence[float]:
    return marks[:: -(-len(marks) // most)]


def y_labels(ticks: Ticks, *, height_px: int | None = None) -> str:
    """Labels beside the plot, from the bottom (0) to the top (1). The column gets the width of the longest one."""
    texts = [_cut(text) for _, text in ticks]
    width = max((len(text) for text in texts), default=0) * CHARACTER_PX + _Y_GAP_PX
    labels = "".join(
        f'<text x="100%" dx="-{_Y_GAP_PX}" y="{100 * (1 - at):.2f}%" dy=".36em">{escape(text)}</text>'
        for (at, _), text in zip(ticks, texts, strict=True)
    )
    height = "" if height_px is None else f' height="{height_px}"'
    return f'<svg class="y" width="{width}"{height} aria-hidden="true">{labels}</svg>'


def x_labels(ticks: Ticks, *, left_px: int = LEFT_PX) -> str:
    """Labels below the plot. `left_px`: room for labels left of the axis."""
    labels = "".join(
        f'<text x="{100 * label.place:.2f}%" y="{_X_BASELINE_PX}"{_classes(label)}>{escape(label.text)}</text>'
        for label in _placed(ticks, left_px)
    )
    return f'<div class="x"><svg width="100%" height="{X_HEIGHT_PX}" aria-hidden="true">{labels}</svg></div>'


def corner_label(text: str) -> str:
    """A text left of the labels below the plot."""
    label = f'<text x="100%" dx="-{_Y_GAP_PX}" y="{_X_BASELINE_PX}">{escape(text)}</text>' if text else ""
    return f'<svg class="corner" width="1" height="{X_HEIGHT_PX}" aria-hidden="true">{label}</svg>'


@dataclass(frozen=True, slots=True)
class _Label:
    """`anchor`: the part of the text at its place. `width_px`: the least width of the axis that shows it (0: any)."""

    place: float
    text: str
    anchor: str
    width_px: int = 0

    @property
    def left_px(self) -> float:
        return {"start": 0.0, "": 0.5, "end": 1.0}[self.anchor] * len(self.text) * CHARACTER_PX

    @property
    def right_px(self) -> float:
        return len(self.text) * CHARACTER_PX - self.left_px


def _placed(ticks: Ticks, left_px: int) -> list[_Label]:
    """Every second, then every fourth … label is hidden in narrow axes, or everywhere if it never has room."""
    labels = [_label(place, text, left_px, alone=len(ticks) == 1) for place, text in ticks]
    widths: list[int] = [label.width_px for label in labels]
    levels = []
    every = 1
    while every < len(labels):
        levels.append(every)
        every *= 2
    least = 0
    for every in reversed(levels):
        least = max(least, _width_class(_needed_px(labels[::every])))
        for at in range(every, len(labels), 2 * every):
            widths[at] = max(widths[at], least)
    return [replace(label, width_px=width) for label, width in zip(labels, widths, strict=True) if width <= WIDTHS[-1]]


def _width_class(needed_px: float) -> int:
    return next((width for width in WIDTHS if width >= needed_px), WIDTHS[-1] + 1)


def _needed_px(labels: Sequence[_Label]) -> float:
    """Width of an axis at which none of these labels touches the next one."""
    return max(
        (
            (left.right_px + right.left_px + GAP_PX) / (right.place - left.place)
            if right.place > left.place
            else math.inf
            for left, right in pairwise(labels)
        )
    )


def _label(place: float, text: str, left_px: int, *, alone: bool) -> _Label:
    """A label that would stick out at an end of a narrow axis is hidden there, or begins or ends at its place."""
    half = len(text) * CHARACTER_PX / 2
    before = (half - left_px) / max(place, 1e-9)
    after = half / max(1 - place, 1e-9)
    if max(before, after) > (_NARROWEST_PX if alone else _CENTERED_PX):
        return _Label(place, text, "start" if place < 0.5 else "end")
    return _Label(place, text, "", 0 if alone or max(before, after) < WIDTHS[0] else _width_class(max(before, after)))


def _classes(label: _Label) -> str:
    classes = " ".join(filter(None, (label.anchor, f"w{label.width_px}" if label.width_px else "")))
    return f' class="{classes}"' if classes else ""


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_Y_CHARACTERS else text[: _MAX_Y_CHARACTERS - 1] + "…"
