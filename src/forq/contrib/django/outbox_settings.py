"""FORQ["OUTBOX"]: which databases have an outbox, and how its rows are delivered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from forq.client import check_timeout
from forq.settings import suggestion
from forq.values import check_queue_name, shown

_KEYS = ("DATABASES", "QUEUE", "EVERY", "TIMEOUT")
# Deliveries have a queue of their own: jobs that fill another queue do not delay them.
DEFAULT_QUEUE = "outbox"
DEFAULT_EVERY = "5s"
# How long the process that has committed waits for Redis. The deliverer has the app's own timeouts.
DEFAULT_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    databases: tuple[str, ...]
    queue: str = DEFAULT_QUEUE
    every: Any = DEFAULT_EVERY
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS


def read_outbox_settings(given: object) -> OutboxSettings:
    """ImproperlyConfigured or UsageError if they are invalid."""
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f"FORQ['OUTBOX'] = {shown(given)} is not allowed: a dict with {', '.join(_KEYS)}")
    for key in given:
        if key not in _KEYS:
            raise ImproperlyConfigured(f"FORQ['OUTBOX'] has no key {shown(key)}{suggestion(str(key).upper(), _KEYS)}")
    databases = given.get("DATABASES", ["default"])
    known = ", ".join(map(repr, settings.DATABASES))
    if isinstance(databases, str) or not isinstance(databases, list | tuple) or not databases:
        raise ImproperlyConfigured(
            f"FORQ['OUTBOX']['DATABASES'] = {shown(databases)} is not allowed: a list of aliases of DATABASES: {known}"
        )
    for alias in databases:
        if alias not in settings.DATABASES:
            raise ImproperlyConfigured(
                f"FORQ['OUTBOX']['DATABASES']: there is no database {shown(alias)}; DATABASES has: {known}"
            )
    return OutboxSettings(
        tuple(databases),
        check_queue_name(given.get("QUEUE", DEFAULT_QUEUE)),
        given.get("EVERY", DEFAULT_EVERY),
        check_timeout("FORQ['OUTBOX']['TIMEOUT']", given.get("TIMEOUT", DEFAULT_TIMEOUT_SECONDS)),
    )
