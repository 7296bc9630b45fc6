"""Sends rows of an outbox to Redis, each exactly once. docs/design/django-outbox.md has the protocol and its argument.

1. `read_terms` asks Redis for the epoch of each queue, and how long it remembers tokens.
2. `mark` commits to the database that the rows may be in Redis from now on, and until when a send may be repeated.
3. `send` enqueues the jobs, each with the token of its row. Redis refuses a send that comes too late.
4. `delete` removes the rows that Redis has accepted. `clear` takes a mark back if Redis has certainly stored nothing.

A process may die between any two of these steps. The methods are called in this order and have no other callers, so
that a test can end a process at each of them.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from forq.broker.chunks import chunks
from forq.broker.enqueue import JobIdentity, Producer, Repeatable, TokenTerms, Update
from forq.broker.link import CallNotAllowed
from forq.client import Client
from forq.contrib.django.late_jobs import job_at_send
from forq.errors import (
    BackPressure,
    Exists,
    ForqError,
    IncompatibleProtocol,
    NoReplica,
    OutcomeUnknown,
    QueueFull,
    RedisUnavailable,
    TooLate,
    UnknownQueue,
    UsageError,
    WrongMode,
)
from forq.job import new_id

if TYPE_CHECKING:
    from forq.contrib.django.models import OutboxEntry
    from forq.contrib.django.project import DjangoApp

log = logging.getLogger("forq.outbox")

# What a queue answers to a job that it will never take.
_FINAL = (UsageError, Exists, WrongMode)
# Other answers after which certainly nothing is stored. Any other error may come from the middle of the script.
_CERTAIN = (BackPressure, IncompatibleProtocol, TooLate, UnknownQueue)
# A send may be repeated for dedup_ttl of its queue, but at least for this long.
MIN_REPEAT_MS = 3_600_000
UNMARKED: dict[str, Any] = {"epoch": "", "until_ms": 0, "attempted_at": None, "marked_by": "", "attempt": ""}

Stored = dict[str, tuple[str, JobIdentity | None]]


@dataclass
class Delivered:
    """What one call has done: `sent` rows have left the outbox, `in_doubt` and `refused` rows need a decision.

    `stuck`: queues that take no jobs now, and why; their rows wait for the next call.
    """

    sent: int = 0
    in_doubt: int = 0
    refused: int = 0
    stuck: dict[str, str] = field(default_factory=dict)


class Delivery:
    """One attempt to deliver some rows of one database."""

    def __init__(self, app: "DjangoApp", alias: str, client: Client) -> None:
        from forq.contrib.django.models import OutboxEntry

        self.attempt = new_id()
        self.delivered = Delivered()
        # Ids and identities of the stored jobs, by the keys of their rows.
        self.stored: Stored = {}
        # By queue, as `deliver` has read them.
        self.terms: dict[str, TokenTerms] = {}
        # Why Redis could not be used.
        self.failure: RedisUnavailable | None = None
        self._app = app
        self._alias = alias
        self._client = client
        self._model = OutboxEntry
        features = connections[alias].features
        self._has_locks = features.has_select_for_update
        self._skips_locked = features.has_select_for_update_skip_locked

    def deliver(self, rows: Iterable[tuple[str, str]], *, wait: bool = False) -> None:
        """Delivers rows, given as (key, queue). `wait`: also for those that another process is delivering now.

        RedisUnavailable if Redis cannot be reached.
        """
        keys: dict[str, list[str]] = {}
        for key, queue in rows:
            keys.setdefault(queue, []).append(key)
        self.terms = self.read_terms(keys)
        if self.terms:
            self.mark({queue: keys[queue] for queue in self.terms}, wait=wait)
            self.send_marked([key for queue in self.terms for key in keys[queue]], wait=wait)
        if self.failure is not None:
            raise self.failure

    def read_terms(self, keys: Mapping[str, Sequence[str]]) -> dict[str, TokenTerms]:
        """By queue. Creates absent queues. The rows of a queue that cannot be used are refused, or wait."""
        terms: dict[str, TokenTerms] = {}
        for queue in keys:
            try:
                terms[queue] = self._terms_of(queue)
            except RedisUnavailable:
                raise
            except UnknownQueue as exc:
                if isinstance(exc.__cause__, CallNotAllowed):
                    self._stop_queue(queue, exc)
                else:
                    self._refuse(self._rows(key__in=keys[queue]), exc)
            except ForqError as exc:
                self._stop_queue(queue, exc)
        return terms

    def _terms_of(self, queue: str) -> TokenTerms:
        producer = self._producer(queue)
        try:
            return producer.token_terms()
        except UnknownQueue:
            self._import_tasks()
            self._app.create_absent_queue(queue)
            return producer.token_terms()

    def _import_tasks(self) -> None:
        """They declare the queues, and a shell or a web server need not have imported all of them."""
        from forq.contrib.django.project import discover_tasks, register_framework_tasks

        try:
            discover_tasks()
            register_framework_tasks(self._app)
        except Exception as exc:
            raise ForqError(f"cannot import the tasks of this project; run: manage.py check ({exc!r})") from exc

    def mark(self, keys: Mapping[str, Sequence[str]], *, wait: bool = False) -> None:
        """Committed when it returns. Each statement holds its own conditions, for databases without row locks."""
        with self._own_transaction():
            for queue in sorted(keys):
                rows = self._lock(self._rows(key__in=keys[queue]), wait=wait)
                epoch, now_ms, _ = terms = self.terms[queue]
                rows.filter(epoch="").update(
                    epoch=epoch,
                    until_ms=repeat_until_ms(terms),
                    attempted_at=timezone.now(),
                    marked_by=self.attempt,
                    attempt=self.attempt,
                )
                rows.filter(epoch=epoch, until_ms__gte=now_ms).update(attempt=self.attempt)
                self._doubt(rows.exclude(epoch="").filter(~Q(epoch=epoch) | Q(until_ms__lt=now_ms)), queue)

    def send_marked(self, keys: Sequence[str], *, wait: bool = False) -> None:
        """The rows stay locked until they are deleted, where the database has locks."""
        with ExitStack() as stack:
            if self._has_locks:
                stack.enter_context(self._own_transaction())
            rows = self._lock(self._rows(key__in=keys, attempt=self.attempt), wait=wait)
            self.send_rows(list(rows.order_by("pk")))

    def send_rows(self, rows: Sequence["OutboxEntry"]) -> None:
        """Sends marked rows of this attempt, those of a queue in their order, and deletes what Redis has accepted.

        If Redis is down, sets `failure` and does not raise: the changes of the rows must be committed.
        """
        for alike in _calls(rows):
            if self.failure is not None or alike[0].queue in self.delivered.stuck:
                self.clear(alike, self.failure)
            else:
                self._send_alike(alike)

    def _send_alike(self, rows: Sequence["OutboxEntry"]) -> None:
        queue = rows[0].queue
        try:
            stored = self.send(rows)
        except OutcomeUnknown as exc:
            # The marks stay.
            log.warning("unknown outcome of an enqueue to queue %s, jobs: %d: %s", queue, len(rows), exc)
            if rows[0].durable:
                # Perhaps only a replica is slow. Jobs that need none must not wait for it.
                self._stop_queue(queue, exc)
            else:
                self.failure = exc
        except NoReplica as exc:
            self.clear(rows, exc)
            self._stop_queue(queue, exc)
        except RedisUnavailable as exc:
            self.clear(rows, exc)
            self.failure = exc
        except (QueueFull, *_FINAL) as exc:
            if len(rows) > 1:
                # Some of them may be accepted alone.
                self._send_one_by_one(rows)
            elif isinstance(exc, QueueFull):
                self.clear(rows, exc)
                self._stop_queue(queue, exc)
            else:
                self._refuse(self._rows(key=rows[0].key), exc)
        except ForqError as exc:
            if isinstance(exc, _CERTAIN):
                self.clear(rows, exc)
            else:
                # The marks stay.
                self._rows(key__in=[row.key for row in rows]).update(error=str(exc))
            self._stop_queue(queue, exc)
        else:
            self.stored |= stored
            self.delivered.sent += self.delete(rows)

    def _send_one_by_one(self, rows: Sequence["OutboxEntry"]) -> None:
        for number, row in enumerate(rows):
            if self.failure is not None or row.queue in self.delivered.stuck:
                self.clear(rows[number:], self.failure)
                return
            self._send_alike([row])

    def send(self, rows: Sequence["OutboxEntry"]) -> Stored:
        """One call to Redis, which stores all jobs or none."""
        queue, if_exists, durable, epoch = rows[0].call
        limits = Repeatable(epoch, min(row.until_ms for row in rows), max(row.until_ms for row in rows))
        now = timezone.now()
        jobs = [job_at_send(row.job(), (now - row.created_at).total_seconds()) for row in rows]
        update = Update(if_exists, repeatable=limits)
        found = self._producer(queue).enqueue_identified(jobs, update, durable or None)
        # With "skip" it may be a job that an earlier call stored.
        return {
            row.key: (id, None if if_exists == "skip" else identity)
            for row, (id, identity) in zip(rows, found, strict=True)
        }

    def delete(self, rows: Sequence["OutboxEntry"]) -> int:
        """Returns how many there were: on databases without locks, another process may have sent them, too."""
        return delete_rows(self._every_row(key__in=[row.key for row in rows]))

    def clear(self, rows: Sequence["OutboxEntry"], failure: ForqError | None) -> None:
        """Nothing of this attempt was stored: takes its marks back. A mark of another attempt stays, and so does one
        that another attempt has used since."""
        text = {} if failure is None else {"error": str(failure)}
        mine = self._every_row(key__in=[row.key for row in rows], marked_by=self.attempt, attempt=self.attempt)
        # A deliverer has flagged a row that was written with an old epoch, before this process could send it.
        mine.filter(state=self._model.IN_DOUBT).update(state=self._model.WAITING, error="")
        mine.filter(state=self._model.WAITING).update(**UNMARKED, **text)

    def _doubt(self, rows: "QuerySet[OutboxEntry]", queue: str) -> None:
        error = (
            "an attempt to send it had no answer, and Redis no longer knows whether it was stored; look for the job's "
            "effects, then send it again or discard it"
        )
        count = rows.update(state=self._model.IN_DOUBT, error=error)
        if count:
            self.delivered.in_doubt += count
            log.error("jobs of queue %s in doubt: %d (see the outbox in the admin): %s", queue, count, error)

    def _refuse(self, rows: "QuerySet[OutboxEntry]", exc: ForqError) -> None:
        count = rows.update(state=self._model.REFUSED, error=str(exc))
        if count:
            self.delivered.refused += count
            log.error("refused jobs of the outbox: %d (see the outbox in the admin): %s", count, exc)

    def _stop_queue(self, queue: str, exc: ForqError) -> None:
        self.delivered.stuck[queue] = str(exc)
        log.warning("queue %s takes no jobs now; its outbox rows wait: %s", queue, exc)

    def _rows(self, **conditions: Any) -> "QuerySet[OutboxEntry]":
        """Rows that may be sent."""
        return self._every_row(state=self._model.WAITING, **conditions)

    def _every_row(self, **conditions: Any) -> "QuerySet[OutboxEntry]":
        return self._model.objects.using(self._alias).filter(**conditions)

    def _lock(self, rows: "QuerySet[OutboxEntry]", *, wait: bool) -> "QuerySet[OutboxEntry]":
        """Locks rows and returns them. Without locks in the database: all of them."""
        if not self._has_locks:
            return rows
        skip = self._skips_locked and not wait
        keys = rows.order_by("pk").select_for_update(skip_locked=skip).values_list("pk", flat=True)
        return self._every_row(pk__in=list(keys), state=self._model.WAITING)

    @contextmanager
    def _own_transaction(self) -> Iterator[None]:
        """UsageError inside another transaction: a mark must be committed before the send."""
        check_autocommit(self._alias, "delivering its outbox")
        with ExitStack() as stack:
            try:
                stack.enter_context(transaction.atomic(using=self._alias, durable=True))
            except RuntimeError as exc:
                raise UsageError(
                    f"the outbox of database {self._alias!r} cannot be delivered inside a transaction, because each "
                    "step must be committed before the next one; call it after the block"
                ) from exc
            yield

    def _producer(self, queue: str) -> Producer:
        return Producer(self._client.link(), self._client.prefix, queue)


def delete_rows(rows: "QuerySet[OutboxEntry]") -> int:
    """One DELETE with the conditions of the query. `delete()` would select the rows first if a project has a receiver
    of deletions of all models, and would then delete them whatever has happened to them since."""
    return rows._raw_delete(rows.db)


def repeat_until_ms(terms: TokenTerms) -> int:
    """Until when a row that is marked now may be sent."""
    return terms.now_ms + max(terms.dedup_ttl_ms, MIN_REPEAT_MS)


def check_autocommit(alias: str, what: str) -> None:
    """UsageError while a program manages the transactions of this thread's connection itself."""
    connection = connections[alias]
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise UsageError(
            f"database {alias!r} has autocommit off, and {what} needs to know when a transaction ends: use "
            "transaction.atomic() instead of set_autocommit(False)"
        )


def _calls(rows: Iterable["OutboxEntry"]) -> Iterator[list["OutboxEntry"]]:
    """Rows that one call can send. The rows of a queue keep their order."""
    queues: dict[str, list[OutboxEntry]] = {}
    for row in rows:
        queues.setdefault(row.queue, []).append(row)
    for of_queue in queues.values():
        for _, alike in groupby(of_queue, key=lambda row: row.call):
            group = list(alike)
            start = 0
            for chunk in chunks(row.job() for row in group):
                yield group[start : start + len(chunk)]
                start += len(chunk)
