"""One Django project per test session (tests/support/django_project), with a migrated SQLite database."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

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
