"""The pages of forqctl top's screen: all queues; or one with its processes, what they run, why its first job waits, and
its last dead jobs. First the table that both are made of: it shows the columns that the width has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from forq.ctl.output import COLOURS, cell, dead_error, moment, printable, span
from forq.ctl.top import (
    TROUBLES_FIRST,
    Row,
    RunningJob,
    about_capacity,
    about_redis,
    about_supervisor,
    running_jobs,
    shown_count,
    shown_job,
    shown_limits,
    shown_rate,
)
from forq.errors import ForqError
from forq.progress import show_progress

if TYPE_CHECKING:
    from forq.ctl.screen import Feed

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


OVERVIEW_HELP = "q quit  ↑↓ move  enter look  p pause  r resume  s sort: {}"
QUEUES: tuple[Column[Row], ...] = (
    Column("QUEUE", 0, lambda row: row.name, least=10, most=32, right=False),
    Column("STATE", 1, lambda row: row.state, right=False, style=lambda row: COLOURS.get(row.state, "")),
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
        fitted = fitting(QUEUES, seen, width)
        drawn = [_highlighted(line(fitted, row), row.name == self.selected, width) for row in seen]
        return [*head, header(fitted), *drawn, *self._below(seen)]

    def help(self) -> str:
        return OVERVIEW_HELP.format(self._sort)

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


QUEUE_HELP = "q back  ↑↓ scroll  p pause  r resume"
DEAD_SHOWN = 5
SCROLL_LINES = 10
Child = dict[str, Any]


CHILDREN: tuple[Column[Child], ...] = (
    Column("ROLE", 0, lambda child: child["role"], right=False),
    Column("PID", 1, lambda child: child["pid"]),
    Column("STATE", 2, lambda child: child["state"], right=False, style=lambda child: COLOURS.get(child["state"], "")),
    Column("UPTIME", 3, lambda child: span(child["uptime_seconds"])),
    Column("DONE", 4, lambda child: shown_count(child.get("done"))),
    Column("RESTARTS", 5, lambda child: child["restarts"]),
)
RUNNING: tuple[Column[RunningJob], ...] = (
    Column("JOB", 0, lambda job: job.id, least=10, most=40, right=False),
    Column("PID", 3, lambda job: job.pid),
    Column("FOR", 1, lambda job: span(job.seconds)),
    Column("PROGRESS", 2, lambda job: _progress(job), least=10, most=80, right=False),
)
DEAD: tuple[Column[dict[str, Any]], ...] = (
    Column("JOB", 0, lambda job: job["id"], least=10, most=40, right=False),
    Column("DIED", 2, lambda job: moment(job["died_at"]), right=False),
    Column("ERROR", 1, dead_error, least=12, most=120, right=False, style=lambda _job: "red"),
)


class QueuePage:
    def __init__(self, name: str) -> None:
        self.name = name
        self._row: Row | None = None
        self._why = ""
        self._dead: list[dict[str, Any]] = []
        self._asking = False
        self._first = 0

    def update(self, rows: list[Row]) -> None:
        self._row = next((row for row in rows if row.name == self.name), None)

    def ask(self, feed: Feed) -> None:
        """What a status does not tell; one question of each kind is under way at most."""
        if self._asking:
            return
        self._asking = feed.ask("jobs", {"name": self.name, "state": "waiting", "limit": 1}, self._first_known(feed))
        feed.ask("dead.list", {"name": self.name, "limit": DEAD_SHOWN}, self._dead_known)

    def _first_known(self, feed: Feed) -> Any:
        def known(page: Any) -> None:
            self._asking = False
            if isinstance(page, ForqError):
                self._why = printable(str(page))
            elif not page["jobs"]:
                self._why = "nothing waits"
            else:
                first = page["jobs"][0]["id"]
                feed.ask("why", {"name": self.name, "id": first}, lambda answer: self._why_known(first, answer))

        return known

    def _why_known(self, job_id: str, answer: Any) -> None:
        reason = str(answer) if isinstance(answer, ForqError) else answer["why"]
        self._why = f"{printable(job_id)}: {printable(reason)}"

    def _dead_known(self, page: Any) -> None:
        self._dead = [] if isinstance(page, ForqError) else page["jobs"]

    def press(self, key: str) -> None:
        self._first += {"up": -1, "down": 1, "page_up": -SCROLL_LINES, "page_down": SCROLL_LINES}.get(key, 0)

    def help(self) -> str:
        return QUEUE_HELP

    def reason(self) -> str | None:
        return None if self._row is None or not self._row.reason else printable(self._row.reason)

    def lines(self, status: dict[str, Any], width: int, height: int) -> list[Text]:
        """`height` lines at most, from where it was scrolled to."""
        row = self._row
        if row is None:
            return [Text(f"{printable(self.name)} is gone", style="bold red")]
        title = Text(f"{printable(row.name)}  ", style="bold")
        title.append(row.state, style=COLOURS.get(row.state, ""))
        running = [job for child in row.children for job in running_jobs(child)]
        lines = [
            title,
            *_wrapped(_counted(row), width),
            *_section("PROCESSES", CHILDREN, row.children, width, "none"),
            *_section("RUNNING", RUNNING, running, width, "no job runs"),
            Text(""),
            Text("FIRST IN LINE", style="bold underline"),
            *_wrapped(self._why, width),
            *_section("LAST DEAD", DEAD, self._dead, width, "none"),
        ]
        self._first = max(0, min(self._first, len(lines) - height))
        return lines[self._first : self._first + height]


def _counted(row: Row) -> str:
    known = {
        "waiting": shown_count(row.waiting),
        "active": shown_count(row.active),
        "scheduled": shown_count(row.scheduled),
        "dead": shown_count(row.dead),
        "done/s": shown_rate(row.done_per_second),
        "failed/s": shown_rate(row.failed_per_second),
        "oldest": span(row.oldest_waiting_seconds),
        "restarts": str(row.restarts),
        "limits": shown_limits(row.limits),
    }
    return "  ".join(f"{name} {value or '-'}" for name, value in known.items())


def _progress(job: RunningJob) -> str | None:
    return None if job.progress is None else show_progress(job.progress["fraction"], job.progress["text"])


def _section(title: str, columns: Any, rows: list[Any], width: int, nothing: str) -> list[Text]:
    head = [Text(""), Text(title, style="bold underline")]
    if not rows:
        return [*head, Text(nothing, style="dim")]
    fitted = fitting(columns, rows, width)
    return [*head, header(fitted), *(line(fitted, row) for row in rows)]


def _wrapped(text: str, width: int) -> list[Text]:
    """Between words, where that is possible."""
    lines, current = [], ""
    for word in text.split(" "):
        if current and len(current) + 1 + len(word) > width:
            lines.append(Text(current))
            current = word
        else:
            current = f"{current} {word}" if current else word
    return [*lines, Text(current)]
