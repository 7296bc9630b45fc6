"""The faults of docs/design/faults.md, and the tests that are marked with each of them."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "design" / "faults.md"
_TEST = re.compile(r"^- `([\w/]+\.py::\w+)`$", re.MULTILINE)


@cache
def fault_rows() -> dict[str, list[str]]:
    """Fault -> the tests that the page names, as FILE::TEST with the file's path below tests/."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^### ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        fault, _, text = section.partition("\n")
        assert fault not in found, f"{PAGE.name} has {fault!r} twice"
        found[fault] = _TEST.findall(text.partition("\n## ")[0])
    return found


@cache
def marked_tests() -> dict[str, set[str]]:
    """Fault -> all tests with `@pytest.mark.fault(ROW)`, read from their source."""
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
