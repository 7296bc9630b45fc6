"""The rows of docs/design/faults.md, and the tests that say of themselves that they show one."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
TABLE = TESTS.parent / "docs" / "design" / "faults.md"
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def fault_rows() -> dict[str, list[str]]:
    """Row -> the tests that it names, as FILE::TEST with the file's path below tests/."""
    found: dict[str, list[str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[0] != "fault" and not set(cells[0]) <= set("-: "):
            assert cells[0] not in found, f"{TABLE.name} has two rows {cells[0]!r}"
            found[cells[0]] = [f"{file}::{name}" for file, name in _TEST.findall(cells[3])]
    return found


@cache
def marked_tests() -> dict[str, set[str]]:
    """Row -> all tests with `@pytest.mark.fault(ROW)`, read from their source."""
    found: dict[str, set[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for row in _rows_of(node):
                    found.setdefault(row, set()).add(f"{file.relative_to(TESTS)}::{node.name}")
    return found


def _rows_of(test: ast.FunctionDef) -> list[str]:
    marks = [mark for mark in test.decorator_list if isinstance(mark, ast.Call)]
    faults = [mark for mark in marks if ast.unparse(mark.func) == "pytest.mark.fault"]
    return [str(ast.literal_eval(argument)) for mark in faults for argument in mark.args]
