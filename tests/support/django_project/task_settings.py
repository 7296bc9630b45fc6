"""The same project with tasks of Django's own framework (the app notices)."""

import django

from tests.support.django_project.settings import *  # noqa: F403
from tests.support.django_project.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [
    *_INSTALLED_APPS,
    *(["django_tasks"] if django.VERSION < (6,) else []),
    "tests.support.django_project.notices",
]
_BACKEND = "forq.contrib.django.backend.ForqBackend"
TASKS = {
    "default": {"BACKEND": _BACKEND, "QUEUES": ["default", "mails", "urgent"]},
    "patient": {
        "BACKEND": _BACKEND,
        "QUEUES": [],
        "OPTIONS": {"max_retries": 2, "backoff": 0, "keep_done": "5m"},
    },
}
