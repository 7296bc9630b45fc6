"""What Django reads about this package."""

from django.apps import AppConfig
from django.core.checks import register


class ForqConfig(AppConfig):
    name = "forq.contrib.django"
    label = "forq"
    verbose_name = "forq"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from forq.contrib.django.checks import check_project

        register(check_project)
