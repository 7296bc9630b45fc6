"""Every fault at once: nothing is lost, doubled or left. Without the fence, the checker finds violations. Longer with
`make chaos`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.run import faults_of, play, table
from tests.chaos.stage import ROOT
from tests.chaos.unfenced import MUTANT
from tests.support.thorough import examples, only_in_test_all

SECONDS = float(examples(quick=12, thorough=20))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=only_in_test_all) for seed in (2, 3))])
def test_no_job_is_lost_duplicated_or_left_under_any_fault(seed: int) -> None:
    outcome = play(seed, SECONDS, faults_of(""), audit=False)
    print(f"\n{table(outcome)}\n{outcome.figures}\n{outcome.phases}")
    assert outcome.found == [], f"again: make chaos SEED={seed} SECONDS={SECONDS:g}; evidence: {outcome.directory}"
    shutil.rmtree(outcome.directory)


@only_in_test_all
@pytest.mark.timeout(300)
def test_without_the_fence_the_checker_finds_jobs_settled_by_zombies(tmp_path: Path) -> None:
    """In a separate process, because the mutated scripts stay loaded."""
    command = [sys.executable, "-m", "tests.chaos.run", "--seed", "1", "--seconds", "12", "--faults", "zombie:20"]
    environ = {**os.environ, MUTANT: "unfenced", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([*command, "--no-audit"], env=environ, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 1
    assert "the journal tells what cannot be" in done.stdout
    assert "again: make chaos SEED=1 SECONDS=12 FAULTS=zombie:20" in done.stdout
