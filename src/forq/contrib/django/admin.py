"""The admin pages of this package, for Django."""

from forq.contrib.django.outbox_admin import OutboxAdmin

__all__ = ["OutboxAdmin"]
