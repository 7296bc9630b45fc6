"""top on a terminal: asks once per interval, obeys keys, draws what is to be seen.

1. The feed brings answers; each changes what the pages show.
2. The terminal brings keys and signals.
3. Whatever happened, the screen is drawn again; what has not changed is not written.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forq.ctl.client import Client, connect
from forq.ctl.output import printable, span
from forq.ctl.pages import Overview, QueuePage
from forq.ctl.terminal import ENDING, Terminal
from forq.ctl.top import Figures, Row
from forq.errors import ForqError, PermissionRefused, SupervisorUnreachable, TimedOut

if TYPE_CHECKING:
    from argparse import Namespace

RECONNECT_SECONDS = 0.5
Then = Callable[[Any], None]
# An answer that is late by so much is worth a word.
LATE_SECONDS = 2.0
VERBS = {"p": ("queue.pause", "paused"), "r": ("queue.resume", "resumed")}


def show_screen(args: Namespace) -> int:
    feed = Feed(lambda: connect(args))
    try:
        with Terminal() as terminal:
            return Screen(feed, args.interval_seconds).run(terminal)
    finally:
        feed.close()


class Screen:
    def __init__(self, feed: Feed, interval_seconds: float) -> None:
        self._feed = feed
        self._interval_seconds = interval_seconds
        self._figures = Figures()
        self._overview = Overview()
        self._queue: QueuePage | None = None
        self._status: dict[str, Any] | None = None
        self._rows: list[Row] = []
        self._said = ""
        self._due = 0.0
        self._asked_at: float | None = None
        self._console = Console(highlight=False, markup=False, emoji=False, width=10_000)
        self._over = False

    def run(self, terminal: Terminal) -> int:
        while not self._over:
            self.tick(time.monotonic())
            size = terminal.size()
            terminal.draw([self._painted(line) for line in self.lines(size.columns, size.lines)])
            events = terminal.wait(self._feed.fileno(), self._patience(time.monotonic()))
            if events.readable:
                self._feed.read()
            for key in events.keys:
                self.press(key)
            if events.hung_up or any(number in ENDING for number in events.signals):
                return 128 + next((number for number in events.signals if number in ENDING), signal.SIGHUP)
            if signal.SIGTSTP in events.signals:
                terminal.suspend()
        return 0

    def tick(self, now: float) -> None:
        if self._feed.open(now) and now >= self._due and self._asked_at is None:
            self._due = max(self._due + self._interval_seconds, now)
            if self._feed.ask("status", {}, self._status_known):
                self._asked_at = now
            if self._queue is not None:
                self._queue.ask(self._feed)

    def press(self, key: str) -> None:
        self._said = "" if key else self._said
        if key in VERBS:
            self._order(*VERBS[key])
        elif key in ("q", "escape"):
            self._over, self._queue = self._queue is None, None
        elif self._queue is not None:
            self._queue.press(key)
        elif key == "enter" and self._overview.selected is not None:
            self._queue = QueuePage(self._overview.selected)
            self._queue.update(self._rows)
            self._queue.ask(self._feed)
        else:
            self._overview.press(key)

    def lines(self, width: int, height: int) -> list[Text]:
        """As many as the screen has: the page, what there is to say, the keys."""
        page = self._queue or self._overview
        room = max(1, height - 2)
        body = [Text("asking the supervisor …")] if self._status is None else page.lines(self._status, width, room)
        said = self._remark(page, time.monotonic())
        blank = [Text("")] * (room - len(body))
        lines = [*body[:room], *blank, said, Text(page.help(), style="dim")][:height]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _remark(self, page: Overview | QueuePage, now: float) -> Text:
        if self._feed.trouble is not None:
            return Text(f"not reachable, trying again: {printable(self._feed.trouble)}", style="bold red")
        if self._asked_at is not None and now - self._asked_at > LATE_SECONDS:
            return Text(f"no answer from the supervisor for {span(now - self._asked_at)}", style="bold yellow")
        return Text(self._said or page.reason() or "", style="bold")

    def _order(self, method: str, done: str) -> None:
        name = self._queue.name if self._queue is not None else self._overview.selected
        if name is None:
            return

        def answered(answer: Any) -> None:
            refused = isinstance(answer, ForqError)
            self._said = printable(f"{name}: {answer}" if refused else f"{done} {name}")

        if not self._feed.ask(method, {"name": name}, answered):
            self._said = "nobody is there to be told"

    def _status_known(self, status: Any) -> None:
        self._asked_at = None
        if isinstance(status, ForqError):
            self._said = "" if self._feed.trouble else printable(str(status))
            return
        self._status = status
        self._rows = self._figures.read(status, time.monotonic())
        self._overview.update(self._rows)
        if self._queue is not None:
            self._queue.update(self._rows)

    def _patience(self, now: float) -> float:
        if self._feed.fileno() is None:
            return RECONNECT_SECONDS
        # Of a late answer the age is shown, which grows.
        return max(0.0, self._due - now) if self._asked_at is None else LATE_SECONDS / 2

    def _painted(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="ignore", crop=False)
        return captured.get()


class Feed:
    """The questions that the screen asks, on one connection that is made again when it breaks. Never waits for an
    answer: each goes to the function that was given with its question, which gets an error if the connection breaks
    first. `trouble` says why nobody can be asked now; None while somebody can."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self.trouble: str | None = None
        self._connect = connect
        self._client: Client | None = None
        self._asked: dict[int, Then] = {}
        self._next_try = 0.0

    def fileno(self) -> int | None:
        return None if self._client is None else self._client.fileno()

    def open(self, now: float) -> bool:
        """Whether there is a connection; tries to make one, though not all the time."""
        if self._client is None and now >= self._next_try:
            self._next_try = now + RECONNECT_SECONDS
            try:
                self._client = self._connect()
            except (SupervisorUnreachable, TimedOut) as exc:
                self.trouble = str(exc)
        return self._client is not None

    def ask(self, method: str, params: dict[str, Any], then: Then) -> bool:
        """`then` gets the result or the error. False if nobody can be asked."""
        if self._client is None:
            return False
        try:
            self._asked[self._client.send(method, params)] = then
        except TimedOut as exc:
            self._lose(exc)
            return False
        return True

    def read(self) -> None:
        """Hands out the answers that are there; part of one stays for the next time."""
        while self._client is not None:
            try:
                answered, value = self._client.receive(time.monotonic())
            except TimedOut:
                return
            except PermissionRefused:
                raise
            except ForqError as exc:
                self._lose(exc)
                return
            self.trouble = None
            then = self._asked.pop(answered, None) if isinstance(answered, int) else None
            if then is not None:
                then(value)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _lose(self, why: ForqError) -> None:
        self.trouble = str(why)
        self.close()
        unanswered, self._asked = list(self._asked.values()), {}
        for then in unanswered:
            then(why)
