"""Runs the tests of Django's task framework with ForqBackend in place of the framework's own backends.

    python tests/contrib/django/run_django_tasks_suite.py PATH

PATH: the source of django-tasks, or of Django 6. It must have the tests, which the releases of django-tasks lack.
Instead of DummyBackend, tests get a backend that stores jobs in a Redis server of this run; instead of
ImmediateBackend, one that also runs them with a worker's code.
"""

import importlib
import logging
import sys
import threading
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.drive.server import Server
from tests.support.drive.worker_here import run_waiting

# Tests that fail by design, by class and name.
_FORQ_CAN = "expects that the backend cannot do it; forq can"
_CHANGES_MEMORY = "changes a list in memory where forq has Redis"
EXPECTED = {
    "DummyBackendTestCase.test_refresh_result": _CHANGES_MEMORY,
    "DummyBackendTestCase.test_refresh_result_async": _CHANGES_MEMORY,
    "ImmediateBackendTestCase.test_cannot_get_result": _FORQ_CAN,
    "ImmediateBackendTestCase.test_cannot_pass_run_after": _FORQ_CAN,
    "ImmediateBackendTestCase.test_cannot_refresh_result": _FORQ_CAN,
    "ImmediateBackendTestCase.test_get_result_from_different_request": _FORQ_CAN,
    "ImmediateBackendTestCase.test_throws_keyboard_interrupt": "a worker does not end because a task raises",
}


def main(path: Path) -> int:
    with Server() as server:
        modules = _set_up(path, server.url)
        _replace_backends(server)
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromName, modules))
        logging.getLogger("forq").addHandler(logging.NullHandler())
        outcome = unittest.TextTestRunner(verbosity=1).run(suite)
    return _report(outcome)


def _set_up(path: Path, url: str) -> list[str]:
    """Configures Django as the tests need it; returns the modules with tests."""
    import django
    from django.conf import settings

    if (path / "tests/tasks/tasks.py").exists():
        sys.path.insert(0, str(path / "tests"))
        given: dict[str, Any] = {"INSTALLED_APPS": ["tasks"], "SECRET_KEY": "tests", "USE_TZ": True}
        folder, package = path / "tests/tasks", "tasks"
    elif (path / "tests/tests/test_tasks.py").exists():
        # Both projects have a package of this name.
        for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
            del sys.modules[name]
        sys.path.insert(0, str(path))
        theirs = importlib.import_module("tests.settings")
        given = {name: getattr(theirs, name) for name in dir(theirs) if name.isupper()}
        folder, package = path / "tests/tests", "tests.tests"
    else:
        raise SystemExit(f"{path} has neither tests/tasks (Django 6) nor tests/tests (django-tasks)")
    given["DATABASES"] = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    settings.configure(**given, FORQ={"NAME": "default", "URL": url})
    django.setup()
    return sorted(f"{package}.{file.stem}" for file in folder.glob("test_*.py"))


def _replace_backends(server: Server) -> None:
    from forq.contrib.django.backend import ForqBackend
    from forq.contrib.django.project import project_app
    from forq.contrib.django.task_framework import BaseTaskBackend

    class Stores(ForqBackend):
        @property
        def results(self) -> list[Any]:
            client = project_app().client
            return [
                self.get_result(f"{queue}:{job['id']}")
                for queue in client.queues()
                for job in client.queue(queue).jobs().jobs
            ]

        def clear(self) -> None:
            server.flush()

    class RunsAtOnce(ForqBackend):
        def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
            result = super().enqueue(task, args, kwargs)
            # In a thread of its own, like the worker of another process: coroutines of tests occupy this one.
            worker = threading.Thread(target=run_waiting, args=(server.url, project_app(), task.queue_name))
            worker.start()
            worker.join()
            result.refresh()
            return result

    framework = BaseTaskBackend.__module__.removesuffix(".base")
    importlib.import_module(f"{framework}.dummy").DummyBackend = Stores  # type: ignore[attr-defined]
    importlib.import_module(f"{framework}.immediate").ImmediateBackend = RunsAtOnce  # type: ignore[attr-defined]


def _report(outcome: unittest.TestResult) -> int:
    """0 if only the expected tests fail."""
    failed: set[str] = set()
    for test, _ in (*outcome.failures, *outcome.errors):
        # A part of a test has its test in `test_case`.
        id = getattr(test, "test_case", test).id()
        failed.add(".".join(id.split(".")[-2:]))
    print(f"{outcome.testsRun - len(failed) - len(outcome.skipped)} of {outcome.testsRun} passed")
    for test, reason in outcome.skipped:
        print(f"skipped {test.id()}: {reason}")
    for name in sorted(failed):
        print(f"failed  {name}: {EXPECTED.get(name, 'NOT EXPECTED')}")
    return 0 if failed <= EXPECTED.keys() else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve()))
