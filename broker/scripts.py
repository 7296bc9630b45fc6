"""Loads the Lua scripts: one file per verb, shared parts pulled in by a line `--@include NAME...`."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from forq.broker.codes import LUA_CONSTANTS

_INCLUDE = re.compile(r"^--@include (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    verb: str
    source: str
    sha: str


@cache
def script(verb: str) -> Script:
    """The script of a verb, as the server is to get it."""
    source = _INCLUDE.sub(_included, _read(f"{verb}.lua"))
    return Script(verb, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _included(line: re.Match[str]) -> str:
    return "\n".join(_constants() if name == "codes" else _read(f"lib/{name}.lua") for name in line[1].split())


def _constants() -> str:
    return "\n".join(f"local {name} = {value}" for name, value in LUA_CONSTANTS.items())


@cache
def _read(path: str) -> str:
    return files("forq.broker").joinpath("lua", path).read_text(encoding="utf-8")
