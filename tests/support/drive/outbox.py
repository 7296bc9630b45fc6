"""Drives the outbox of the test project: takes jobs out of Redis as a worker would, and breaks calls to Redis."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections, transaction

from forq.app.tasks import JobRef
from forq.broker.enqueue import JobIdentity, Producer
from forq.contrib.django.outbox_delivery import Delivery
from forq.contrib.django.project import project_app
from forq.errors import ForqError, OutcomeUnknown

if TYPE_CHECKING:
    from forq.contrib.django.models import OutboxEntry


class Crash(BaseException):
    """The end of a process: nothing may catch it."""


def order(alias: str, number: str = "1", **options: Any) -> JobRef[None]:
    """An order with its job, in one transaction of this database."""
    from tests.support.django_project.orders.models import Order
    from tests.support.django_project.orders.tasks import send_receipt

    with transaction.atomic(using=alias):
        Order.objects.using(alias).create(number=number)
        return send_receipt.using(outbox=alias, **options).enqueue(number)


def rows(alias: str) -> "list[OutboxEntry]":
    from forq.contrib.django.models import OutboxEntry

    return list(OutboxEntry.objects.using(alias).order_by("pk"))


def change_rows(alias: str, **values: Any) -> None:
    from forq.contrib.django.models import OutboxEntry

    OutboxEntry.objects.using(alias).update(**values)


def waiting_ids(queue: str = "mails") -> list[str]:
    return [job["id"] for job in project_app().client.queue(queue).jobs(limit=1000).jobs]


def take_jobs(queue: str = "mails") -> list[str]:
    """Removes the waiting jobs, as if workers had run them. Their tokens stay."""
    ids = waiting_ids(queue)
    for job_id in ids:
        assert project_app().client.queue(queue).cancel(job_id)
    return ids


def crash_at(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """`before mark`, `after send` …: the process of the next delivery ends there."""
    when, _, name = step.partition(" ")
    method = getattr(Delivery, name)

    def crashing(*args: Any, **how: Any) -> Any:
        if when == "after":
            method(*args, **how)
        raise Crash(step)

    monkeypatch.setattr(Delivery, name, crashing)


def end_process(alias: str) -> None:
    """What the end of a process leaves: no open transaction, no callbacks, nothing in memory."""
    connections[alias].close()
    project_app()._outboxes.clear()


Call = Callable[..., list[tuple[str, JobIdentity | None]]]


@contextmanager
def failing_sends(error: ForqError, *, stored: bool = False) -> Iterator[None]:
    """Every enqueue fails with this error. `stored`: only the answer is lost."""
    call: Call = Producer.enqueue_identified

    def fail(self: Producer, *args: Any) -> list[tuple[str, JobIdentity | None]]:
        if stored:
            call(self, *args)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Producer, "enqueue_identified", fail)
        yield


def unknown() -> OutcomeUnknown:
    return OutcomeUnknown("connection to Redis broke")
