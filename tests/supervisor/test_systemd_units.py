"""The unit files of etc/ as systemd's own tools judge them."""

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
# docs/guide/systemd.md has the reasons for what is left.
MOST_EXPOSED = 2.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units as they are. Their program need not be installed here: env looks for it."""
    for name in ("forq.service", "forq.socket"):
        shutil.copy(ETC / name, tmp_path / name)
    return tmp_path


def analyze(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_units_start_the_program_where_the_docs_install_it() -> None:
    assert "\nEnvironment=FORQ_VENV=/opt/forq\nExecStart=/usr/bin/env ${FORQ_VENV}/bin/forq run\n" in SERVICE
    assert "/opt/forq/bin/pip install" in PAGE.read_text()


def test_no_other_line_of_the_units_names_a_place_that_one_may_have_elsewhere() -> None:
    lines = (SERVICE + (ETC / "forq.socket").read_text()).splitlines()
    settings = [line for line in lines if line and not line.startswith("#")]
    places = [line for line in settings if re.search(r"/(opt|run|var|srv|usr/local|etc)\b", line)]
    assert places == ["Environment=FORQ_VENV=/opt/forq"]


def test_what_another_start_would_only_say_again_is_not_started_again() -> None:
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", SERVICE, re.MULTILINE)
    assert {int(code) for code in prevented.split()} == set(FINAL_EXIT_CODES)
    assert set(FINAL_EXIT_CODES) < set(EXIT_MEANINGS)
    # Of the others the reason may pass: another supervisor ends, Redis or the network is back.
    assert set(EXIT_MEANINGS) - set(FINAL_EXIT_CODES) == {
        ExitCode.STOPPED,
        ExitCode.FAILED,
        ExitCode.EVICTED_TOO_OFTEN,
        ExitCode.NO_REDIS,
    }
    section = PAGE.read_text().partition("\n- **Restart**")[2].partition("\n- ")[0]
    assert all(f"({code})" in section for code in FINAL_EXIT_CODES)


def test_a_core_dump_holds_no_secrets_and_handlers_go_first_when_memory_runs_out() -> None:
    assert "\nLimitCORE=0\n" in SERVICE
    (score,) = re.findall(r"^OOMScoreAdjust=(.*)$", SERVICE, re.MULTILINE)
    assert int(score) < 0 < OOM_SCORE


@needs_systemd
def test_units_have_no_mistake_that_systemd_finds(units: Path) -> None:
    found = analyze("verify", "--man=no", "--recursive-errors=no", units / "forq.service", units / "forq.socket")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@needs_systemd
def test_service_is_hardened_as_far_as_the_docs_say(units: Path) -> None:
    judged = analyze("security", "--offline=yes", "--no-pager", units / "forq.service")
    if "unrecognized option" in judged.stderr:
        pytest.skip("this systemd-analyze judges running services only")
    overall = re.search(r"Overall exposure level for forq\.service: ([0-9.]+)", judged.stdout)
    assert overall is not None, judged.stdout + judged.stderr
    print(overall[0])
    assert float(overall[1]) <= MOST_EXPOSED
    # e.g. "RestrictAddressFamilies=~AF_NETLINK": the setting is what the docs have to name.
    exposed = {line.split()[1].split("=")[0] for line in judged.stdout.splitlines() if line.startswith("✗")}
    section = PAGE.read_text().partition("\n## Hardening\n")[2].partition("\n## ")[0]
    assert {name for name in exposed if f"`{name}" not in section} == set()
