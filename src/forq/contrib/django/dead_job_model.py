"""The model of dead jobs. It has no table: they are in Redis. It gives their pages an entry in the admin, and
permissions."""

from typing import ClassVar

from django.db import models


class NoRows(models.Manager["DeadJob"]):
    """Never asks the database: `dumpdata` reads all models, also those without a table."""

    def get_queryset(self) -> "models.QuerySet[DeadJob]":
        return super().get_queryset().none()


class DeadJob(models.Model):
    """`reference`: QUEUE/ID@FENCE."""

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
