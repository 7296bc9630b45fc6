from django.db import models


class Order(models.Model):
    number: "models.CharField[str, str]" = models.CharField(max_length=40, unique=True)


class Receipt(models.Model):
    """One row per run of a job."""

    number: "models.CharField[str, str]" = models.CharField(max_length=40)
