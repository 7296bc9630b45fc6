"""forq in a Django project: `INSTALLED_APPS = [..., "forq.contrib.django"]`.

`app` is the project's forq App, made from the setting FORQ when it is first used:

    # shop/tasks.py
    from forq.contrib.django import app

    @app.task(queue="mails")
    def send_receipt(order: int) -> None: ...
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forq.contrib.django.project import DjangoApp

    app: DjangoApp

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    # Django imports this package before its settings can be used.
    if name == "app":
        from forq.contrib.django.project import project_app

        return project_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
