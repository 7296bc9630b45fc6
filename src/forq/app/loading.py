"""Imports an app by its path, package.module:app."""

import importlib
import os
import re
from types import ModuleType
from typing import Any

from forq.app.app import App
from forq.errors import CannotImport, UsageError
from forq.values import shown

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")
DEFAULT_NAME = "app"


def load_app(path: str) -> App:
    """The app `package.module:name`; the default name is `app`. Raises CannotImport, with the traceback of user code.

    Runs user code, so never call it in the supervisor.
    """
    from forq.workers.handlers import describe_exception, exit_if_forked_from, user_traceback

    module_name, name = split_path(path)
    pid = os.getpid()
    try:
        module = importlib.import_module(module_name)
        found: Any = getattr(module, name, None)
    except BaseException as exc:  # user code may raise anything at import, even SystemExit
        trace, place = user_traceback(exc)
        hint = ""
        if isinstance(exc, ModuleNotFoundError) and exc.name and f"{module_name}.".startswith(f"{exc.name}."):
            hint = (
                f"; run the command in the directory that contains {module_name.partition('.')[0]}, or set PYTHONPATH"
            )
        raise CannotImport(f"app {path!r} cannot be imported: {describe_exception(exc)}{place}{hint}", trace) from exc
    finally:
        exit_if_forked_from(pid)
    if not isinstance(found, App):
        what = f"has no {name}" if found is None else f"has {name} = {shown(found)}, which is not a forq.App"
        raise CannotImport(f"app {path!r}: module {module_name} {what}; {_apps_of(module)}")
    return found


def split_path(path: str) -> tuple[str, str]:
    """The module and the name."""
    if not _PATH.fullmatch(path):
        raise UsageError(f"app {shown(path)} is not allowed: package.module:app, such as shop.tasks:app")
    module, _, name = path.partition(":")
    return module, name or DEFAULT_NAME


def _apps_of(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, App)]
    if not names:
        return f"it has no app; write {DEFAULT_NAME} = forq.App(NAME) there"
    return f"its apps: {', '.join(f'{module.__name__}:{name}' for name in names)}"
