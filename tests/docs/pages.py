"""Pages of the documentation: their links, headings and code blocks, as GitHub renders them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("etc/examples/*/README.md")),
]
# Written by `make reference` and `make settings`.
GENERATED = {ROOT / "docs/reference/forqctl.md", ROOT / "docs/reference/settings.md"}
# Run by test_app_guides.
APP_GUIDES = [
    ROOT / "docs/guide" / f"{name}.md"
    for name in (
        "first-app",
        "async",
        "task-results",
        "task-errors",
        "flows",
        "hooks",
        "from-celery",
        "from-rq",
        "from-dramatiq",
    )
]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced code blocks, without the indentation of their list item."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        indent, language, body = fence.groups()
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(page, text.count("\n", 0, fence.start()) + 1, language, body))
    return found


def prose(page: Path) -> str:
    """The page without its code blocks and code spans, with the same line numbers."""
    without_blocks = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text())
    return re.sub(r"`[^`\n]*`", "code", without_blocks)


def links(page: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of each link and image that is not a URL."""
    for number, line in enumerate(prose(page).splitlines(), 1):
        for target in _LINK.findall(line):
            if "://" not in target:
                yield number, target


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = _FENCE.sub("", page.read_text())
    seen: dict[str, int] = {}
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text()))


def rows(page: Path, last_column: str) -> Iterator[list[str]]:
    """The rows of the tables whose last column has this heading."""
    inside = False
    for line in _FENCE.sub("", page.read_text()).splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if inside and not set(line) <= set("|-"):
            yield cells
        inside = inside or cells[-1] == last_column
