"""`manage.py forq`: the supervisor of a project, and the commands beside it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import psutil
import pytest
from django.core.management import CommandError, call_command

from forq import Client
from forq.errors import ForqError
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

ROOT = Path(__file__).resolve().parents[3]


class ManagedForq(Forq):
    """A supervisor that manage.py starts."""

    def program(self) -> list[str]:
        return [sys.executable, "-m", "django", "forq"]

    def manage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "django", "forq", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self.environ(), cwd=self.cwd, timeout=60)


@pytest.fixture
def managed(project_environment: dict[str, str], redis_url: str, tmp_path: Path) -> Iterator[ManagedForq]:
    """In a directory that is not the project's, with Redis as FORQ_REDIS says."""
    names = ("DJANGO_SETTINGS_MODULE", "DJANGO_TEST_FOLDER", "PYTHONPATH", "FORQ_REDIS")
    environment = {name: project_environment[name] for name in names}
    forq = ManagedForq(environment=environment)
    forq.cwd = tmp_path
    yield forq
    forq.remove()


def test_run_is_the_supervisor_itself_and_serves_the_tasks_of_the_project(managed: ManagedForq, redis_url: str) -> None:
    managed.start()
    assert "forq: supervisor" in " ".join(psutil.Process(managed.pid).cmdline())
    from forq.contrib.django.project import discover_tasks, project_app

    discover_tasks()
    ref = project_app().tasks["orders.count_receipts"].enqueue()
    assert ref.result(timeout=20) == 0
    status = managed.manage("status", "--json")
    assert (status.returncode, status.stderr) == (0, "")
    assert '"mails"' in status.stdout
    assert '"shop"' in status.stdout
    assert managed.stop() == 0


def test_url_and_prefix_of_the_settings_are_those_of_the_supervisor(
    managed: ManagedForq, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "own_settings.py").write_text(
        "from tests.support.django_project.settings import *\n"
        f"FORQ = {{'NAME': 'shop', 'URL': {redis_url!r}, 'PREFIX': 'own:'}}\n"
    )
    # Only the option names the settings, and nothing their directory; another server is ignored.
    managed.environment |= {"FORQ_REDIS": "redis://127.0.0.1:1/0", "DJANGO_SETTINGS_MODULE": ""}
    managed.arguments = ["--settings", "own_settings", f"--pythonpath={tmp_path}"]
    managed.start()
    client = Client(redis_url, prefix="own:")
    wait_until(lambda: "shop" in client.queues(), what="the queue exists")
    assert redis_url not in " ".join(psutil.Process(managed.pid).cmdline())


def test_wrong_arguments_have_the_exit_code_and_the_message_of_forq(managed: ManagedForq) -> None:
    done = managed.manage("run", "--rediss", "x")
    assert done.returncode == 2
    assert "unrecognized arguments: --rediss" in done.stderr
    assert "--state-dir" in managed.manage("run", "--help").stdout


def test_reload_needs_the_project_in_the_current_directory(managed: ManagedForq) -> None:
    done = managed.manage("run", "--reload")
    assert done.returncode == 2
    assert f"run: cd {ROOT}" in done.stderr


def test_create_makes_the_queues_and_reports_what_exists(project: None, redis_url: str) -> None:
    Client(redis_url).create_queue("mails")
    out = StringIO()
    call_command("forq", "create", stdout=out)
    assert sorted(out.getvalue().splitlines()) == ["mails: exists", "outbox: created", "shop: created"]
    assert set(Client(redis_url).queues()) == {"mails", "outbox", "shop"}


def test_an_error_of_forq_is_a_command_error_with_its_exit_code(project: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.conf import settings

    monkeypatch.setitem(settings.FORQ, "URL", "redis://127.0.0.1:1/0")
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:1") as raised:
        call_command("forq", "create")
    assert isinstance(raised.value.__cause__, ForqError)
    assert raised.value.returncode == raised.value.__cause__.exit_code


def test_tasks_shows_the_definitions(project: None) -> None:
    out = StringIO()
    call_command("forq", "tasks", stdout=out)
    assert "orders.send_receipt(number: str)" in out.getvalue()


def test_it_replaces_nothing_without_a_settings_module(project: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("executed"))
    with pytest.raises(CommandError, match="DJANGO_SETTINGS_MODULE is not set"):
        call_command("forq", "run")


class Executed(Exception):
    """In place of the other program."""


@pytest.mark.parametrize(
    "given", [["run", "--pythonpath", "libs", "--quiet"], ["run", "--pythonpath=libs", "--settings=", "--quiet"]]
)
def test_options_of_django_are_not_passed_on_but_pythonpath_has_its_effect(
    project: None, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    executed: list[list[str]] = []

    def execute(_: str, arguments: list[str]) -> None:
        executed.append(arguments)
        raise Executed

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setenv("PYTHONPATH", "earlier")
    with pytest.raises(Executed):
        call_command("forq", *given)
    assert executed[0][3:] == ["forq.cli", "run", "--app", "forq.contrib.django.worker:app", "--quiet"]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(Path("libs").resolve()), str(ROOT), "earlier"]
