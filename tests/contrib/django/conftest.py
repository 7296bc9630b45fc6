"""One Django project per test session (tests/support/django_project), with a migrated SQLite database."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.drive.postgres import Postgres

if find_spec("django") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.django_project.settings"
    # Set here: the import of a test module may already read the settings. Each process of pytest-xdist has its own.
    os.environ["DJANGO_TEST_FOLDER"] = tempfile.mkdtemp(prefix="forq-django-")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.get("DJANGO_TEST_FOLDER", ""), ignore_errors=True)


@pytest.fixture(scope="session")
def _django() -> Iterator[None]:
    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    call_command("migrate", verbosity=0)
    yield
    connections.close_all()


@pytest.fixture
def project(_django: None, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The project with an empty database and an empty server; `forq.contrib.django.app` is new."""
    from django.core.management import call_command

    from forq.contrib.django import project as of_project

    monkeypatch.setenv("FORQ_REDIS", redis_url)
    root = "tests.support.django_project.orders.tasks"
    # A new app needs its tasks registered anew.
    monkeypatch.setattr(of_project, "_app", None)
    monkeypatch.delitem(sys.modules, root, raising=False)
    yield
    call_command("flush", verbosity=0, interactive=False)
    if of_project._app is not None:
        of_project._app.client.close()


@pytest.fixture
def project_environment(_django: None, project: None, redis_url: str) -> dict[str, str]:
    """The environment of another process that uses the same project, database and server."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "FORQ_REDIS": redis_url}


@pytest.fixture(scope="session")
def postgres() -> Iterator["Postgres"]:
    from tests.support.drive.postgres import Postgres

    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def alias(request: pytest.FixtureRequest, project: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The alias of a database with an outbox: SQLite, and PostgreSQL."""
    if request.param == "sqlite":
        yield "default"
        return
    from tests.support.drive.django_databases import database

    server: Postgres = request.getfixturevalue("postgres")
    config = {"ENGINE": "django.db.backends.postgresql", "HOST": server.host, "NAME": "postgres", "USER": "postgres"}
    with database("postgres", config, monkeypatch) as added:
        yield added
