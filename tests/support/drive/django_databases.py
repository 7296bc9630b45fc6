"""More databases for the Django project of a test: each has an alias, all tables, and an outbox."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def database(alias: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Adds a database to the settings and migrates it. Empties it at the end."""
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections

    outbox = {"DATABASES": ["default", alias]}
    monkeypatch.setattr(settings, "DATABASES", {**settings.DATABASES, alias: config})
    monkeypatch.setattr(settings, "FORQ", {**settings.FORQ, "OUTBOX": outbox})
    monkeypatch.setitem(connections.settings, alias, connections.configure_settings(settings.DATABASES)[alias])
    try:
        call_command("migrate", verbosity=0, database=alias)
        yield alias
        call_command("flush", verbosity=0, interactive=False, database=alias)
    finally:
        connections[alias].close()
        del connections[alias]
