"""More databases for the Django project of a test: each has an alias, all tables, and an outbox."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Those that have all tables.
_migrated: set[str] = set()


@contextmanager
def database(alias: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Adds a database to the settings and migrates it, once. Empties the tables of forq and of orders at the end."""
    from django.apps import apps
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections

    outbox = {"DATABASES": ["default", alias]}
    monkeypatch.setattr(settings, "DATABASES", {**settings.DATABASES, alias: config})
    monkeypatch.setattr(settings, "FORQ", {**settings.FORQ, "OUTBOX": outbox})
    monkeypatch.setitem(connections.settings, alias, connections.configure_settings(settings.DATABASES)[alias])
    try:
        where = f"{config.get('HOST')} {config['NAME']}"
        if where not in _migrated:
            call_command("migrate", verbosity=0, database=alias)
            _migrated.add(where)
        yield alias
        for label in ("forq", "orders"):
            for model in apps.get_app_config(label).get_models():
                if model._meta.managed:
                    model._default_manager.using(alias).all().delete()
    finally:
        connections[alias].close()
        del connections[alias]
