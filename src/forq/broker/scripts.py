"""The Lua library: the files of lua/ as one text, which a server gets once (FUNCTION LOAD) and then runs by FCALL.

1. The files are joined in the order of FILES, behind the codes that Lua shares with Python. Nothing else is changed.
2. The names of the library and of its functions hold a hash of the text, so two builds never run each other's.
3. The same text runs through EVAL where a server takes no functions: then the verb is the last argument.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from forq.broker.replies import LUA_CONSTANTS

FILES = (
    *("call", "journal", "records", "hints", "limits", "results", "claims", "failures"),
    *("leases", "schedules", "release", "recovery", "queues", "enqueue", "turn", "verbs"),
)
# An entry of the table in verbs.lua: name, how its call begins, flag.
_VERB = re.compile(r"^  \{ '(\w+)', \w+, '([a-z-]*)' \},$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A verb: what to call, and what to give a server that does not know it."""

    verb: str
    name: str
    library: str
    # For EVAL, which is told a script's flags by its first line.
    source: str


@cache
def script(verb: str) -> Script:
    """The script of a verb."""
    text, build = _text(), _build()
    flag = flags()[verb]
    return Script(
        verb=verb,
        name=f"forq_{verb}_{build}",
        library=_library(text, build),
        source=_source(text, flag),
    )


def flags() -> dict[str, str]:
    """The flag of each verb; '' if it has none."""
    return dict(_VERB.findall(_read("verbs")))


@cache
def _library(text: str, build: str) -> str:
    return f"#!lua name=forq_{build}\nlocal BUILD, EVAL_KEYS, EVAL_ARGV = '{build}', nil, nil\n{text}"


@cache
def _source(text: str, flag: str) -> str:
    return f"#!lua{flag and f' flags={flag}'}\nlocal BUILD, EVAL_KEYS, EVAL_ARGV = nil, KEYS, ARGV\n{text}"


@cache
def _text() -> str:
    codes = "".join(f"local {name} = {value}\n" for name, value in LUA_CONSTANTS.items())
    return codes + "".join(_read(name) for name in FILES)


@cache
def _build() -> str:
    return hashlib.sha256(_text().encode()).hexdigest()[:16]


@cache
def _read(name: str) -> str:
    return files("forq.broker").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
