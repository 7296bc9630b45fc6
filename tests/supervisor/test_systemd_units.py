"""The unit files of etc/, checked with the tools of systemd."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forq.errors import EXIT_MEANINGS, FINAL_EXIT_CODES, ExitCode
from forq.workers.child import OOM_SCORE

ETC = Path(__file__).parent.parent.parent / "etc"
PAGE = Path(__file__).parent.parent.parent / "docs" / "guide" / "systemd.md"
SERVICE = (ETC / "forq.service").read_text()
# docs/guide/systemd.md gives the reasons for the remaining ones.
MOST_EXPOSED = 2.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The unchanged units. forq need not be installed here: they start it with env."""
    for name in ("forq.service", "forq.socket"):
        shutil.copy(ETC / name, tmp_path / name)
    return tmp_path


def analyze(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_units_start_the_program_where_the_docs_install_it() -> None:
    assert "\nEnvironment=FORQ_VENV=/opt/forq\nExecStart=/usr/bin/env ${FORQ_VENV}/bin/forq run\n" in SERVICE
    assert "/opt/forq/bin/pip install" in PAGE.read_text()


def test_no_other_line_of_the_units_contains_an_installation_path() -> None:
    lines = (SERVICE + (ETC / "forq.socket").read_text()).splitlines()
    settings = [line for line in lines if line and not line.startswith("#")]
    places = [line for line in settings if re.search(r"/(opt|run|var|srv|usr/local|etc)\b", line)]
    assert places == ["Environment=FORQ_VENV=/opt/forq"]


def test_permanent_failures_are_not_restarted() -> None:
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", SERVICE, re.MULTILINE)
    assert {int(code) for code in prevented.split()} == set(FINAL_EXIT_CODES)
    assert set(FINAL_EXIT_CODES) < set(EXIT_MEANINGS)
    # The others may be temporary: another supervisor ends, or Redis or the network comes back.
    assert set(EXIT_MEANINGS) - set(FINAL_EXIT_CODES) == {
        ExitCode.STOPPED,
        ExitCode.FAILED,
        ExitCode.EVICTED_TOO_OFTEN,
        ExitCode.NO_REDIS,
    }
    section = PAGE.read_text().partition("\n- **Restart**")[2].partition("\n- ")[0]
    assert all(f"({code})" in section for code in FINAL_EXIT_CODES)


def test_core_dumps_are_off_and_handlers_are_killed_first_when_memory_runs_out() -> None:
    assert "\nLimitCORE=0\n" in SERVICE
    (score,) = re.findall(r"^OOMScoreAdjust=(.*)$", SERVICE, re.MULTILINE)
    assert int(score) < 0 < OOM_SCORE


@needs_systemd
def test_systemd_analyze_finds_no_error_in_the_units(units: Path) -> None:
    found = analyze("verify", "--man=no", "--recursive-errors=no", units / "forq.service", units / "forq.socket")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@needs_systemd
def test_the_service_is_hardened_as_documented(units: Path) -> None:
    judged = analyze("security", "--offline=yes", "--no-pager", units / "forq.service")
    if "unrecognized option" in judged.stderr:
        pytest.skip("this systemd-analyze judges running services only")
    overall = re.search(r"Overall exposure level for forq\.service: ([0-9.]+)", judged.stdout)
    assert overall is not None, judged.stdout + judged.stderr
    print(overall[0])
    assert float(overall[1]) <= MOST_EXPOSED
    # For example "RestrictAddressFamilies=~AF_NETLINK"; the docs must name the setting.
    exposed = {line.split()[1].split("=")[0] for line in judged.stdout.splitlines() if line.startswith("✗")}
    section = PAGE.read_text().partition("\n## Hardening\n")[2].partition("\n## ")[0]
    assert {name for name in exposed if f"`{name}" not in section} == set()
