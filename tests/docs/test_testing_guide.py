"""The guide to testing: its files make a project, whose tests pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/guide/testing.md"
_FILE = re.compile(r"# (\w+\.py)\n")


def test_the_project_of_the_guide_passes(tmp_path: Path) -> None:
    names = []
    for block in blocks(PAGE):
        found = _FILE.match(block.text)
        name = found[1] if found else "pytest.ini"
        assert block.language == ("python" if found else "ini"), str(block)
        assert name not in names, f"{block}: another block has this name"
        names.append(name)
        (tmp_path / name).write_text(block.text)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    tests = sum(line.strip().startswith(("def test_", "async def test_")) for line in all_lines())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{tests} passed" in ran.stdout
    assert tests >= 12


def all_lines() -> list[str]:
    return [line for block in blocks(PAGE) for line in block.text.splitlines()]
