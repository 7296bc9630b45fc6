"""The admin pages of this package, for Django."""

from forq.contrib.django.dead_job_admin import DeadJobAdmin
from forq.contrib.django.outbox_admin import OutboxAdmin

__all__ = ["DeadJobAdmin", "OutboxAdmin"]
