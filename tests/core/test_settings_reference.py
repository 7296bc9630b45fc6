"""The files that are generated from the table of settings."""

import subprocess
import sys
from pathlib import Path

import pytest

from forq.ctl.commands import all_commands
from forq.settings import (
    APP,
    BRIDGE,
    DEFINITION,
    METRICS,
    OPTIONS,
    PIPELINE,
    SCHEDULE,
    SERVICE,
    TASK,
    Setting,
    option_names,
)

ROOT = Path(__file__).resolve().parents[2]
FILES = ("etc/forq.toml", "docs/reference/settings.md")
SECTIONS = (SERVICE, PIPELINE, METRICS, BRIDGE, APP, TASK, DEFINITION, OPTIONS, SCHEDULE)


def write(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "etc" / "write_settings.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_the_committed_files_are_up_to_date() -> None:
    assert write("--check") == (0, "")


def test_an_old_file_is_noticed_and_written_anew(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / FILES[0]).write_text((ROOT / FILES[0]).read_text())
    told = f"out of date: {FILES[1]}; run: make settings\n"
    assert write("--check", "--root", str(tmp_path)) == (1, told)
    assert write("--root", str(tmp_path)) == (0, "")
    assert [(tmp_path / name).read_text() for name in FILES] == [(ROOT / name).read_text() for name in FILES]


@pytest.mark.parametrize("file", FILES)
def test_every_setting_is_in_both_files_with_its_help(file: str) -> None:
    words = " ".join((ROOT / file).read_text().replace("#", " ").split())
    for rows in SECTIONS:
        for name, row in rows.items():
            assert name in words
            # A reference to another page is a link in one of them.
            assert row.help.partition("docs/")[0].rstrip("( ") in words, name


@pytest.mark.parametrize(
    ("command", "flag", "row"),
    [
        ("create", "--mode", DEFINITION["mode"]),
        ("schedule", "--overlap", SCHEDULE["overlap"]),
        ("schedule", "--catch-up", SCHEDULE["catch_up"]),
    ],
)
def test_forqctl_offers_the_words_of_the_table(command: str, flag: str, row: Setting) -> None:
    """It does not import the table, which takes time."""
    [declared] = [each for each in all_commands() if each.name == command]
    [argument] = [each for each in declared.arguments if flag in each.names]
    assert argument.keywords["choices"] == row.range


def test_completion_knows_every_option_with_a_help_of_one_line() -> None:
    names = option_names()
    assert list(names) == list(OPTIONS)
    assert all(text and "\n" not in text for text in names.values())
