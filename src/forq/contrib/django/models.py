"""The models of this package: the rows of the outbox, and dead jobs, which are in Redis and have no table."""

from datetime import datetime
from typing import ClassVar

from django.db import models
from django.utils import timezone

from forq.broker.chunks import NewJob


class OutboxEntry(models.Model):
    """One row per job. A delivered job has none.

    The row is marked while a job may be in Redis, from before its first send: `epoch` is not empty. `marked_by` is the
    attempt that marked it, `attempt` the last one that was begun. docs/design/django-outbox.md has the protocol.
    """

    WAITING, IN_DOUBT, REFUSED = "waiting", "in doubt", "refused"
    STATES: ClassVar = [(WAITING, "waiting"), (IN_DOUBT, "in doubt"), (REFUSED, "refused")]

    # Unique. Also the token of a job that was given none.
    key: "models.CharField[str, str]" = models.CharField(max_length=64, unique=True, editable=False)
    state: "models.CharField[str, str]" = models.CharField(max_length=10, choices=STATES, default=WAITING)
    task: "models.CharField[str, str]" = models.CharField(max_length=200)
    queue: "models.CharField[str, str]" = models.CharField(max_length=64)
    job_id: "models.CharField[str, str]" = models.CharField("job id", max_length=128)
    created_at: "models.DateTimeField[datetime, datetime]" = models.DateTimeField("created", default=timezone.now)
    error: "models.TextField[str, str]" = models.TextField(blank=True, default="")

    body: "models.BinaryField[bytes, bytes]" = models.BinaryField()
    priority: "models.SmallIntegerField[int, int]" = models.SmallIntegerField()
    token: "models.CharField[str, str]" = models.CharField(max_length=128)
    # As NewJob has them.
    run_at: "models.CharField[str, str]" = models.CharField(max_length=20, blank=True, default="")
    options: "models.TextField[str, str]" = models.TextField(blank=True, default="")
    if_exists: "models.CharField[str, str]" = models.CharField(max_length=10, default="update")
    durable: "models.CharField[str, str]" = models.CharField(max_length=10, blank=True, default="")

    attempted_at: "models.DateTimeField[datetime | None, datetime | None]" = models.DateTimeField(
        "first attempt", null=True, blank=True
    )
    epoch: "models.CharField[str, str]" = models.CharField(max_length=32, blank=True, default="")
    # Sends are repeated until then: epoch ms, by the clock of Redis.
    until_ms: "models.BigIntegerField[int, int]" = models.BigIntegerField(default=0)
    marked_by: "models.CharField[str, str]" = models.CharField(max_length=64, blank=True, default="")
    attempt: "models.CharField[str, str]" = models.CharField(max_length=64, blank=True, default="")

    class Meta:
        app_label = "forq"
        db_table = "forq_outbox"
        verbose_name = "outbox entry"
        verbose_name_plural = "outbox entries"
        indexes: ClassVar = [models.Index(fields=["state", "id"], name="forq_outbox_state")]

    def __str__(self) -> str:
        return f"{self.task} {self.job_id}"

    @property
    def call(self) -> tuple[str, str, str, str]:
        """Jobs for which these are equal can be sent in one call."""
        return self.queue, self.if_exists, self.durable, self.epoch

    def job(self) -> NewJob:
        return NewJob(self.job_id, self.priority, bytes(self.body), self.token, self.run_at, self.options)


class NoRows(models.Manager["DeadJob"]):
    """Never asks the database: `dumpdata` reads all models, also those without a table."""

    def get_queryset(self) -> "models.QuerySet[DeadJob]":
        return super().get_queryset().none()


class DeadJob(models.Model):
    """An entry in the admin for the pages of dead jobs, and their permissions. `reference`: QUEUE/ID@FENCE."""

    reference: "models.CharField[str, str]" = models.CharField(primary_key=True, max_length=240)

    objects: ClassVar = NoRows()

    class Meta:
        app_label = "forq"
        managed = False
        # For `dumpdata --all`.
        base_manager_name = "objects"
        verbose_name = "dead job"
        # change: retry; delete: discard.
        default_permissions = ("view", "change", "delete")

    def __str__(self) -> str:
        return self.reference
