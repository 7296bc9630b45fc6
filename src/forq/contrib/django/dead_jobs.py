"""The dead jobs of all queues of a project: pages over several queues, and changes to a selection of jobs.

A reference is QUEUE/ID@FENCE. A page's cursor is QUEUE/MILLISECONDS/ID@FENCE: the job after which it begins.
"""

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Literal

from django.conf import settings

from forq.api_types import DeadBrief
from forq.app.app import App
from forq.client import DeadChanged, Queue
from forq.errors import ForqError, UnknownJob, UnknownQueue, UsageError
from forq.values import shown

Verb = Literal["retry", "discard"]

# Read from a queue at once: records contain the data of the jobs.
CHUNK = 10
# As in the broker.
KEPT_ATTEMPTS = 10
_CURSOR = re.compile(r"([\w.-]{1,64})/([0-9]{1,15})/([!-~]{1,160})", re.ASCII)
# No job has it: members of a queue have an @.
_NO_MEMBER = "-"


@dataclass(frozen=True)
class DeadRow:
    """One job of a page."""

    queue: str
    brief: DeadBrief

    @property
    def reference(self) -> str:
        return f"{self.queue}/{self.member}"

    @property
    def member(self) -> str:
        return f"{self.brief['id']}@{self.brief['fence']}"

    @property
    def died_ms(self) -> int:
        return round(self.brief["died_at"] * 1000)

    @property
    def cursor(self) -> str:
        return f"{self.queue}/{self.died_ms}/{self.member}"

    @property
    def died_at(self) -> datetime:
        return as_time(self.brief["died_at"])

    @property
    def attempts(self) -> str:
        count = self.brief["attempts"]
        return f"{count}+" if count >= KEPT_ATTEMPTS else str(count)


@dataclass
class Changed:
    """`done`: references. `refused`: the reason by reference. `unknown`: of jobs that may or may not have changed."""

    done: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


class ProjectDeadJobs:
    """The dead jobs in the queues of an app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.queues = app.queue_names()

    def page(self, queue: str | None, after: str | None, limit: int) -> tuple[list[DeadRow], str | None]:
        """The newest jobs of one queue, or of all, and the cursor of the next page."""
        names = self.queues if queue is None else [self._check(queue)]
        starts = dict.fromkeys(names) if after is None else _starts(names, after)
        merged = heapq.merge(*(self._rows(name, starts[name]) for name in names), key=lambda row: -row.died_ms)
        rows = list(islice(merged, limit + 1))
        return rows[:limit], rows[limit - 1].cursor if len(rows) > limit else None

    def show(self, reference: str) -> dict[str, Any]:
        """All fields of one job."""
        queue, member = self._split(reference)
        return {"queue": queue, **self._queue(queue)._dead().show(member)}

    def change(self, verb: Verb, references: Iterable[str]) -> Changed:
        """Retries or discards these jobs."""
        changed = Changed()
        by_queue: dict[str, list[str]] = {}
        for reference in dict.fromkeys(references):
            try:
                queue, member = self._split(reference)
                by_queue.setdefault(queue, []).append(member)
            except ForqError as exc:
                changed.refused[reference] = str(exc)
        for queue, members in by_queue.items():
            self._change_queue(queue, verb, members, changed)
        return changed

    def _change_queue(self, name: str, verb: Verb, members: list[str], changed: Changed) -> None:
        queue = self._queue(name)
        call: Callable[[list[str]], DeadChanged] = queue.retry_dead if verb == "retry" else queue.discard_dead
        try:
            refused = call(members).refused
        except (UnknownQueue, UsageError) as exc:
            changed.refused |= {f"{name}/{member}": str(exc) for member in members}
            return
        except ForqError as exc:
            # It may have come after a part of the work.
            changed.unknown |= {f"{name}/{member}": str(exc) for member in members}
            return
        changed.refused |= {f"{name}/{member}": str(exc) for member, exc in refused.items()}
        changed.done += [f"{name}/{member}" for member in members if member not in refused]

    def _rows(self, name: str, after: str | None) -> Iterator[DeadRow]:
        queue = self._queue(name)
        while True:
            try:
                page = queue.dead(CHUNK, after)
            except UnknownQueue:
                # Declared, but not in Redis yet.
                return
            yield from (DeadRow(name, brief) for brief in page.jobs)
            if page.next is None:
                return
            after = page.next

    def _queue(self, name: str) -> Queue:
        return self._app.client.queue(name)

    def _check(self, queue: str) -> str:
        if queue not in self.queues:
            raise UnknownQueue(f"this project has no queue {shown(queue)}; it has: {', '.join(self.queues) or 'none'}")
        return queue

    def _split(self, reference: str) -> tuple[str, str]:
        """Without a fence, a reference would mean the newest job with this id, perhaps one that nobody has seen."""
        queue, _, member = reference.partition("/")
        if not member.rpartition("@")[0]:
            raise UnknownJob(f"there is no dead job {shown(reference)}")
        return self._check(queue), member


def as_time(seconds: float) -> datetime:
    """For templates, which show it in the time zone of the request."""
    return datetime.fromtimestamp(seconds, UTC) if settings.USE_TZ else datetime.fromtimestamp(seconds)


def _starts(names: list[str], after: str) -> dict[str, str]:
    """The cursor of each queue. Jobs of the same millisecond are listed in the order of the queues."""
    cursor = _CURSOR.fullmatch(after)
    if cursor is None or cursor[1] not in names:
        raise UsageError(f"page {shown(after)} is not allowed: use the link on the page before it")
    last, died_ms, member = cursor[1], int(cursor[2]), cursor[3]
    place = names.index(last)
    return {
        name: f"{died_ms}/{member}" if name == last else f"{died_ms - (number < place)}/{_NO_MEMBER}"
        for number, name in enumerate(names)
    }
