"""Tasks that no module `tasks` has."""

from typing import TYPE_CHECKING

import django

if TYPE_CHECKING or django.VERSION < (6,):
    from django_tasks import task
else:
    from django.tasks import task


@task
def lost() -> None:
    """Workers never see it."""
