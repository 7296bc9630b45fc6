"""`manage.py check` finds invalid settings and tasks."""

import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import call_command


def check(
    folder: Path, environment: dict[str, str], settings: str, code: str, module: str = "tasks"
) -> subprocess.CompletedProcess[str]:
    """Runs `manage.py check` with these settings added, and with a module of the app `shop`."""
    (folder / "own_settings.py").write_text(f"from tests.support.django_project.settings import *\n{settings}\n")
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").touch()
    (folder / "shop" / f"{module}.py").write_text(code)
    command = [sys.executable, "-m", "django", "check"]
    own = environment | {
        "DJANGO_SETTINGS_MODULE": "own_settings",
        "PYTHONPATH": f"{folder}:{environment['PYTHONPATH']}",
    }
    return subprocess.run(command, capture_output=True, text=True, env=own, timeout=60)


def test_a_valid_project_passes(project: None) -> None:
    call_command("check")


@pytest.mark.parametrize(
    ("settings", "tasks", "message"),
    [
        ("FORQ = {'NAMES': 'shop'}", "", "(forq.E001) FORQ has no key 'NAMES'"),
        (
            "INSTALLED_APPS += ['shop']",
            "from forq.contrib.django import app\n@app.task\ndef a(): ...\n@app.task(name='shop.a')\ndef b(): ...\n",
            "(forq.E002) app 'shop' has two tasks of the name 'shop.a'",
        ),
        (
            "INSTALLED_APPS += ['shop']",
            "from forq.contrib.django import app\n@app.task\ndef a(of: complex): ...\n",
            "(forq.E002) ",
        ),
        (
            "INSTALLED_APPS += ['shop']",
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
    ],
)
def test_errors_are_reported(
    project_environment: dict[str, str], tmp_path: Path, settings: str, tasks: str, message: str
) -> None:
    done = check(tmp_path, project_environment, settings, tasks)
    assert done.returncode == 1
    assert message in done.stderr


def test_the_package_has_to_be_installed(project_environment: dict[str, str], tmp_path: Path) -> None:
    settings = "INSTALLED_APPS.remove('forq.contrib.django')\nINSTALLED_APPS += ['shop']"
    done = check(tmp_path, project_environment, settings, "from forq.contrib.django import app", "models")
    assert done.returncode == 1
    assert (
        "(forq.E003) forq.contrib.django.app is used, but 'forq.contrib.django' is not in INSTALLED_APPS" in done.stderr
    )
