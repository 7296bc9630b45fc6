"""Every guard of every script is needed: without it some test fails.

CI tries six of the mutants, others each day; `make mutants` tries all.
"""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forq.broker import scripts
from forq.broker.link import Link
from tests.support.mutants import MUTANT, Mutant, all_mutants, use
from tests.support.server import Server
from tests.support.thorough import THOROUGH_VARIABLE, sample

ROOT = Path(__file__).parent.parent.parent
LUA = Path(scripts.__file__).parent / "lua"
FILES = sorted(LUA.rglob("*.lua"))
assert len(FILES) > 60, f"no scripts in {LUA}"
MUTANTS = all_mutants()
SAMPLE = 6
TESTS_FAILED = 1


def todays() -> set[int]:
    """Neighbours in the list are alike, so the six are spread over it."""
    step = len(MUTANTS) // SAMPLE
    day = datetime.now(UTC).toordinal()
    return {(day + step * n) % len(MUTANTS) for n in range(SAMPLE)}


def numbered() -> list[object]:
    today = todays()
    return [
        pytest.param(number, id=str(mutant), marks=() if number in today else pytest.mark.slow)
        for number, mutant in enumerate(MUTANTS)
    ]


@pytest.mark.parametrize("number", numbered())
def test_a_script_without_this_guard_fails_its_tests(number: int) -> None:
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
def test_every_file_has_mutants(path: Path) -> None:
    assert any(mutant.file == str(path.relative_to(LUA)) for mutant in MUTANTS)


def test_mutants_are_scripts_that_compile(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slip in the list would pass for a guard that some test watches."""
    link = Link(server.url)
    for mutant in sample(MUTANTS, one_in=4):
        with monkeypatch.context() as patch:
            patch.setattr(scripts, "_read", scripts._read)
            use(mutant)
            # A file that compiles in one script compiles in the others.
            for verb in verbs_with(mutant)[:1]:
                link.call("FUNCTION", "LOAD", "REPLACE", scripts.script(verb).library)
    scripts.script.cache_clear()
    link.close()


def verbs_with(mutant: Mutant) -> list[str]:
    folder, _, name = mutant.file.removesuffix(".lua").rpartition("/")
    if not folder:
        return [name]
    sources = {path.stem: path.read_text() for path in LUA.glob("*.lua")}
    return [verb for verb, source in sources.items() if f" {name}" in source.partition("--@include")[2].split("\n")[0]]
