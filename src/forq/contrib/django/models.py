"""The models of this package, for Django."""

from forq.contrib.django.outbox_model import OutboxEntry

__all__ = ["OutboxEntry"]
