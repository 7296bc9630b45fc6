"""The scripts with one guard taken out: what each guard is for, and which tests notice that it is gone.

The lists are in mutants_of_*.py.
"""

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from forq.broker import scripts

# The number of a mutant in the environment of pytest; tests/broker/conftest.py puts it in place of the real script.
MUTANT = "FORQ_MUTANT"


@dataclass(frozen=True)
class Mutant:
    file: str  # in broker/lua
    text: str  # occurs once in it
    replacement: str
    wrong: str  # what goes wrong then
    tests: str  # whose tests notice: the X of tests/broker/test_X.py, and after a blank one test's name or a part of it

    def __str__(self) -> str:
        return f"{self.file}: {self.wrong}"

    def of(self, source: str) -> str:
        found = source.count(self.text)
        assert found == 1, f"{self.file} has {found} times: {self.text!r}"
        return source.replace(self.text, self.replacement)


def use(mutant: Mutant) -> None:
    """From here on this process sends the mutated library."""
    read = scripts._read
    changed = mutant.of(read(mutant.file.removesuffix(".lua")))
    scripts._read = lambda name: changed if f"{name}.lua" == mutant.file else read(name)  # type: ignore[assignment]
    forget_texts()


def forget_texts() -> None:
    for cached in (scripts.script, scripts._text, scripts._build):
        cached.cache_clear()


def all_mutants() -> tuple[Mutant, ...]:
    """Those of every list: MUTANTS_OF_X in mutants_of_x.py."""
    found: list[Mutant] = []
    for path in sorted(Path(__file__).parent.glob("mutants_of_*.py")):
        module = import_module(f"tests.support.{path.stem}")
        found += getattr(module, path.stem.upper())
    return tuple(found)


def use_the_one_asked_for() -> None:
    if MUTANT in os.environ:
        use(all_mutants()[int(os.environ[MUTANT])])
