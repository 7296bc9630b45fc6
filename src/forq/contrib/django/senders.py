"""Senders of `using(on_commit=ALIAS)` and `using(outbox=ALIAS)`: jobs that belong to a transaction of the database."""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from forq.app.app import App
from forq.app.tasks import JobOptions, JobRef, Prepared, Sender, Task
from forq.contrib.django.late_jobs import job_at_send
from forq.contrib.django.outbox_delivery import check_autocommit
from forq.contrib.django.refs import CommitRef, NotSent
from forq.errors import ForqError, OutcomeUnknown, UsageError
from forq.settings import suggestion
from forq.values import shown

if TYPE_CHECKING:
    from forq.contrib.django.project import DjangoApp

P = ParamSpec("P")
T = TypeVar("T", covariant=True)


class CommitSender(Sender[P, T]):
    """Base of the senders whose jobs are sent when the transaction of a database commits."""

    def __init__(self, app: "DjangoApp", task: Task[P, T], queue: str, options: JobOptions, alias: str) -> None:
        super().__init__(task, queue, options)
        self._app = app
        self.alias = alias

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[T]:
        (ref,) = self.enqueue_prepared([Prepared(self, self._new_job(args, kwargs))])
        return ref

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[T]:
        """In the thread in which asgiref runs the queries of this context, whose transaction counts."""
        return await sync_to_async(self.enqueue)(*args, **kwargs)

    def enqueue_prepared(self, jobs: Sequence[Prepared[Any]]) -> list[JobRef[Any]]:
        """Jobs of senders of this class and alias."""
        raise NotImplementedError


class OnCommitSender(CommitSender[P, T]):
    """The job is sent when the transaction commits, at once if there is none, and never after a rollback.

    If Redis cannot be reached then, NotSent is raised after the commit, and the job is lost.
    """

    def enqueue_prepared(self, jobs: Sequence[Prepared[Any]]) -> list[JobRef[Any]]:
        check_autocommit(self.alias, "using(on_commit=…)")
        at_commit = _SendAtCommit(self._app, self.alias, jobs)
        transaction.on_commit(at_commit, using=self.alias)
        return list(at_commit.refs)


class OutboxSender(CommitSender[P, T]):
    """The job is a row of the database, written in its transaction, until Redis has it."""

    def enqueue_prepared(self, jobs: Sequence[Prepared[Any]]) -> list[JobRef[Any]]:
        return self._app.outbox(self.alias).write(jobs)


class _SendAtCommit:
    """Sends jobs in bulk when their transaction has committed, and gives the refs their identities."""

    def __init__(self, app: "DjangoApp", alias: str, jobs: Sequence[Prepared[Any]]) -> None:
        self._app = app
        self._alias = alias
        self._jobs = jobs
        self._enqueued_at = time.monotonic()
        self._connection = connections[alias]
        self.refs: list[CommitRef[Any]] = [
            CommitRef(job.task, job.sender.queue, job.job.id, alias, keeps=job.sender._keeps, is_open=self.is_open)
            for job in jobs
        ]

    def __call__(self) -> None:
        elapsed = time.monotonic() - self._enqueued_at
        jobs = [Prepared(sender, job_at_send(job, elapsed)) for sender, job in self._jobs]
        try:
            stored = App.enqueue_many(self._app, jobs)
        except ForqError as exc:
            raise self._not_sent(exc) from exc
        for ref, found in zip(self.refs, stored, strict=True):
            ref._set_sent(found.id, found._identity)

    def is_open(self) -> bool:
        """Whether the transaction may still commit."""
        return any(entry[1] is self for entry in self._connection.run_on_commit)

    def _not_sent(self, exc: ForqError) -> NotSent:
        first, others = self.refs[0], len(self.refs) - 1
        more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
        # Several jobs may take several calls, of which the first ones have succeeded.
        is_certain = not others and not isinstance(exc, OutcomeUnknown)
        fate = "was not sent" if is_certain else "may not have been sent"
        return NotSent(
            f"the transaction of database {self._alias!r} has been committed, but job {first.id!r} of task "
            f"{first._task.name!r}{more} {fate}: {exc}. Later on_commit callbacks of the transaction were not called. "
            f"using(outbox={self._alias!r}) keeps such jobs until Redis is back"
        )


def sender_for(app: "DjangoApp", task: Task[P, T], queue: str, options: JobOptions) -> Sender[P, T]:
    """The sender of `task.using(**options)`."""
    given = [name for name in ("on_commit", "outbox") if name in options]
    if not given:
        return Sender(task, queue, options)
    if len(given) > 1:
        raise UsageError("using(on_commit=…, outbox=…): give one of them; the outbox waits for the commit, too")
    (option,) = given
    if "after" in options:
        raise UsageError(
            f"using({option}=…, after=…) is not allowed: {option} keeps no dependencies; enqueue the job without it, "
            "for example in transaction.on_commit(lambda: task.using(after=…).enqueue(…))"
        )
    alias = cast(str, cast(Any, options)[option])
    known = list(connections)
    if alias not in known:
        names = ", ".join(map(repr, known))
        near = suggestion(alias, known) if isinstance(alias, str) else ""
        raise UsageError(f"using({option}={shown(alias)}): there is no such database{near}; DATABASES has: {names}")
    if option == "on_commit":
        return OnCommitSender(app, task, queue, options, alias)
    app.outbox(alias)
    return OutboxSender(app, task, queue, options, alias)


def enqueue_many(app: "DjangoApp", jobs: Iterable[Prepared[T]]) -> list[JobRef[T]]:
    """`App.enqueue_many` for jobs of any senders: one bulk call, at once or at the commit, or rows of one insert."""
    prepared = list(jobs)
    groups: dict[tuple[type[Any], str], list[int]] = {}
    for number, (sender, _) in enumerate(prepared):
        kind = (type(sender), sender.alias) if isinstance(sender, CommitSender) else (Sender, "")
        groups.setdefault(kind, []).append(number)
    refs: dict[int, JobRef[T]] = {}
    for numbers in groups.values():
        group = [prepared[number] for number in numbers]
        sender = group[0].sender
        found = sender.enqueue_prepared(group) if isinstance(sender, CommitSender) else App.enqueue_many(app, group)
        refs |= zip(numbers, found, strict=True)
    return [refs[number] for number in range(len(prepared))]
