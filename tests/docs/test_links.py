"""Every link of the documentation leads somewhere, and every page is short enough to read."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import GENERATED, PAGES, ROOT, anchors, links

LONGEST_PAGE = 400
LONGEST_LINE = 160
# Comments, help texts, messages and configuration that name a page.
CODE = ("src", "supervisor", "workers", "etc", "tests", "benchmarks", "Makefile", "pyproject.toml", "setup.cfg", ".ci")
BINARY = {".pyc", ".so", ".png", ".svg", ".gz", ".whl", ".parquet"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def broken(page: Path) -> list[str]:
    found = []
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        if not destination.exists():
            found.append(f"{line}: no such file: {target}")
        elif anchor and anchor not in anchors(destination):
            found.append(f"{line}: no such heading: {target}")
    return found


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: `of` one\n\n[here](#a-page-of-one) [x](#nowhere) [y](none.md) [z](page.md#a-page)\n"
        "`[code](none.md)`\n\n```text\n[code](none.md)\n```\n\n## Twice\n## Twice\n[both](#twice) [second](#twice-1) [u](http://none)\n"
    )
    assert broken(page) == [
        "3: no such heading: #nowhere",
        "3: no such file: none.md",
        "3: no such heading: page.md#a-page",
    ]


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target.partition("#")[0]).resolve() for _, target in links(index)}
    assert [str(page) for page in PAGES if page.is_relative_to(index.parent) and page not in {index, *listed}] == []


@each_page
def test_no_page_is_too_long_and_no_line_too_wide(page: Path) -> None:
    if page in GENERATED:
        return
    lines = page.read_text().splitlines()
    assert len(lines) <= LONGEST_PAGE
    assert [f"{number}: {len(line)}" for number, line in enumerate(lines, 1) if len(line) > LONGEST_LINE] == []


def code_files() -> Iterator[Path]:
    for name in CODE:
        place = ROOT / name
        for file in [place] if place.is_file() else place.rglob("*"):
            # What the benchmarks have downloaded is in a hidden directory.
            hidden = any(part.startswith(".") for part in file.relative_to(place).parts)
            if file.is_file() and not hidden and not file.is_symlink() and file.suffix not in BINARY:
                yield file


def test_every_page_that_the_code_names_exists() -> None:
    named = {
        (name, str(file.relative_to(ROOT)))
        for file in code_files()
        for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|sh|pml)\b", file.read_text(errors="replace"))
    }
    assert {name for name, _ in named} >= {"docs/guide/redis.md", "docs/reference/settings.md"}
    assert [(name, file) for name, file in sorted(named) if not (ROOT / name).exists()] == []
