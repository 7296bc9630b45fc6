"""System checks of a project that uses forq: `manage.py check`."""

from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from forq.contrib.django.project import PACKAGE, discover_tasks, project_app
from forq.errors import ForqError


def check_project(**_: Any) -> list[CheckMessage]:
    """The setting FORQ, and the tasks of the installed apps. A module that cannot be imported raises its own error."""
    try:
        app = project_app()
    except ImproperlyConfigured as exc:
        return [Error(str(exc), id="forq.E001")]
    try:
        discover_tasks()
        app.definitions()
    except ForqError as exc:
        return [Error(str(exc), id="forq.E002")]
    return []


def check_installed(**_: Any) -> list[CheckMessage]:
    if apps.is_installed(PACKAGE):
        return []
    return [
        Error(
            f"{PACKAGE}.app is used, but {PACKAGE!r} is not in INSTALLED_APPS",
            hint=f"Add it: INSTALLED_APPS = [..., {PACKAGE!r}]",
            id="forq.E003",
        )
    ]
