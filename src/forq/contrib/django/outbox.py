"""The outbox of a database: jobs are written as rows, in the transaction that they belong to, and sent after it.

1. `Outbox.write` stores the rows, through the alias that was given.
2. When the transaction has committed, this process sends them at once, if Redis answers within a short time.
3. `deliver` sends what is left. The task in tasks.py calls it every few seconds.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseProblem
from django.db import OperationalError, ProgrammingError, connections, transaction
from django.db.models import Count, Min, Q
from django.db.models.functions import Length
from django.utils import timezone

from forq.app.tasks import JobRef, Prepared
from forq.broker.enqueue import TokenTerms
from forq.client import Client
from forq.contrib.django.outbox_delivery import (
    UNMARKED,
    Delivered,
    Delivery,
    check_autocommit,
    delete_rows,
    repeat_until_ms,
)
from forq.contrib.django.refs import OutboxRef
from forq.errors import ForqError, RedisUnavailable, UsageError
from forq.job import new_id

if TYPE_CHECKING:
    from forq.contrib.django.models import OutboxEntry
    from forq.contrib.django.project import DjangoApp

__all__ = ["Delivered", "OutboxStatus", "deliver", "discard", "outbox_status", "send_again"]

log = logging.getLogger("forq.outbox")

# Rows per round of `deliver`, and bytes of their data.
BATCH_ROWS = 500
BATCH_BYTES = 16 << 20
# Rows per INSERT.
INSERT_ROWS = 100
# What SQLite, PostgreSQL and MySQL say about a table that does not exist.
_NO_TABLE = ("no such table", "does not exist", "doesn't exist")
# After Redis did not answer, transactions of this process leave their rows to the deliverer for this long.
PAUSE_SECONDS = 5.0


class Outbox:
    """The outbox of an app in one database, as this process uses it."""

    def __init__(self, app: "DjangoApp", alias: str, timeout_seconds: float) -> None:
        self._app = app
        self._alias = alias
        self._timeout_seconds = timeout_seconds
        # A client of its own, because of the timeouts.
        self._client: Client | None = None
        self._lock = threading.Lock()
        # Per queue: its terms, and the monotonic time at which they were read.
        self._terms: dict[str, tuple[TokenTerms, float]] = {}
        # No attempt until then, on the monotonic clock.
        self._paused_until = 0.0

    def write(self, jobs: Sequence[Prepared[Any]]) -> list[JobRef[Any]]:
        """Stores rows in the current transaction. They are sent when it commits."""
        from forq.contrib.django.models import OutboxEntry

        check_autocommit(self._alias, "using(outbox=…)")
        attempt = _of_transaction(self._alias) or _Attempt(self)
        rows = [self._row(OutboxEntry, job, attempt) for job in jobs]
        try:
            OutboxEntry.objects.using(self._alias).bulk_create(rows, batch_size=INSERT_ROWS)
        except (ProgrammingError, OperationalError) as exc:
            if "forq_outbox" in str(exc) and any(words in str(exc) for words in _NO_TABLE):
                raise UsageError(
                    f"database {self._alias!r} has no table forq_outbox; run: "
                    f"manage.py migrate forq --database {self._alias} ({exc})"
                ) from exc
            raise
        at_commit = _AtCommit(attempt, rows)
        at_commit.refs = [
            OutboxRef(
                job.task, row.queue, row.job_id, self, row.key, keeps=job.sender._keeps, is_open=at_commit.is_open
            )
            for job, row in zip(jobs, rows, strict=True)
        ]
        transaction.on_commit(at_commit, using=self._alias)
        return list(at_commit.refs)

    def _row(self, model: "type[OutboxEntry]", prepared: Prepared[Any], attempt: "_Attempt") -> "OutboxEntry":
        job, sender, key = prepared.job, prepared.sender, new_id()
        row = model(
            key=key,
            task=prepared.task.name,
            queue=sender.queue,
            job_id=job.id,
            body=job.body,
            priority=job.priority,
            token=job.token or key,
            run_at=job.run_at,
            options=job.options,
            if_exists=sender._if_exists,
            durable=sender._durable or "",
        )
        terms = self._known_terms(sender.queue)
        if terms is not None:
            # Marked with the row itself, which saves a commit between that of the transaction and the send.
            row.epoch, row.until_ms, row.attempted_at = terms.epoch, repeat_until_ms(terms), row.created_at
            row.marked_by = row.attempt = attempt.delivery.attempt
        return row

    def _known_terms(self, queue: str) -> TokenTerms | None:
        """The terms of a queue as this process knows them, with the server's time now. Redis checks the epoch."""
        known = self._terms.get(queue)
        if known is None or time.monotonic() < self._paused_until:
            return None
        terms, read_at = known
        return terms._replace(now_ms=terms.now_ms + round((time.monotonic() - read_at) * 1000))

    def send_committed(self, attempt: "_Attempt") -> None:
        """Sends the rows of a transaction that has committed. Errors of Redis and of the database are logged."""
        delivery = attempt.delivery
        try:
            rows = attempt.committed()
            marked = [row for row in rows if row.epoch]
            unmarked = [row for row in rows if not row.epoch]
            if time.monotonic() < self._paused_until:
                if marked:
                    delivery.clear(marked, None)
                return
            delivery.send_rows(marked)
            if delivery.failure is not None:
                raise delivery.failure
            if unmarked:
                delivery.deliver((row.key, row.queue) for row in unmarked)
        except RedisUnavailable as exc:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            log.warning("jobs stay in the outbox of database %s until Redis is back: %s", self._alias, exc)
        except (ForqError, DatabaseProblem) as exc:
            log.warning("jobs stay in the outbox of database %s: %s", self._alias, exc)
        self._remember(delivery)

    def _remember(self, delivery: Delivery) -> None:
        now = time.monotonic()
        self._terms |= {queue: (terms, now) for queue, terms in delivery.terms.items()}
        for queue in delivery.delivered.stuck:
            # Its epoch may have changed.
            self._terms.pop(queue, None)

    def deliver_one(self, key: str, queue: str) -> Delivery:
        """Delivers this row now, with the app's own timeouts. RedisUnavailable if Redis cannot be reached."""
        delivery = Delivery(self._app, self._alias, self._app.client)
        delivery.deliver([(key, queue)], wait=True)
        return delivery

    def find(self, key: str) -> "OutboxEntry | None":
        from forq.contrib.django.models import OutboxEntry

        return OutboxEntry.objects.using(self._alias).filter(key=key).first()

    def withdraw(self, key: str) -> bool:
        """Deletes a row that no process has tried to send. False if there is none."""
        from forq.contrib.django.models import OutboxEntry

        rows = OutboxEntry.objects.using(self._alias).filter(key=key, epoch="")
        return delete_rows(rows) > 0

    @property
    def alias(self) -> str:
        return self._alias

    def new_delivery(self) -> Delivery:
        with self._lock:
            if self._client is None:
                seconds = self._timeout_seconds
                app = self._app.client
                self._client = Client(app.url, prefix=app.prefix, timeout=seconds, connect_timeout=seconds)
        return Delivery(self._app, self._alias, self._client)


