"""Spans of one process: the file they are written to, and the delay at its end."""

import socket
import time
from pathlib import Path

import pytest

from forq.job import Job
from forq.workers.tracing import FLUSH_SECONDS, Tracing

JOB = Job("q", "a", "a", None, 5, 0.0, 1)


def test_the_span_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    tracing = Tracing(f"file:{tmp_path / 'spans'}")
    with tracing.attempt(JOB):
        pass
    tracing.close()
    assert (tmp_path / "spans").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "spans").read_text().count("\n") == 1


def test_an_unresponsive_collector_delays_the_exit_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracing = Tracing("otlp")
        with tracing.attempt(JOB):
            pass
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < FLUSH_SECONDS + 2
