"""Runs the sessions of README.md and docs/guide/first-steps.md as written."""

import os
import re
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
# Installs nothing, even if setup.cfg has changed since.
MAKE = ("make", "--old-file", ".venv/.ready")


def environ() -> dict[str, str]:
    """Without the settings of a `make` that runs the tests, and of forq."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("FORQ_", "MAKE", "MFLAGS"))}


@contextmanager
def clone() -> Iterator[Path]:
    """A directory like a clone, in which `make run` runs. Its path is short because of the control socket."""
    directory = Path(tempfile.mkdtemp(prefix="forq-clone-"))
    for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml", "etc"):
        (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(BIN.parent)
    with open(directory / "log", "wb") as log:
        supervisor = subprocess.Popen(
            [*MAKE, "run"], cwd=directory, env=environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
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
        shell = Shell(directory, {**environ(), "COLUMNS": "200"})
        for step in session:
            printed, code = shell.run(step.commands)
            assert matches(step.output, printed), f"{step.commands}\nprinted\n{printed}\nnot\n{step.output}"
            assert code == 0, f"{step.commands}{shell.errors()}"
        shell.errors()


def test_the_two_commands_of_the_readme_print_a_first_result() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (make \w+) +# terminal \d: (.*)$", readme, re.MULTILINE)
    assert [command for command, _ in commands] == ["make run", "make hello"]
    with clone() as directory:
        printed = subprocess.run(
            [*MAKE, "hello"], cwd=directory, env=environ(), capture_output=True, text=True, timeout=60, check=True
        ).stdout
    assert commands[1][1].endswith(f"prints its result: {printed.strip()}")


def test_the_readme_shows_the_whole_sample_app() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert (ROOT / "etc/examples/greetings.py").read_text() in blocks


@pytest.mark.timeout(120)
def test_the_first_app_prints_its_result() -> None:
    page = (ROOT / "docs/guide/first-app.md").read_text()
    start, use, look = steps(page)
    assert start.commands == 'export FORQ_STATE_DIR="$PWD/.state"\nforq run --app tasks:app --reload\n'
    directory = Path(tempfile.mkdtemp(prefix="forq-first-"))
    (directory / "tasks.py").write_text(files(page)["tasks.py"])
    environment = {**environ(), "PATH": f"{BIN}:{os.environ['PATH']}"}
    with open(directory / "log", "wb") as log:
        supervisor = subprocess.Popen(
            ["sh", "-c", start.commands.replace("\nforq", "\nexec forq")],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        shell = Shell(directory, environment)
        shell.run('export FORQ_STATE_DIR="$PWD/.state"\n')
        wait_until(lambda: shell.run("forqctl status --check\n")[1] == 0, 60.0, "the supervisor is up")
        assert shell.run(use.commands) == (use.output, 0), shell.errors()
        printed, code = shell.run(look.commands)
        assert code == 0, shell.errors()
        assert "greet(name: str) -> str" in printed
        shell.errors()
    finally:
        supervisor.terminate()
        supervisor.wait(60)
        shutil.rmtree(directory)
