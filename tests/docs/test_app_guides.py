"""The guides about apps: their modules are served by a real supervisor, their scripts and tables are run.

A python block that begins with `# NAME.py` is a module. The others are scripts, run in order in one namespace; a
comment after `print(…)` is its output. In a table whose last column is "forq", the code of that column is run, too.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from forq.cli import parser_for
from forq.errors import ForqError
from tests.docs.pages import APP_GUIDES, Block, blocks, code_spans, rows
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

_MODULE = re.compile(r"# (\w+)\.py\n")
_PRINT = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)
each_page = pytest.mark.parametrize("page", APP_GUIDES, ids=lambda page: page.name)


def module_name(block: Block) -> str | None:
    found = _MODULE.match(block.text)
    return found[1] if found else None


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The modules of all pages, importable."""
    directory = tmp_path_factory.mktemp("guides")
    names = []
    for page in APP_GUIDES:
        for block in python_blocks(page):
            if name := module_name(block):
                assert name not in names, f"{block}: another page has a module of this name"
                names.append(name)
                (directory / f"{name}.py").write_text(block.text)
    sys.path.insert(0, str(directory))
    try:
        yield directory
    finally:
        sys.path.remove(str(directory))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def forq(directory: Path) -> Iterator[Forq]:
    settings = ""
    for file in sorted(directory.glob("*.py")):
        app = import_module(file.stem).app
        settings += f'[apps.{app.name}]\napp = "{file.stem}:app"\npath = ["{directory}"]\n\n'
    with running(settings=settings) as forq:
        wait_until(lambda: forq.run_ctl("status", "--check").returncode == 0, 60.0, "all queues run")
        yield forq


@each_page
def test_the_code_of_the_page_runs_and_prints_what_it_says(
    page: Path, forq: Forq, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORQ_REDIS", forq.url)
    names: dict[str, Any] = {"__name__": "page"}
    scripts = [block for block in python_blocks(page) if module_name(block) is None]
    for block in scripts:
        capsys.readouterr()
        exec(compile(block.text, str(block), "exec"), names)
        assert capsys.readouterr().out.splitlines() == _PRINT.findall(block.text), str(block)
    for number, code in enumerate(forq_column(page)):
        run_cell(code, number, names)
    assert scripts


def forq_column(page: Path) -> Iterator[str]:
    """The Python code in the last column of tables whose last column is forq's."""
    for row in rows(page, "forq"):
        for code in re.findall(r"`([^`]+)`", row[-1]):
            # Commands are checked by test_commands; `.id` stands for an attribute.
            if not re.match(r"(forq|forqctl) |\.", code):
                yield code


def run_cell(code: str, number: int, names: dict[str, Any]) -> None:
    if code.startswith("@"):
        exec(f"{code}\ndef example{number}() -> None: pass", names)
    elif code.startswith("raise "):
        with pytest.raises(ForqError):
            exec(code, names)
    elif isinstance(ast.parse(code).body[0], ast.Expr):
        eval(code, names)
    else:
        exec(code, names)


@each_page
def test_the_commands_of_forq_in_the_page_have_valid_arguments(page: Path) -> None:
    for code in code_spans(page):
        # A name alone stands for the command, such as `forq app`.
        if code.startswith("forq ") and len(code.split()) > 2:
            words = code.split()[1:]
            parser_for(words[0]).parse_args(words)


def test_cells_that_fail_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| RQ | forq |\n|---|---|\n| `a` | `1 / 0`, or `forq run` |\n\n| forq | RQ |\n|---|---|\n| `b` | `c` |\n"
    )
    assert list(forq_column(page)) == ["1 / 0"]
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0", 0, {})
