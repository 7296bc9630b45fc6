"""Which test shows what: collects the marks of tests, such as `@pytest.mark.spec("N1")`, and how these tests ended."""

from collections import defaultdict
from collections.abc import Sequence

import pytest


class MarkReport:
    """A plugin of pytest: a section at the end, and a failed session if something is shown by no test."""

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
