"""The Lua library: joins the files of lua/ to one text, which is loaded once (FUNCTION LOAD) and called by FCALL.

1. The files are joined in the order of FILES, after the reply codes as constants. Nothing else is changed.
2. The names of the library and its functions contain a hash of the text, so two builds never call each other's.
3. A server that refuses functions gets the same text by EVAL, with the verb as last argument.
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
# An entry of the table in verbs.lua: name, function, flag.
_VERB = re.compile(r"^  \{ '(\w+)', \w+, '([a-z-]*)' \},$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A verb of the library: the function's name, and the texts for FUNCTION LOAD and EVAL."""

    verb: str
    name: str
    library: str
    # For EVAL; its first line holds the flags.
    source: str


@cache
def script(verb: str) -> Script:
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
