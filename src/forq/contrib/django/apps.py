"""What Django reads about this package."""

from django.apps import AppConfig


class ForqConfig(AppConfig):
    name = "forq.contrib.django"
    label = "forq"
    verbose_name = "forq"
    default_auto_field = "django.db.models.BigAutoField"
