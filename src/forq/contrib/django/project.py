"""The forq App of a Django project: made from the setting FORQ, with the tasks of the installed apps."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import register
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import autodiscover_modules

from forq.app.app import App
from forq.app.hooks import Hooks
from forq.contrib.django.connections import ConnectionsAround
from forq.errors import ForqError
from forq.job import Job
from forq.settings import suggestion
from forq.values import shown

# As in INSTALLED_APPS.
PACKAGE = "forq.contrib.django"
# Of the app, and of the queue of its tasks. Django's tasks have the same default.
DEFAULT_NAME = "default"
# The path of the app with all tasks, for `forq run --app`.
WORKER_PATH = "forq.contrib.django.worker:app"

# Keys of FORQ, and the arguments of App that they set.
_ARGUMENTS = {"URL": "url", "PREFIX": "prefix", "TIMEOUT": "timeout", "CONNECT_TIMEOUT": "connect_timeout"}
_KEYS = ("NAME", *_ARGUMENTS, "QUEUES")


class DjangoApp(App):
    """An App whose tasks are named after their Django app, and whose jobs leave no stale database connection behind."""

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self._hooks.add_first(ConnectionsAround)
        self._has_hooks = True

    def _default_name(self, function: Callable[..., Any]) -> str:
        """`app_label.function`; the plain name outside of installed apps."""
        name = super()._default_name(function)
        found = apps.get_containing_app_config(getattr(function, "__module__", None) or "")
        return name if found is None else f"{found.label}.{name}"

    def _around_fail_handler(self, handler: Callable[[Any, Job], Any], name: str) -> Callable[[Any, Job], Any]:
        around = Hooks(self.name)
        around.add_first(ConnectionsAround)
        return around.around_handler(handler, name)

    def _create_command(self) -> str:
        return f"forq app {WORKER_PATH} --create"


_lock = threading.Lock()
_app: DjangoApp | None = None


def project_app() -> DjangoApp:
    """The app of this process."""
    global _app
    if _app is None:
        with _lock:
            if _app is None:
                _check_installed()
                _app = make_app(getattr(settings, "FORQ", {}))
    return _app


def _check_installed() -> None:
    """Without its entry in INSTALLED_APPS the package registers no checks; this one has to be."""
    from forq.contrib.django.checks import check_installed

    register(check_installed)


def make_app(given: Mapping[str, Any]) -> DjangoApp:
    """An app as the setting FORQ describes it. ImproperlyConfigured if it is invalid."""
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f"FORQ = {shown(given)} is not allowed: a dict with {', '.join(_KEYS)}")
    for key in given:
        if key not in _KEYS:
            raise ImproperlyConfigured(f"FORQ has no key {shown(key)}{suggestion(str(key).upper(), _KEYS)}")
    try:
        app = DjangoApp(
            given.get("NAME", DEFAULT_NAME), **{_ARGUMENTS[key]: given[key] for key in _ARGUMENTS if key in given}
        )
        queues = given.get("QUEUES", {})
        if not isinstance(queues, Mapping) or not all(isinstance(options, Mapping) for options in queues.values()):
            raise ImproperlyConfigured(
                f"FORQ['QUEUES'] = {shown(queues)} is not allowed: options by queue, such as "
                "{'mails': {'concurrency': 8}}"
            )
        for name, options in queues.items():
            app.queue(name, **options)
    except ForqError as exc:
        raise ImproperlyConfigured(f"FORQ: {exc}") from exc
    return app


def discover_tasks() -> None:
    """Imports the module `tasks` of each installed app that has one."""
    autodiscover_modules("tasks")
