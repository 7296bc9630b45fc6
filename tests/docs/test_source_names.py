"""The design pages and CONTRIBUTING.md name existing source files, and the README repeats measured figures."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/design").rglob("*.md"))]
_CODE = re.compile(r"`([^`\n]+)`")
_FOLDERS = "src|supervisor|workers|tests|etc|benchmarks|docs|broker|services|output|procs|ctl|bridge|pipeline"
_SOURCE = re.compile(rf"(?:{_FOLDERS})/[\w./-]*|[\w./-]+\.(?:py|lua|c|sh|pml)")
# Fault pages name tests below tests/, contracts name folders below src/forq/.
_BASES = ("", "tests", "src/forq", "docs/design/model")
# Written by a run, not part of a clone.
_MADE = ("benchmarks/.peers", "benchmarks/.results")


def missing(text: str) -> list[str]:
    """The files and folders in backquotes that do not exist."""
    named = [
        code.partition("::")[0].partition(" ")[0]
        for code in _CODE.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    ]
    sources = [name for name in named if _SOURCE.fullmatch(name) and not name.startswith(_MADE)]
    return [name for name in sources if not (any((ROOT / base / name).exists() for base in _BASES) or _is_test(name))]


def _is_test(name: str) -> bool:
    """Whether it is the name of a test file without its folder."""
    return "/" not in name and next((ROOT / "tests").rglob(name), None) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_a_file_that_does_not_exist_is_found() -> None:
    assert missing("`workers/loop.py`, `workers/none.py`, `forqctl`, `tests/none/`") == [
        "workers/none.py",
        "tests/none/",
    ]


def test_the_readme_has_the_measured_recovery_times() -> None:
    """The comparison is typed by hand; the table of performance.md is generated."""
    performance = (ROOT / "docs/design/performance.md").read_text()
    table = re.search(r"<!-- table waiting -->\n(.*?)<!-- end -->", performance, re.DOTALL)
    assert table is not None
    measured = {cells[0]: cells[-2:] for cells in map(_cells, table[1].splitlines()[2:])}
    rows = {
        cells[0]: cells[1:] for cells in map(_cells, (ROOT / "README.md").read_text().splitlines()) if len(cells) == 7
    }
    peers = [name.partition(" ")[0].lower() for name in rows[""]]
    assert rows["job's process killed: again after s"] == [measured[peer][0] for peer in peers]
    assert rows["whole worker killed: s"] == [measured[peer][1] for peer in peers]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
