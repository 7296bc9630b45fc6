"""When peers are installed again: for other packages, and once a day for newer versions."""

import os
import time
import venv
from pathlib import Path

import pytest

from benchmarks import installing
from benchmarks.installing import Unavailable, python_venv


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that would have run; the environments are directories without content."""
    ran: list[list[str]] = []

    def create(directory: Path, *, with_pip: bool) -> None:
        directory.mkdir()

    def run(command: list[str], cwd: Path | None = None) -> str:
        ran.append(command)
        return ""

    monkeypatch.setattr(installing, "PEERS_DIR", tmp_path)
    monkeypatch.setattr(venv, "create", create)
    monkeypatch.setattr(installing, "run", run)
    return ran


def make_old(ready: Path) -> None:
    yesterday = time.time() - 100_000
    os.utime(ready, (yesterday, yesterday))


def test_a_peer_is_installed_once(commands: list[list[str]]) -> None:
    python_venv("huey", ["huey"])
    python_venv("huey", ["huey"])
    assert [command[-1] for command in commands] == ["huey"]


def test_other_packages_are_installed_anew(commands: list[list[str]], tmp_path: Path) -> None:
    python_venv("huey", ["huey"])
    (tmp_path / "huey" / "left-over").touch()
    python_venv("huey", ["huey", "redis"])
    assert [command[-1] for command in commands] == ["huey", "redis"]
    assert not (tmp_path / "huey" / "left-over").exists()


def test_after_a_day_newer_versions_are_installed(commands: list[list[str]], tmp_path: Path) -> None:
    python_venv("huey", ["huey"])
    make_old(tmp_path / "huey" / ".ready")
    python_venv("huey", ["huey"])
    python_venv("huey", ["huey"])
    assert len(commands) == 2
    assert "--upgrade" in commands[1]


def test_without_a_registry_the_installed_version_stays(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_venv("huey", ["huey"])
    make_old(tmp_path / "huey" / ".ready")

    def refuse(command: list[str], cwd: Path | None = None) -> str:
        raise Unavailable("no network")

    monkeypatch.setattr(installing, "run", refuse)
    assert python_venv("huey", ["huey"]) == tmp_path / "huey" / "bin" / "python"
