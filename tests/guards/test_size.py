"""The product does not grow in a refactoring: Python files and lines by folder."""

from collections import Counter
from pathlib import Path

from tests.guards.recording import RECORD, RECORDED

ROOT = Path(__file__).resolve().parents[2]
TABLE = RECORDED / "size.txt"


def product() -> dict[str, tuple[int, int]]:
    """Files and lines of each folder of the product; top-level files of src/forq count under its name."""
    files, lines = Counter[str](), Counter[str]()
    for top in ("src", "supervisor", "workers"):
        for path in (ROOT / top).rglob("*.py"):
            folder = path.relative_to(ROOT).parts
            if not any((ROOT / Path(*folder[:depth])).is_symlink() for depth in range(1, len(folder))):
                name = folder[2] if folder[0] == "src" and len(folder) > 3 else folder[0]
                files[name] += 1
                lines[name] += len(path.read_text().splitlines())
    assert {"broker", "ctl", "pipeline", "services", "supervisor", "workers"} <= set(files), "each is found once"
    return {name: (files[name], lines[name]) for name in sorted(files)}


def table(counted: dict[str, tuple[int, int]]) -> str:
    rows = [f"{name} {files} files {lines} lines" for name, (files, lines) in counted.items()]
    total = [sum(column) for column in zip(*counted.values(), strict=True)]
    return "\n".join([*rows, f"total {total[0]} files {total[1]} lines"]) + "\n"


def test_the_product_has_no_more_files_and_lines_than_recorded() -> None:
    now = table(product())
    if RECORD:
        TABLE.write_text(now)
    _, files, _, lines, _ = now.splitlines()[-1].split()
    _, most_files, _, most_lines, _ = TABLE.read_text().splitlines()[-1].split()
    assert int(files) <= int(most_files)
    assert int(lines) <= 1.01 * int(most_lines)
