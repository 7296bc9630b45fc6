"""The scripts with one guard taken out: what each guard is for, and which tests notice that it is gone.

The lists are in mutants_of_*.py.
"""

import os
from dataclasses import dataclass

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
    """From here on this process sends the mutated script."""
    read = scripts._read
    scripts.script.cache_clear()
    scripts._read = lambda path: mutant.of(read(path)) if path == mutant.file else read(path)  # type: ignore[assignment]


def all_mutants() -> tuple[Mutant, ...]:
    from tests.support.mutants_of_journal import MUTANTS_OF_JOURNAL
    from tests.support.mutants_of_lib import MUTANTS_OF_LIB
    from tests.support.mutants_of_losses import MUTANTS_OF_LOSSES
    from tests.support.mutants_of_release_lib import MUTANTS_OF_RELEASE_LIB
    from tests.support.mutants_of_release_scripts import MUTANTS_OF_RELEASE_SCRIPTS
    from tests.support.mutants_of_releases import MUTANTS_OF_RELEASES
    from tests.support.mutants_of_schedules import MUTANTS_OF_SCHEDULES
    from tests.support.mutants_of_scripts import MUTANTS_OF_SCRIPTS

    return (
        *MUTANTS_OF_LIB,
        *MUTANTS_OF_LOSSES,
        *MUTANTS_OF_SCRIPTS,
        *MUTANTS_OF_JOURNAL,
        *MUTANTS_OF_RELEASES,
        *MUTANTS_OF_RELEASE_SCRIPTS,
        *MUTANTS_OF_RELEASE_LIB,
        *MUTANTS_OF_SCHEDULES,
    )


def use_the_one_asked_for() -> None:
    if MUTANT in os.environ:
        use(all_mutants()[int(os.environ[MUTANT])])
