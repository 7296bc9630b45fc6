"""Mutants: the Lua library without one of its guards, and the tests that detect it.

The lists are in tests/mutants/, one per file of the library, a JSON object per line: the fields of a Mutant.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from forq.broker import scripts

# The number of a mutant, in pytest's environment; tests/broker/conftest.py then replaces the real library.
MUTANT = "FORQ_MUTANT"
LISTS = Path(__file__).resolve().parents[2] / "mutants"


@dataclass(frozen=True)
class Mutant:
    file: str  # in broker/lua
    old: str  # occurs once in it
    new: str
    tests: str  # which tests fail: the X of tests/broker/test_X.py, then optionally a test name or a part of one
    wrong: str  # what breaks

    def __str__(self) -> str:
        return f"{self.file}: {self.wrong}"

    def of(self, source: str) -> str:
        found = source.count(self.old)
        assert found == 1, f"{self.file} has {found} times: {self.old!r}"
        return source.replace(self.old, self.new)


def use(mutant: Mutant) -> None:
    """From here on, this process sends the mutated library."""
    read = scripts._read
    changed = mutant.of(read(mutant.file.removesuffix(".lua")))
    scripts._read = lambda name: changed if f"{name}.lua" == mutant.file else read(name)  # type: ignore[assignment]
    forget_texts()


def forget_texts() -> None:
    for cached in (scripts.script, scripts._text, scripts._build):
        cached.cache_clear()


def all_mutants() -> tuple[Mutant, ...]:
    lines = [line for path in sorted(LISTS.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(Mutant(**json.loads(line)) for line in lines)


def use_the_one_asked_for() -> None:
    if MUTANT in os.environ:
        use(all_mutants()[int(os.environ[MUTANT])])
