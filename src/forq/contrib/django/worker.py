"""The project's app with the tasks of all installed apps, for workers: `forq run --app forq.contrib.django.worker:app`.

Importing this module sets Django up; DJANGO_SETTINGS_MODULE names the settings.
"""

import django

django.setup()

from forq.contrib.django.connections import prepare_worker  # noqa: E402
from forq.contrib.django.project import discover_tasks, project_app  # noqa: E402

prepare_worker()
discover_tasks()
app = project_app()
