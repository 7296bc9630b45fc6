"""The model of dead jobs. It has no table: they are in Redis. It gives their pages an entry in the admin, and
permissions."""

from django.db import models


class DeadJob(models.Model):
    """`reference`: QUEUE/ID@FENCE."""

    reference: "models.CharField[str, str]" = models.CharField(primary_key=True, max_length=240)

    class Meta:
        app_label = "forq"
        managed = False
        verbose_name = "dead job"
        # change: retry; delete: discard.
        default_permissions = ("view", "change", "delete")

    def __str__(self) -> str:
        return self.reference
