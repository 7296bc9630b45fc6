"""The trace context of a new job."""

import sys
from types import ModuleType

import pytest

from forq.job import current_trace


def test_there_is_none_while_another_thread_imports_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.context", ModuleType("opentelemetry.context"))
    assert current_trace() is None
