"""Reports which tests show the behaviours of docs/design/spec.md and the faults of docs/design/faults.md.

Tests name them with `@pytest.mark.spec("N1")` and `@pytest.mark.fault("row")`.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "design" / "faults.md"
_TEST = re.compile(r"^- `([\w/]+\.py::\w+)`$", re.MULTILINE)


def _run(letter: str, first: int, last: int) -> list[str]:
    return [f"{letter}{number}" for number in range(first, last + 1)]


# The behaviours that this release promises; --spec-report wants a passing test for each.
SPEC_IDS: tuple[str, ...] = (
    *_run("N", 1, 25),
    *_run("Q", 1, 40),
    *_run("R", 1, 17),
    *_run("M", 1, 13),
    *_run("P", 1, 22),
)


class MarkReport:
    """A pytest plugin: adds a section to the summary, and fails the session if a wanted name has no passing test."""

    def __init__(self, mark: str, wanted: Sequence[str]) -> None:
        self.wanted = tuple(wanted)
        self._mark = mark
        self._names_of_test: dict[str, list[str]] = {}
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            names = [str(name) for mark in item.iter_markers(self._mark) for name in mark.args]
            if names:
                self._names_of_test[item.nodeid] = names

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._gaps() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tests = self._tests_by_name()
        terminalreporter.section(f"{self._mark} report")
        for name in [*self.wanted, *sorted(set(tests) - set(self.wanted))]:
            count = f"{len(tests[name])} passing" if name in tests else "NO PASSING TEST"
            terminalreporter.write_line(f"{name:<4} {count}")
            for nodeid in tests.get(name, ()):
                terminalreporter.write_line(f"       {nodeid}")
        gaps = self._gaps()
        missing = f"; missing: {', '.join(gaps)}" if gaps else ""
        terminalreporter.write_line(f"{len(self.wanted) - len(gaps)} of {len(self.wanted)} shown{missing}")

    def _gaps(self) -> list[str]:
        tests = self._tests_by_name()
        return [name for name in self.wanted if name not in tests]

    def _tests_by_name(self) -> dict[str, list[str]]:
        tests: dict[str, list[str]] = defaultdict(list)
        for nodeid, names in self._names_of_test.items():
            if nodeid in self._passed - self._failed:
                for name in names:
                    tests[name].append(nodeid)
        return dict(tests)


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
