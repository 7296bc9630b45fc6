"""`manage.py forq`: starts a supervisor with the tasks of this project, and asks one."""

import importlib
import os
import sys
from argparse import REMAINDER
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from forq.app.command import describe
from forq.contrib.django.project import WORKER_PATH, discover_tasks, project_app
from forq.errors import ExitCode, ForqError

# Options of manage.py, which Django has already used.
_OF_DJANGO = ("--settings", "--pythonpath")


class Command(BaseCommand):
    help = "Runs and inspects the background jobs of this project."

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for name, summary in (
            ("run", "run a supervisor with the tasks of this project; arguments: forq run --help"),
            ("status", "show the queues and their processes; arguments: forqctl status --help"),
        ):
            # No argument is an option here: all belong to the other program.
            passing = commands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
            passing.add_argument("arguments", nargs=REMAINDER)
        commands.add_parser("create", help="create the queues that are absent in Redis; others stay as they are")
        commands.add_parser("tasks", help="show the tasks, queues and schedules of this project")

    def handle(self, *_: Any, **options: Any) -> None:
        arguments, folders = _split_django_options(options.get("arguments", []))
        if options.get("pythonpath"):
            folders.append(options["pythonpath"])
        try:
            match options["command"]:
                case "run":
                    self._run(arguments, folders)
                case "status":
                    _become(folders, "forq.ctl.main", "status", *arguments)
                case "create":
                    self._create()
                case "tasks":
                    discover_tasks()
                    self.stdout.write("\n".join(describe(project_app().definitions(), WORKER_PATH)))
        except ForqError as exc:
            raise CommandError(str(exc), returncode=exc.exit_code) from exc

    def _run(self, arguments: Sequence[str], folders: Sequence[str]) -> NoReturn:
        root = _project_directory()
        if "--reload" in arguments and not root.is_relative_to(Path.cwd()):
            raise CommandError(
                f"--reload watches the current directory, but the project is in {root}; run: cd {root}",
                returncode=ExitCode.WRONG_ARGUMENTS,
            )
        app = project_app()
        # In the environment: other users can read the arguments of a process, and a URL may contain a password.
        os.environ |= {name: value for name, value in (("FORQ_REDIS", app._url), ("FORQ_PREFIX", app._prefix)) if value}
        _become(folders, "forq.cli", "run", "--app", WORKER_PATH, *arguments)

    def _create(self) -> None:
        discover_tasks()
        app = project_app()
        for name in app.queue_names():
            self.stdout.write(f"{name}: {'created' if app.create_queue(name) else 'exists'}")


def _become(folders: Sequence[str], module: str, *arguments: str) -> NoReturn:
    """Replaces this process: signals, messages to systemd and the exit code are those of the other program.

    `folders`: of --pythonpath.
    """
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        raise CommandError("DJANGO_SETTINGS_MODULE is not set, but workers need it; export it, or pass --settings")
    absolute = [str(Path(folder).resolve()) for folder in folders]
    paths = [*absolute, str(_project_directory()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.stdout.flush()
    sys.stderr.flush()
    # -P: modules of the current directory must not replace those of forq.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


def _project_directory() -> Path:
    """The directory from which the settings were imported."""
    name = settings.SETTINGS_MODULE
    found = importlib.import_module(name) if name else None
    if found is None or found.__file__ is None:
        raise CommandError("the settings of this project are no module: pass --settings, or set DJANGO_SETTINGS_MODULE")
    file = Path(found.__file__).resolve()
    folder = file.parent.parent if file.stem == "__init__" else file.parent
    return folder.joinpath(*[".."] * name.count(".")).resolve()


def _split_django_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the other program, and the folders of --pythonpath."""
    kept: list[str] = []
    folders: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, has_value, value = argument.partition("=")
        if name not in _OF_DJANGO:
            kept.append(argument)
            continue
        given = value if has_value else next(rest, "")
        if name == "--pythonpath" and given:
            folders.append(given)
    return kept, folders
