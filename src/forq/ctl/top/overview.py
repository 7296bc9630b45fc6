"""The first page of the screen: all queues, one of them selected. Only the rows that are to be seen are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.text import Text

from forq.ctl.tables import printable, span
from forq.ctl.top.columns import STYLES, Column, fitting, header, line
from forq.ctl.top.figures import (
    TROUBLES_FIRST,
    Row,
    about_capacity,
    about_redis,
    about_supervisor,
    shown_count,
    shown_job,
    shown_limits,
    shown_rate,
)

HELP = "q quit  ↑↓ move  enter look  p pause  r resume  s sort: {}"
COLUMNS: tuple[Column[Row], ...] = (
    Column("QUEUE", 0, lambda row: row.name, least=10, most=32, right=False),
    Column("STATE", 1, lambda row: row.state, right=False, style=lambda row: STYLES.get(row.state, "")),
    Column("WAITING", 2, lambda row: shown_count(row.waiting)),
    Column("ACTIVE", 4, lambda row: shown_count(row.active)),
    Column("SCHED", 8, lambda row: shown_count(row.scheduled)),
    Column("DEAD", 5, lambda row: shown_count(row.dead), style=lambda row: "red" if row.dead else ""),
    Column("DONE/S", 3, lambda row: shown_rate(row.done_per_second)),
    Column("FAIL/S", 7, lambda row: shown_rate(row.failed_per_second)),
    Column("OLDEST", 6, lambda row: span(row.oldest_waiting_seconds)),
    Column("RUNNING", 9, shown_job, least=10, most=48, right=False),
    Column("RESTARTS", 10, lambda row: row.restarts),
    Column("LIMITS", 11, lambda row: shown_limits(row.limits), right=False),
)


def _least_first(value: Callable[[Row], Any]) -> Callable[[Row], Any]:
    return lambda row: (value(row), row.name)


def _most_first(value: Callable[[Row], float | None]) -> Callable[[Row], Any]:
    return lambda row: (-(value(row) or 0), row.name)


SORTS: dict[str, Callable[[Row], Any]] = {
    "name": lambda row: row.name,
    "state": _least_first(lambda row: TROUBLES_FIRST.index(row.state) if row.state in TROUBLES_FIRST else -1),
    "waiting": _most_first(lambda row: row.waiting),
    "done/s": _most_first(lambda row: row.done_per_second),
    "fail/s": _most_first(lambda row: row.failed_per_second),
    "dead": _most_first(lambda row: row.dead),
    "oldest": _most_first(lambda row: row.oldest_waiting_seconds),
}


class Overview:
    def __init__(self) -> None:
        self.selected: str | None = None
        self._rows: list[Row] = []
        self._sort = "name"
        self._first = 0
        self._page = 1

    def update(self, rows: list[Row]) -> None:
        """The selected queue stays selected, wherever it is now; if it is gone, the one in its place."""
        place = self._place()
        self._rows = sorted(rows, key=SORTS[self._sort])
        if all(row.name != self.selected for row in self._rows):
            self._select(place)

    def press(self, key: str) -> None:
        steps = {"up": -1, "down": 1, "page_up": -self._page, "page_down": self._page}
        if key in steps:
            self._select(self._place() + steps[key])
        elif key in ("home", "end"):
            self._select(0 if key == "home" else len(self._rows) - 1)
        elif key == "s":
            names = list(SORTS)
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
            self._rows.sort(key=SORTS[self._sort])

    def lines(self, status: dict[str, Any], width: int, height: int) -> list[Text]:
        """`height` lines at most."""
        redis = Text(about_redis(status), style="" if status["supervisor"]["redis"]["ok"] else "bold red")
        head = [Text(about_supervisor(status), style="bold"), Text(about_capacity(status)), redis]
        self._page = max(1, height - len(head) - 2)
        seen = self._seen()
        fitted = fitting(COLUMNS, seen, width)
        drawn = [_highlighted(line(fitted, row), row.name == self.selected, width) for row in seen]
        return [*head, header(fitted), *drawn, *self._below(seen)]

    def help(self) -> str:
        return HELP.format(self._sort)

    def reason(self) -> str | None:
        """Why the selected queue is not served, if it is not."""
        row = next((row for row in self._rows if row.name == self.selected), None)
        return None if row is None or not row.reason else f"{printable(row.name)}: {printable(row.reason)}"

    def _below(self, seen: list[Row]) -> list[Text]:
        if not self._rows:
            return [Text("no queue yet: forqctl create NAME --handler MODULE:FUNCTION", style="dim")]
        if len(seen) == len(self._rows):
            return []
        last = self._first + len(seen)
        return [Text(f"{self._first + 1} to {last} of {len(self._rows)}", style="dim")]

    def _seen(self) -> list[Row]:
        place = self._place()
        if len(self._rows) <= self._page + 1:
            self._first = 0
            return self._rows
        self._first = max(min(self._first, place), place - self._page + 1)
        self._first = min(self._first, len(self._rows) - self._page)
        return self._rows[self._first : self._first + self._page]

    def _place(self) -> int:
        return next((place for place, row in enumerate(self._rows) if row.name == self.selected), self._first)

    def _select(self, place: int) -> None:
        self.selected = self._rows[max(0, min(place, len(self._rows) - 1))].name if self._rows else None


def _highlighted(text: Text, selected: bool, width: int) -> Text:
    if selected:
        text.pad_right(max(0, width - text.cell_len))
        text.stylize("reverse")
    return text
