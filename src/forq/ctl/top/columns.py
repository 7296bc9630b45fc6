"""A table that fits: which columns a width has room for, how wide each is, and its lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from forq.ctl.tables import cell

STYLES = {
    **dict.fromkeys(("running", "busy"), "green"),
    **dict.fromkeys(("paused", "draining", "starting", "stopping", "limited", "unserved"), "yellow"),
    **dict.fromkeys(("flapping", "config_error", "stopped", "backoff"), "red"),
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """`rank` says who goes first when there is little room: the highest. Up to `most` cells wide if there is room."""

    title: str
    rank: int
    value: Callable[[T], object]
    least: int = 0
    most: int = 0
    right: bool = True
    style: Callable[[T], str] = lambda _row: ""


def fitting(columns: Sequence[Column[T]], rows: Sequence[T], width: int) -> list[tuple[Column[T], int]]:
    """The columns that fit, in their order, and the width of each. The first in rank is there always."""
    chosen: list[tuple[Column[T], int, int]] = []
    room = width
    for column in sorted(columns, key=lambda column: column.rank):
        needed = max([cell_len(column.title), *(cell_len(cell(column.value(row))) for row in rows)])
        wanted = min(needed, column.most) if column.most else needed
        least = min(max(column.least, cell_len(column.title)), wanted) if column.most else wanted
        gap = 1 if chosen else 0
        if chosen and least + gap > room:
            continue
        chosen.append((column, least, wanted))
        room -= least + gap
    widths = {}
    for column, least, wanted in chosen:
        more = max(0, min(wanted - least, room))
        room -= more
        widths[column.title] = min(least + more, width)
    return [(column, widths[column.title]) for column in columns if column.title in widths]


def header(fitted: Sequence[tuple[Column[T], int]]) -> Text:
    return Text(" ".join(_padded(column.title, width, column.right) for column, width in fitted), style="bold")


def line(fitted: Sequence[tuple[Column[T], int]], row: T) -> Text:
    text = Text()
    for position, (column, width) in enumerate(fitted):
        text.append(" " if position else "")
        text.append(_padded(cell(column.value(row)), width, column.right), style=column.style(row))
    return text


def _padded(text: str, width: int, right: bool) -> str:
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, max(0, width - 1)) + "…"
    return " " * (width - length) + text if right else text + " " * (width - length)
