"""Labels of charts: numbers and durations as short texts, and legends with their tones."""

from collections.abc import Iterable
from html import escape

_SECOND = 1_000_000
_UNITS = (
    (86_400 * _SECOND, "d"),
    (3600 * _SECOND, "h"),
    (60 * _SECOND, "min"),
    (_SECOND, "s"),
    (1000, "ms"),
)
# From here on, all digits would be longer than a label can be.
_SCIENTIFIC = 1e9


def count(value: int) -> str:
    return f"{value:,}"


def short(value: float) -> str:
    """Three significant digits, or all of a whole number that a label can hold."""
    if abs(value) >= _SCIENTIFIC:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits}e{int(power)}"
    if value >= 100 or value == int(value):
        return f"{round(value):,}"
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.{1 if value >= 10 else 2}f}".rstrip("0").rstrip(".")


def duration(micros: float) -> str:
    for size, unit in _UNITS:
        if micros >= size:
            return f"{short(micros / size)} {unit}"
    return f"{short(micros)} µs"


def tone_class(tone: str) -> str:
    return f"tone-{tone}"


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """A list of (name, tone, note)."""
    items = "".join(
        f'<li><i class="chip {tone_class(tone)}"></i><span>{escape(name)}</span> <em>{escape(note)}</em></li>'
        for name, tone, note in entries
    )
    return f'<ul class="chart-legend">{items}</ul>'
