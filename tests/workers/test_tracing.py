"""Spans of one process: the file they are written to, and the delay at its end."""

import socket
import time
from pathlib import Path

import pytest

from forq.job import Job
from forq.workers.tracing import FLUSH_SECONDS, Tracing

JOB = Job("q", "a", "a", None, 5, 0.0, 1)


def test_the_file_of_spans_is_for_its_owner_alone(tmp_path: Path) -> None:
    tracing = Tracing(f"file:{tmp_path / 'spans'}")
    with tracing.attempt(JOB):
        pass
    tracing.close()
    assert (tmp_path / "spans").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "spans").read_text().count("\n") == 1


def test_a_collector_that_does_not_answer_holds_up_the_end_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracing = Tracing("otlp")
        with tracing.attempt(JOB):
            pass
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < FLUSH_SECONDS + 2