class _Attempt:
    """The attempt to send the rows of one transaction: one call per queue, made by the first of its callbacks."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.delivery = outbox.new_delivery()
        self.callbacks: list[_AtCommit] = []
        self.ran = False
        # Keys of rows of savepoints that were rolled back.
        self.rolled_back: set[str] = set()

    def run(self) -> None:
        if self.ran:
            return
        self.ran = True
        self.outbox.send_committed(self)
        for callback in self.callbacks:
            for ref in callback.refs:
                if ref.key in self.delivery.stored:
                    ref._set_sent(*self.delivery.stored[ref.key])

    def committed(self) -> "list[OutboxEntry]":
        """Its rows, without those of savepoints that were rolled back."""
        rows = [row for callback in self.callbacks for row in callback.rows]
        # Django calls a callback of a savepoint that transaction.savepoint_rollback has rolled back. It counts the
        # savepoints that this thread has made.
        if len(self.callbacks) == 1 and not connections[self.outbox.alias].savepoint_state:
            return rows
        from forq.contrib.django.models import OutboxEntry

        keys = {row.key for row in rows}
        found = OutboxEntry.objects.using(self.outbox.alias).filter(key__in=keys)
        self.rolled_back = keys.difference(found.values_list("key", flat=True))
        return [row for row in rows if row.key not in self.rolled_back]


class _AtCommit:
    """Called when the transaction of some rows has committed."""

    def __init__(self, attempt: _Attempt, rows: "list[OutboxEntry]") -> None:
        self.attempt = attempt
        self.rows = rows
        self.refs: list[OutboxRef[Any]] = []
        self._connection = connections[attempt.outbox.alias]
        attempt.callbacks.append(self)

    def __call__(self) -> None:
        self.attempt.run()
        for ref in self.refs:
            if ref.key not in self.attempt.rolled_back:
                ref._set_committed()

    def is_open(self) -> bool:
        """Whether the transaction may still commit."""
        return any(entry[1] is self for entry in self._connection.run_on_commit)


def _of_transaction(alias: str) -> _Attempt | None:
    """The attempt of earlier rows of the current transaction."""
    for _, callback, *_ in reversed(connections[alias].run_on_commit):
        if isinstance(callback, _AtCommit) and not callback.attempt.ran:
            return callback.attempt
    return None


def deliver(
    alias: str = "default",
    *,
    seconds: float | None = None,
    batch: int = BATCH_ROWS,
    stop: threading.Event | None = None,
) -> Delivered:
    """Sends the rows of the outbox of a database, in the order of their insertion, once through the table.

    Several processes may call it at the same time. `seconds`: no round of `batch` rows begins later, nor after
    `stop` is set. RedisUnavailable if Redis cannot be reached: nothing is lost.
    """
    from forq.contrib.django.models import OutboxEntry
    from forq.contrib.django.project import project_app

    app = project_app()
    app.outbox(alias)
    total, after = Delivered(), 0
    deadline = None if seconds is None else time.monotonic() + seconds
    while (deadline is None or time.monotonic() < deadline) and not (stop is not None and stop.is_set()):
        waiting = OutboxEntry.objects.using(alias).filter(state=OutboxEntry.WAITING, pk__gt=after)
        first = waiting.exclude(queue__in=list(total.stuck)).order_by("pk")[:batch]
        rows = _of_one_round(first.annotate(size=Length("body")).values_list("pk", "key", "queue", "size"))
        if not rows:
            break
        after = rows[-1][0]
        delivery = Delivery(app, alias, app.client)
        delivery.delivered = total
        delivery.deliver((key, queue) for _, key, queue, _ in rows)
    return total


def _of_one_round(rows: Iterable[tuple[int, str, str, int]]) -> list[tuple[int, str, str, int]]:
    """The first rows whose data is not more than BATCH_BYTES, but at least one."""
    chosen: list[tuple[int, str, str, int]] = []
    size = 0
    for row in rows:
        size += row[3]
        if chosen and size > BATCH_BYTES:
            break
        chosen.append(row)
    return chosen


@dataclass(frozen=True)
class OutboxStatus:
    """`waiting`: rows that will be sent; `oldest`: the age of the first of them. `in_doubt`, `refused`: rows that need
    a decision."""

    waiting: int
    oldest: timedelta | None
    in_doubt: int
    refused: int


def outbox_status(alias: str = "default") -> OutboxStatus:
    """How many rows the outbox of a database has, in one query."""
    from forq.contrib.django.models import OutboxEntry

    waiting = Q(state=OutboxEntry.WAITING)
    found = OutboxEntry.objects.using(alias).aggregate(
        waiting=Count("pk", filter=waiting),
        oldest=Min("created_at", filter=waiting),
        in_doubt=Count("pk", filter=Q(state=OutboxEntry.IN_DOUBT)),
        refused=Count("pk", filter=Q(state=OutboxEntry.REFUSED)),
    )
    oldest = found["oldest"]
    age = None if oldest is None else max(timedelta(0), timezone.now() - oldest)
    return OutboxStatus(found["waiting"], age, found["in_doubt"], found["refused"])


def send_again(alias: str, pks: Sequence[int]) -> int:
    """Makes rows that are in doubt or refused wait again; returns how many. A job in doubt that Redis had stored, and
    whose token it has forgotten, then runs twice."""
    from forq.contrib.django.models import OutboxEntry

    rows = OutboxEntry.objects.using(alias).filter(pk__in=pks)
    again = rows.filter(state=OutboxEntry.IN_DOUBT).update(state=OutboxEntry.WAITING, error="", **UNMARKED)
    # An earlier attempt may have stored it, so the mark stays.
    return again + rows.filter(state=OutboxEntry.REFUSED).update(state=OutboxEntry.WAITING, error="")


def discard(alias: str, pks: Sequence[int]) -> int:
    """Deletes rows that are in doubt or refused; returns how many. Rows that wait are never deleted: they may be on
    their way."""
    from forq.contrib.django.models import OutboxEntry

    flagged = OutboxEntry.objects.using(alias).filter(pk__in=pks).exclude(state=OutboxEntry.WAITING)
    return delete_rows(flagged)
