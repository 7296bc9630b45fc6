"""The models of this package, for Django."""

from forq.contrib.django.dead_job_model import DeadJob
from forq.contrib.django.outbox_model import OutboxEntry

__all__ = ["DeadJob", "OutboxEntry"]
