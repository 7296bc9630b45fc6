"""The project of tests with two PostgreSQL databases and tasks that only query them. DJANGO_TEST_POOL: with pools."""

import os
from typing import Any

from tests.support.django_project.settings import *  # noqa: F403
from tests.support.django_project.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.django_project.queries"]
_pooled: dict[str, Any] = {"CONN_MAX_AGE": 0, "OPTIONS": {"pool": {"min_size": 1, "max_size": 1}}}
_server: dict[str, Any] = {
    "ENGINE": "django.db.backends.postgresql",
    "HOST": os.environ.get("DJANGO_TEST_POSTGRES", ""),
    "NAME": "postgres",
    "USER": "postgres",
    "CONN_MAX_AGE": None,
    **(_pooled if os.environ.get("DJANGO_TEST_POOL") else {}),
}
DATABASES = {"default": _server, "other": dict(_server)}
