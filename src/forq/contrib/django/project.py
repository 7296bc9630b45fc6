"""The forq App of a Django project: made from the setting FORQ, with the tasks of the installed apps."""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from django.apps import apps
from django.conf import settings
from django.core.checks import register
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import autodiscover_modules

from forq.app.app import App
from forq.app.declarations import declare_queue
from forq.app.hooks import Hooks
from forq.app.tasks import JobOptions, JobRef, Prepared, Sender, Task
from forq.contrib.django.connections import ConnectionsAround
from forq.contrib.django.outbox_settings import OutboxSettings, read_outbox_settings
from forq.contrib.django.tasks import TASK_NAME, add_deliverer
from forq.errors import ForqError, UsageError
from forq.job import Job
from forq.settings import suggestion
from forq.values import check_queue_name, shown

if TYPE_CHECKING:
    from forq.contrib.django.outbox import Outbox

P = ParamSpec("P")
T = TypeVar("T", covariant=True)

# As in INSTALLED_APPS.
PACKAGE = "forq.contrib.django"
# Of the app, and of the queue of its tasks. Django's tasks have the same default.
DEFAULT_NAME = "default"
# The path of the app with all tasks, for `forq run --app`.
WORKER_PATH = "forq.contrib.django.worker:app"

# Keys of FORQ, and the arguments of App that they set.
_ARGUMENTS = {"URL": "url", "PREFIX": "prefix", "TIMEOUT": "timeout", "CONNECT_TIMEOUT": "connect_timeout"}
_KEYS = ("NAME", *_ARGUMENTS, "QUEUES", "OUTBOX")


class DjangoApp(App):
    """An App whose tasks are named after their Django app, and whose jobs leave no stale database connection behind."""

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self._hooks.add_first(ConnectionsAround)
        self._has_hooks = True
        # None: no database has an outbox.
        self.outbox_settings: OutboxSettings | None = None
        self._outboxes: dict[str, Outbox] = {}

    def _default_name(self, function: Callable[..., Any]) -> str:
        """`app_label.function`; the plain name outside of installed apps."""
        name = super()._default_name(function)
        found = apps.get_containing_app_config(getattr(function, "__module__", None) or "")
        return name if found is None else f"{found.label}.{name}"

    def declare_absent_queue(self, name: str, place: str) -> None:
        """Declares a queue unless a task or `queue` has it. `place`: of its name, for messages."""
        if name not in self.queue_names():
            self._declared_queues[name] = declare_queue(check_queue_name(name), {}, self.name, place)

    def _sender(self, task: Task[P, T], queue: str, options: JobOptions) -> Sender[P, T]:
        from forq.contrib.django.senders import sender_for

        return sender_for(self, task, queue, options)

    def enqueue_many(self, jobs: Iterable[Prepared[T]]) -> list[JobRef[T]]:
        from forq.contrib.django.senders import enqueue_many

        return enqueue_many(self, jobs)

    def async_hooks_around(self, job: Job) -> AbstractAsyncContextManager[object]:
        # See deliver_outbox.
        return nullcontext() if job.type == TASK_NAME else super().async_hooks_around(job)

    def outbox(self, alias: str) -> "Outbox":
        """The outbox of this database. UsageError if FORQ["OUTBOX"] does not name it: no task would deliver it."""
        found = self._outboxes.get(alias)
        if found is None:
            databases = () if self.outbox_settings is None else self.outbox_settings.databases
            if alias not in databases:
                wanted = "{}" if alias == "default" else f"{{'DATABASES': {[*databases, alias]}}}"
                raise UsageError(
                    f"database {shown(alias)} has no outbox: set FORQ = {{..., 'OUTBOX': {wanted}}}, and run: "
                    f"manage.py migrate forq --database {alias}"
                )
            from forq.contrib.django.outbox import Outbox

            assert self.outbox_settings is not None
            found = self._outboxes.setdefault(alias, Outbox(self, alias, self.outbox_settings.timeout_seconds))
        return found

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
    """A package that is missing in INSTALLED_APPS registers no checks, so this one is registered here."""
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
        if "OUTBOX" in given:
            app.outbox_settings = read_outbox_settings(given["OUTBOX"])
            add_deliverer(app, app.outbox_settings)
    except ForqError as exc:
        raise ImproperlyConfigured(f"FORQ: {exc}") from exc
    return app


def discover_tasks() -> None:
    """Imports the module `tasks` of each installed app that has one."""
    autodiscover_modules("tasks")


def register_framework_tasks(app: DjangoApp) -> None:
    """Registers the tasks of Django's own framework (backend.py), after `discover_tasks`."""
    # The framework has imported it for the first task that uses it. Projects without one may lack django-tasks.
    if "forq.contrib.django.backend" in sys.modules:
        from forq.contrib.django.backend import register_tasks

        register_tasks(app)
