"""The models of this package, for Django."""

from forq.contrib.django.dead_job_model import DeadJob

__all__ = ["DeadJob"]
