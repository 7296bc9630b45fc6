"""The project's app with the tasks of all installed apps, for workers: `forq run --app forq.contrib.django.worker:app`.

Importing this module sets Django up; DJANGO_SETTINGS_MODULE names the settings.
"""

import django
from django.core.exceptions import ImproperlyConfigured

django.setup()

from forq.contrib.django.checks import check_installed  # noqa: E402
from forq.contrib.django.connections import prepare_worker  # noqa: E402
from forq.contrib.django.project import discover_tasks, project_app, register_framework_tasks  # noqa: E402

for _error in check_installed():
    raise ImproperlyConfigured(f"{_error.msg}. {_error.hint}")
prepare_worker()
discover_tasks()
app = project_app()
register_framework_tasks(app)
