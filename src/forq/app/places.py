"""Places in user code, for error messages and definitions."""

import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def place_of(function: Callable[..., Any]) -> str:
    """`shop/tasks.py, line 12`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "unknown place" if code is None else _place(code, code.co_firstlineno)


def calling_place() -> str:
    """The line outside this package that is being executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return _place(frame.f_code, frame.f_lineno)


def calling_module() -> str:
    """The name of the module outside this package whose code is being executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "__main__"))


def _place(code: CodeType, line: int) -> str:
    """Relative to the working directory if the file is below it."""
    name = code.co_filename
    try:
        relative = os.path.relpath(name)
    except (OSError, ValueError):  # the working directory is gone
        relative = name
    return f"{name if relative.startswith(os.pardir) else relative}, line {line}"
