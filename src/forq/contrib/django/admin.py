"""The admin pages of this package, for Django."""

from forq.contrib.django.dead_job_admin import DeadJobAdmin

__all__ = ["DeadJobAdmin"]
