"""Runs the sessions of README.md and docs/guide/first-steps.md as written."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.session_page import Shell, files, matches, steps
from tests.support.drive.supervisor import BIN
from tests.support.drive.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
START = "make run\n"


@contextmanager
def clone() -> Iterator[Path]:
    """A directory like a clone after `make run`. Its path is short because of the control socket."""
    directory = Path(tempfile.mkdtemp(prefix="forq-clone-"))
    (directory / "etc").symlink_to(ROOT / "etc")
    (directory / ".venv").symlink_to(BIN.parent)
    recipe = (ROOT / "Makefile").read_text()
    assert "forq run --config etc/examples/sample.toml --state-dir $(STATE_DIR)" in recipe, "`make run` starts the same"
    command = [str(BIN / "forq"), "run", "--config", "etc/examples/sample.toml", "--state-dir", ".state"]
    with open(directory / "log", "wb") as log:
        supervisor = subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        ping = [str(BIN / "forqctl"), "--socket", str(directory / ".state/control.sock"), "status", "--check"]
        wait_until(lambda: subprocess.run(ping, capture_output=True).returncode == 0, 60.0, "the supervisor is up")
        yield directory
    finally:
        supervisor.terminate()
        supervisor.wait(60)
        shutil.rmtree(directory)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", ["README.md", "docs/guide/first-steps.md"])
def test_a_session_prints_what_its_page_shows(page: str) -> None:
    text = (ROOT / page).read_text()
    session = [step for step in steps(text) if step.commands != START]
    assert session
    with clone() as directory:
        for name, source in files(text).items():
            (directory / name).write_text(source)
        shell = Shell(directory, {**os.environ, "COLUMNS": "200"})
        for step in session:
            printed, code = shell.run(step.commands)
            assert matches(step.output, printed), f"{step.commands}\nprinted\n{printed}\nnot\n{step.output}"
            assert code == 0, f"{step.commands}{shell.errors()}"
        shell.errors()
