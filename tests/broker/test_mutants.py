"""Every guard of the Lua library is needed: without it, some test fails.

CI tries six mutants, different ones each day; `make mutants` tries all.
"""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forq.broker import scripts
from forq.broker.link import Link
from tests.support.drive.server import Server
from tests.support.models.mutants import LISTS, MUTANT, all_mutants, forget_texts, use
from tests.support.thorough import THOROUGH_VARIABLE, sample

ROOT = Path(__file__).parent.parent.parent
LUA = Path(scripts.__file__).parent / "lua"
FILES = sorted(LUA.glob("*.lua"))
assert len(FILES) > 10, f"no Lua library in {LUA}"
MUTANTS = all_mutants()
SAMPLE = 6
TESTS_FAILED = 1


def todays_numbers() -> set[int]:
    """Neighbors in the list are similar, so the six are spread over it."""
    step = len(MUTANTS) // SAMPLE
    day = datetime.now(UTC).toordinal()
    return {(day + step * n) % len(MUTANTS) for n in range(SAMPLE)}


def mutant_params() -> list[object]:
    today = todays_numbers()
    return [
        pytest.param(number, id=str(mutant), marks=() if number in today else pytest.mark.slow)
        for number, mutant in enumerate(MUTANTS)
    ]


@pytest.mark.parametrize("number", mutant_params())
def test_a_library_without_this_guard_fails_its_tests(number: int) -> None:
    file, _, name = MUTANTS[number].tests.partition(" ")
    chosen = [f"tests/broker/test_{file}.py", *(("-k", name) if name else ())]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *chosen]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {MUTANT: str(number), THOROUGH_VARIABLE: "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == TESTS_FAILED, ran.stdout[-2000:] + ran.stderr[-2000:]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_has_mutants_and_each_changes_the_source(path: Path) -> None:
    own = [mutant for mutant in MUTANTS if mutant.file == path.name]
    assert own
    source = path.read_text(encoding="utf-8")
    assert all(mutant.of(source) != source for mutant in own)


def test_every_mutant_is_listed_once_and_with_its_file() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert {path.stem for path in LISTS.iterdir()} == {path.stem for path in FILES}


def test_mutants_are_libraries_that_load(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that does not load would pass as a detected one."""
    link = Link(server.url)
    try:
        for mutant in sample(MUTANTS, one_in=4):
            with monkeypatch.context() as patch:
                patch.setattr(scripts, "_read", scripts._read)
                use(mutant)
                link.call("FUNCTION", "LOAD", "REPLACE", scripts.script("turn").library)
                link.call("FUNCTION", "FLUSH")
    finally:
        forget_texts()
        link.close()
