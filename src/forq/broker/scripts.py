"""Loads the Lua scripts: one file per verb, shared parts pulled in by a line `--@include NAME...`.

The server gets each as a library with one function (FUNCTION LOAD): EVAL would define all that a script defines anew at
every call, a third of what a small one takes. The files need not know. They are written as scripts that run from top to
bottom, and `_library` takes apart what begins at the margin:

1. A function, and a constant (a name in capitals), is defined once, when the library is loaded.
2. Any other variable is declared there, and gets its value in each call, in its place: no call sees what another left.
3. Every other statement stays in its place, in the function that the call runs.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from forq.broker.codes import LUA_CONSTANTS

_INCLUDE = re.compile(r"^--@include (.+)$", re.MULTILINE)
_WORD = re.compile(r"\w+")
_FUNCTION = re.compile(r"local function (\w+)")
_VARIABLES = re.compile(r"local ([\w, ]+?)\s*(=.*)?$", re.DOTALL)
# Constants that are numbers or text.
_VALUE = r"(?:-?\d+(?: \* \d+)*|'[^',]*')"
_PLAIN = re.compile(rf"local ([A-Z_]+(?:, [A-Z_]+)*) = ({_VALUE}(?:, {_VALUE})*)\s*(?:--.*)?$")
# Text is left alone: 'EXISTS' is a command, and EXISTS a code.
_TEXT_OR_WORD = re.compile(r"'[^'\n]*'|\w+")
# A statement ends before the next line at the margin that does not close it.
_CLOSING = ("end", "else", ")", "}")
# Lua allows a function to use 60 variables of those around it.
MOST_UPVALUES = 55
# A variable of such a name at the margin would take its place in every function of the library.
_LUAS_OWN = frozenset(("error", "ipairs", "math", "next", "pairs", "redis", "string", "table", "type", "unpack"))


# What the methods of a Queue (src/forq/client.py) use, so that a producer that may not load functions may call them.
OF_CLIENTS = (
    *("enqueue", "cancel", "counts", "wait", "await", "unawait", "ack", "pause"),
    *("revive", "discard", "set_schedule", "drop_schedule", "trigger"),
)


@dataclass(frozen=True, slots=True)
class Script:
    verb: str
    # As a script for EVAL.
    source: str
    # As a function, and its name: another source has another one, so that releases do not get in each other's way.
    library: str
    name: str


@cache
def script(verb: str) -> Script:
    """The script of a verb, as the server is to get it."""
    return as_function(verb, _read(f"{verb}.lua"))


def as_function(verb: str, source: str) -> Script:
    """A script of one file, with what it includes."""
    head, _, rest = source.partition("\n")
    names = _INCLUDE.search(rest)
    parts = [_read(f"lib/{name}.lua") for name in names[1].split() if name != "codes"] if names else []
    statements = [list(_statements(part)) for part in [_constants([*parts, rest]), *parts, rest]]
    needed = _needed(_with_values(statements))
    body, flags = _library(needed), head.partition("flags=")[2]
    name = f"forq_{verb}_{hashlib.sha256((head + body).encode()).hexdigest()[:16]}"
    registered = f"redis.register_function{{function_name='{name}', callback=call, flags={{{flags and repr(flags)}}}}}"
    source = "\n".join([head, *(statement for part in needed for statement in part)])
    return Script(verb, source, f"#!lua name={name}\n{body}\n{registered}\n", name)


def _with_values(parts: list[list[str]]) -> list[list[str]]:
    """With the values of constants in place of their names, which need no names then: Lua allows 200."""
    values: dict[str, str] = {}
    for statement in (statement for part in parts for statement in part):
        if plain := _PLAIN.match(statement):
            names, given = plain[1].split(", "), plain[2].split(", ")
            if values.keys() & set(names) or len(names) != len(given):
                raise ValueError(f"declared twice, or with another number of values: {plain[1]}")
            values |= zip(names, (value if value.isdigit() else f"({value})" for value in given), strict=True)

    def in_place(statement: str) -> str:
        if _PLAIN.match(statement):
            return statement
        return _TEXT_OR_WORD.sub(lambda found: values.get(found[0], found[0]), statement)

    return [[in_place(statement) for statement in part] for part in parts]


def _needed(parts: list[list[str]]) -> list[list[str]]:
    """Without functions and constants that nothing uses: Lua allows 200 names, and files are included as a whole."""
    words = {statement: set(_WORD.findall(statement)) for part in parts for statement in part}
    defined = {statement: names for statement in words if (names := _defined_once(statement))}
    uses = Counter(word for used in words.values() for word in used)
    while unused := [statement for statement, names in defined.items() if all(uses[name] == 1 for name in names)]:
        for statement in unused:
            uses.subtract(words.pop(statement))
            del defined[statement]
    return [[statement for statement in part if statement in words] for part in parts]


def _defined_once(statement: str) -> set[str]:
    """The names of a statement that is carried out when the library is loaded: of a function or of constants."""
    if function := _FUNCTION.match(statement):
        return {function[1]}
    declared = _VARIABLES.match(statement)
    names = set(declared[1].split(", ")) if declared else set()
    return names if all(name.isupper() for name in names) else set()


def _library(parts: list[list[str]]) -> str:
    """Definitions first, then what each call runs."""
    defined, variables, lines, bodies = ["KEYS", "ARGV"], ["KEYS", "ARGV"], [], []
    for part in parts:
        body = []
        for statement in part:
            function, declared = _FUNCTION.match(statement), _VARIABLES.match(statement)
            names = [function[1]] if function else declared[1].split(", ") if declared else []
            defined += names
            if function or (names and all(name.isupper() for name in names)):
                lines.append(statement)
            elif declared:
                variables += names
                body.append(f"{declared[1]} {declared[2] or '= nil'}")
            else:
                body.append(statement)
        if body:
            bodies.append("\n".join(body))
    if hidden := {name for name in defined if name in _LUAS_OWN or defined.count(name) > 1}:
        raise ValueError(f"declared twice, or Lua's own: {', '.join(sorted(hidden))}")
    together = _together(bodies, set(defined))
    lines += [f"local function part_{number}()\n{body}\nend" for number, body in enumerate(together)]
    calls = [f"part_{number}()" for number in range(len(together))]
    calls[-1] = f"return {calls[-1]}"
    call = "\n".join(["local function call(keys, args)", "KEYS, ARGV = keys, args", *calls, "end"])
    return "\n".join([f"local {', '.join(variables)}", *lines, call])


def _together(bodies: list[str], defined: set[str]) -> list[str]:
    """As few functions as use no more variables of the library each than Lua allows a function."""
    together: list[str] = []
    for body in bodies:
        joined = f"{together[-1]}\n{body}" if together else body
        if together and len(defined & set(_WORD.findall(joined))) > MOST_UPVALUES:
            together.append(body)
        else:
            together[-1:] = [joined]
    return together


def _statements(part: str) -> Iterator[str]:
    """What begins at the margin, with the lines that belong to it; no comments."""
    statement: list[str] = []
    for line in part.splitlines():
        if not line.strip() or line.lstrip().startswith("--"):
            continue
        if statement and not line[0].isspace() and not line.startswith(_CLOSING):
            yield "\n".join(statement)
            statement = []
        statement.append(line)
    if statement:
        yield "\n".join(statement)


def _constants(parts: list[str]) -> str:
    """Those that are used: Lua allows 200 names."""
    used = set(re.findall(r"\w+", "\n".join(parts)))
    return "\n".join(f"local {name} = {value}" for name, value in LUA_CONSTANTS.items() if name in used)


@cache
def _read(path: str) -> str:
    return files("forq.broker").joinpath("lua", path).read_text(encoding="utf-8")
