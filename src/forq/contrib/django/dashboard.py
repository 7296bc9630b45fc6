"""The dashboard in a Django project, below a prefix of its ASGI application:

    # shop/asgi.py
    application = dashboard_application(get_asgi_application())

Needs the extra forq[web].
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from forq.contrib.django.project import PACKAGE, project_app
from forq.values import shown

__all__ = ["dashboard_application"]

# Of any library: their types of messages differ.
ASGIApplication = Callable[[Any, Any, Any], Awaitable[None]]


def dashboard_application(
    django_application: ASGIApplication, prefix: str = "/forq", *, read_only: bool = False
) -> ASGIApplication:
    """An ASGI application with the dashboard below `prefix`, for users with permissions for dead jobs. It gives
    everything else to `django_application`.

    `read_only`: refuses all actions. ImproperlyConfigured if the project lacks something that it needs.
    """
    if not prefix.startswith("/") or prefix.endswith("/") or "//" in prefix:
        raise ImproperlyConfigured(
            f"prefix {shown(prefix)} is not allowed: a path such as '/forq', without a final slash"
        )
    for wanted in ("django.contrib.auth", PACKAGE):
        if not apps.is_installed(wanted):
            raise ImproperlyConfigured(f"the dashboard needs {wanted!r} in INSTALLED_APPS: it has users or permissions")
    try:
        from forq.contrib.django.dashboard_users import ForUsers, authorize
        from forq.web import asgi
    except ModuleNotFoundError as exc:
        package = str(exc.name).partition(".")[0]
        raise ImproperlyConfigured(f"the dashboard needs the package {package}: pip install 'forq[web]'") from exc
    dashboard = ForUsers(asgi(project_app().client, authorize=authorize, read_only=read_only), prefix)

    async def application(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        below = _below(prefix, scope) if scope["type"] == "http" else None
        if below is None:
            await django_application(scope, receive, send)
        else:
            await dashboard(below, receive, send)

    return application


def _below(prefix: str, scope: MutableMapping[str, Any]) -> MutableMapping[str, Any] | None:
    """The scope for the dashboard; None for another path."""
    root = str(settings.FORCE_SCRIPT_NAME or scope.get("root_path", "")).rstrip("/")
    path: str = scope["path"]
    # A proxy may have removed it.
    inner = path[len(root) :] if path.startswith(f"{root}/") else path
    if inner != prefix and not inner.startswith(f"{prefix}/"):
        return None
    return {**scope, "root_path": root + prefix, "path": root + (inner if inner != prefix else f"{prefix}/")}
