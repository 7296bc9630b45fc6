"""The second page of the screen: one queue, its processes, what they run, why the first waiting job waits, who died."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from forq.ctl.tables import moment, printable, span
from forq.ctl.top.columns import STYLES, Column, fitting, header, line
from forq.ctl.top.feed import Feed
from forq.ctl.top.figures import Row, RunningJob, running_jobs, shown_count, shown_limits, shown_rate
from forq.errors import ForqError
from forq.progress import show_progress

HELP = "q back  ↑↓ scroll  p pause  r resume"
DEAD_SHOWN = 5
SCROLL_LINES = 10
Child = dict[str, Any]


CHILDREN: tuple[Column[Child], ...] = (
    Column("ROLE", 0, lambda child: child["role"], right=False),
    Column("PID", 1, lambda child: child["pid"]),
    Column("STATE", 2, lambda child: child["state"], right=False, style=lambda child: STYLES.get(child["state"], "")),
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
    Column("ERROR", 1, lambda job: _error(job), least=12, most=120, right=False, style=lambda _job: "red"),
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
        return HELP

    def reason(self) -> str | None:
        return None if self._row is None or not self._row.reason else printable(self._row.reason)

    def lines(self, status: dict[str, Any], width: int, height: int) -> list[Text]:
        """`height` lines at most, from where it was scrolled to."""
        row = self._row
        if row is None:
            return [Text(f"{printable(self.name)} is gone", style="bold red")]
        title = Text(f"{printable(row.name)}  ", style="bold")
        title.append(row.state, style=STYLES.get(row.state, ""))
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


def _error(job: dict[str, Any]) -> str:
    return ": ".join(str(part) for part in (job["error"], job["message"]) if part)


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
