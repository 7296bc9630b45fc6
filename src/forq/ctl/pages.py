"""The two pages of forqctl top's screen: all queues, and one queue in detail; and the tables they consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from forq.ctl.output import COLOURS, cell_text, dead_error, iso_time, printable, role_text, short_duration
from forq.ctl.top import (
    WORST_STATES_FIRST,
    QueueRow,
    RunningJob,
    capacity_line,
    count_text,
    job_text,
    limits_text,
    rate_text,
    redis_line,
    running_jobs,
    supervisor_line,
)
from forq.errors import ForqError
from forq.values import show_progress

if TYPE_CHECKING:
    from forq.ctl.screen import NonBlockingClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """On a narrow screen the columns with the highest `rank` are dropped. `max_width`: its width if there is room."""

    title: str
    rank: int
    value: Callable[[T], object]
    min_width: int = 0
    max_width: int = 0
    right: bool = True
    style: Callable[[T], str] = lambda _row: ""


def fit_columns(columns: Sequence[Column[T]], rows: Sequence[T], width: int) -> list[tuple[Column[T], int]]:
    """The columns that fit, in order, with their widths. The column with the lowest rank is always shown."""
    chosen: list[tuple[Column[T], int, int]] = []
    room = width
    for column in sorted(columns, key=lambda column: column.rank):
        needed = max([cell_len(column.title), *(cell_len(cell_text(column.value(row))) for row in rows)])
        wanted = min(needed, column.max_width) if column.max_width else needed
        min_width = min(max(column.min_width, cell_len(column.title)), wanted) if column.max_width else wanted
        gap = 1 if chosen else 0
        if chosen and min_width + gap > room:
            continue
        chosen.append((column, min_width, wanted))
        room -= min_width + gap
    widths = {}
    for column, min_width, wanted in chosen:
        more = max(0, min(wanted - min_width, room))
        room -= more
        widths[column.title] = min(min_width + more, width)
    return [(column, widths[column.title]) for column in columns if column.title in widths]


def header_line(fitted: Sequence[tuple[Column[T], int]]) -> Text:
    return Text(" ".join(_pad(column.title, width, column.right) for column, width in fitted), style="bold")


def table_line(fitted: Sequence[tuple[Column[T], int]], row: T) -> Text:
    text = Text()
    for position, (column, width) in enumerate(fitted):
        text.append(" " if position else "")
        text.append(_pad(cell_text(column.value(row)), width, column.right), style=column.style(row))
    return text


def _pad(text: str, width: int, right: bool) -> str:
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, max(0, width - 1)) + "…"
    return " " * (width - length) + text if right else text + " " * (width - length)


OVERVIEW_HELP = "q quit  ↑↓ move  enter open  p pause  r resume  s sort: {}"
QUEUES: tuple[Column[QueueRow], ...] = (
    Column("QUEUE", 0, lambda row: row.name, min_width=10, max_width=32, right=False),
    Column("STATE", 1, lambda row: row.state, right=False, style=lambda row: COLOURS.get(row.state, "")),
    Column("WAITING", 2, lambda row: count_text(row.waiting)),
    Column("ACTIVE", 4, lambda row: count_text(row.active)),
    Column("SCHED", 8, lambda row: count_text(row.scheduled)),
    Column("DEAD", 5, lambda row: count_text(row.dead), style=lambda row: "red" if row.dead else ""),
    Column("DONE/S", 3, lambda row: rate_text(row.done_per_second)),
    Column("FAIL/S", 7, lambda row: rate_text(row.failed_per_second)),
    Column("OLDEST", 6, lambda row: short_duration(row.oldest_waiting_seconds)),
    Column("RUNNING", 9, job_text, min_width=10, max_width=48, right=False),
    Column("RESTARTS", 10, lambda row: row.restarts),
    Column("LIMITS", 11, lambda row: limits_text(row.limits), right=False),
)


def _ascending(value: Callable[[QueueRow], Any]) -> Callable[[QueueRow], Any]:
    return lambda row: (value(row), row.name)


def _descending(value: Callable[[QueueRow], float | None]) -> Callable[[QueueRow], Any]:
    return lambda row: (-(value(row) or 0), row.name)


SORTS: dict[str, Callable[[QueueRow], Any]] = {
    "name": lambda row: row.name,
    "state": _ascending(lambda row: WORST_STATES_FIRST.index(row.state) if row.state in WORST_STATES_FIRST else -1),
    "waiting": _descending(lambda row: row.waiting),
    "done/s": _descending(lambda row: row.done_per_second),
    "fail/s": _descending(lambda row: row.failed_per_second),
    "dead": _descending(lambda row: row.dead),
    "oldest": _descending(lambda row: row.oldest_waiting_seconds),
}


class OverviewPage:
    def __init__(self) -> None:
        self.selected: str | None = None
        self._rows: list[QueueRow] = []
        self._sort = "name"
        self._top = 0
        self._page_size = 1

    def update(self, rows: list[QueueRow]) -> None:
        """Keeps the selected queue selected; if it is gone, selects the one in its position."""
        position = self._position()
        self._rows = sorted(rows, key=SORTS[self._sort])
        if all(row.name != self.selected for row in self._rows):
            self._select(position)

    def press(self, key: str) -> None:
        steps = {"up": -1, "down": 1, "page_up": -self._page_size, "page_down": self._page_size}
        if key in steps:
            self._select(self._position() + steps[key])
        elif key in ("home", "end"):
            self._select(0 if key == "home" else len(self._rows) - 1)
        elif key == "s":
            names = list(SORTS)
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
            self._rows.sort(key=SORTS[self._sort])

    def lines(self, status: dict[str, Any], width: int, height: int) -> list[Text]:
        """At most `height` lines."""
        redis = Text(redis_line(status), style="" if status["supervisor"]["redis"]["ok"] else "bold red")
        head = [Text(supervisor_line(status), style="bold"), Text(capacity_line(status)), redis]
        self._page_size = max(1, height - len(head) - 2)
        visible = self._visible_rows()
        fitted = fit_columns(QUEUES, visible, width)
        drawn = [_highlight(table_line(fitted, row), row.name == self.selected, width) for row in visible]
        return [*head, header_line(fitted), *drawn, *self._footer(visible)]

    def help(self) -> str:
        return OVERVIEW_HELP.format(self._sort)

    def reason(self) -> str | None:
        """Why the selected queue is not served; None if it is."""
        row = next((row for row in self._rows if row.name == self.selected), None)
        return None if row is None or not row.reason else f"{printable(row.name)}: {printable(row.reason)}"

    def _footer(self, visible: list[QueueRow]) -> list[Text]:
        if not self._rows:
            return [Text("no queues; create one: forqctl create NAME --handler MODULE:FUNCTION", style="dim")]
        if len(visible) == len(self._rows):
            return []
        last = self._top + len(visible)
        return [Text(f"{self._top + 1} to {last} of {len(self._rows)}", style="dim")]

    def _visible_rows(self) -> list[QueueRow]:
        position = self._position()
        if len(self._rows) <= self._page_size + 1:
            self._top = 0
            return self._rows
        self._top = max(min(self._top, position), position - self._page_size + 1)
        self._top = min(self._top, len(self._rows) - self._page_size)
        return self._rows[self._top : self._top + self._page_size]

    def _position(self) -> int:
        return next((position for position, row in enumerate(self._rows) if row.name == self.selected), self._top)

    def _select(self, position: int) -> None:
        self.selected = self._rows[max(0, min(position, len(self._rows) - 1))].name if self._rows else None


def _highlight(text: Text, selected: bool, width: int) -> Text:
    if selected:
        text.pad_right(max(0, width - text.cell_len))
        text.stylize("reverse")
    return text


QUEUE_HELP = "q back  ↑↓ scroll  p pause  r resume"
MAX_DEAD_SHOWN = 5
SCROLL_LINES = 10
Child = dict[str, Any]


CHILDREN: tuple[Column[Child], ...] = (
    Column("ROLE", 0, lambda child: child["label"], right=False),
    Column("PID", 1, lambda child: child["pid"]),
    Column("STATE", 2, lambda child: child["state"], right=False, style=lambda child: COLOURS.get(child["state"], "")),
    Column("UPTIME", 3, lambda child: short_duration(child["uptime_seconds"])),
    Column("DONE", 4, lambda child: count_text(child.get("done"))),
    Column("RESTARTS", 5, lambda child: child["restarts"]),
)
RUNNING: tuple[Column[RunningJob], ...] = (
    Column("JOB", 0, lambda job: job.id, min_width=10, max_width=40, right=False),
    Column("PID", 3, lambda job: job.pid),
    Column("FOR", 1, lambda job: short_duration(job.seconds)),
    Column("PROGRESS", 2, lambda job: _progress_text(job), min_width=10, max_width=80, right=False),
)
DEAD: tuple[Column[dict[str, Any]], ...] = (
    Column("JOB", 0, lambda job: job["id"], min_width=10, max_width=40, right=False),
    Column("DIED", 2, lambda job: iso_time(job["died_at"]), right=False),
    Column("ERROR", 1, dead_error, min_width=12, max_width=120, right=False, style=lambda _job: "red"),
)


class QueuePage:
    def __init__(self, name: str) -> None:
        self.name = name
        self._row: QueueRow | None = None
        self._why = ""
        self._dead: list[dict[str, Any]] = []
        self._requested = False
        self._top = 0

    def update(self, rows: list[QueueRow]) -> None:
        self._row = next((row for row in rows if row.name == self.name), None)

    def request(self, client: NonBlockingClient) -> None:
        """Requests what a status does not contain; at most one request of each kind is pending."""
        if self._requested:
            return
        self._requested = client.request(
            "jobs", {"name": self.name, "state": "waiting", "limit": 1}, self._on_first_job(client)
        )
        client.request("dead.list", {"name": self.name, "limit": MAX_DEAD_SHOWN}, self._on_dead)

    def _on_first_job(self, client: NonBlockingClient) -> Any:
        def known(page: Any) -> None:
            self._requested = False
            if isinstance(page, ForqError):
                self._why = printable(str(page))
            elif not page["jobs"]:
                self._why = "no job is waiting"
            else:
                first = page["jobs"][0]["id"]
                client.request("why", {"name": self.name, "id": first}, lambda answer: self._on_why(first, answer))

        return known

    def _on_why(self, job_id: str, answer: Any) -> None:
        reason = str(answer) if isinstance(answer, ForqError) else answer["why"]
        self._why = f"{printable(job_id)}: {printable(reason)}"

    def _on_dead(self, page: Any) -> None:
        self._dead = [] if isinstance(page, ForqError) else page["jobs"]

    def press(self, key: str) -> None:
        self._top += {"up": -1, "down": 1, "page_up": -SCROLL_LINES, "page_down": SCROLL_LINES}.get(key, 0)

    def help(self) -> str:
        return QUEUE_HELP

    def reason(self) -> str | None:
        return None if self._row is None or not self._row.reason else printable(self._row.reason)

    def lines(self, status: dict[str, Any], width: int, height: int) -> list[Text]:
        """`height` lines at most, from the scroll position."""
        row = self._row
        if row is None:
            return [Text(f"{printable(self.name)} was deleted", style="bold red")]
        title = Text(f"{printable(row.name)}  ", style="bold")
        title.append(row.state, style=COLOURS.get(row.state, ""))
        running = [job for child in row.children for job in running_jobs(child)]
        processes = [{**child, "label": role_text(child, row.children)} for child in row.children]
        lines = [
            title,
            *_wrap(_counts_line(row), width),
            *_section("PROCESSES", CHILDREN, processes, width, "none"),
            *_section("RUNNING", RUNNING, running, width, "no job is running"),
            Text(""),
            Text("FIRST IN LINE", style="bold underline"),
            *_wrap(self._why, width),
            *_section("LAST DEAD", DEAD, self._dead, width, "none"),
        ]
        self._top = max(0, min(self._top, len(lines) - height))
        return lines[self._top : self._top + height]


def _counts_line(row: QueueRow) -> str:
    known = {
        "waiting": count_text(row.waiting),
        "active": count_text(row.active),
        "scheduled": count_text(row.scheduled),
        **({"held": count_text(row.held)} if row.held else {}),
        "dead": count_text(row.dead),
        "done/s": rate_text(row.done_per_second),
        "failed/s": rate_text(row.failed_per_second),
        "oldest": short_duration(row.oldest_waiting_seconds),
        "restarts": str(row.restarts),
        "limits": limits_text(row.limits),
    }
    return "  ".join(f"{name} {value or '-'}" for name, value in known.items())


def _progress_text(job: RunningJob) -> str | None:
    return None if job.progress is None else show_progress(job.progress["fraction"], job.progress["text"])


def _section(title: str, columns: Any, rows: list[Any], width: int, nothing: str) -> list[Text]:
    head = [Text(""), Text(title, style="bold underline")]
    if not rows:
        return [*head, Text(nothing, style="dim")]
    fitted = fit_columns(columns, rows, width)
    return [*head, header_line(fitted), *(table_line(fitted, row) for row in rows)]


def _wrap(text: str, width: int) -> list[Text]:
    """Breaks lines between words if possible."""
    lines, current = [], ""
    for word in text.split(" "):
        if current and len(current) + 1 + len(word) > width:
            lines.append(Text(current))
            current = word
        else:
            current = f"{current} {word}" if current else word
    return [*lines, Text(current)]
